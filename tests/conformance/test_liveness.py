"""Liveness: what can never end is a finding, with the cycle that it goes round in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from blockstep.conformance.lockstep.liveness import Watch, is_same_state
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Drain, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.spec import Config, Oracle, Plan, Policy, Request, Submit
from blockstep.spec.profiles import get_profile

CONFIG = Config(
    num_blocks=6,
    block_size=1,
    max_model_len=8,
    policy=Policy.PRIORITY,
    enable_prefix_caching=False,
    long_prefill_token_threshold=1,
    scheduler_reserve_full_isl=False,
)
EQUALS = (
    Submit(Request("A", (1, 2, 3, 4, 5), max_tokens=1)),
    Submit(Request("B", (6, 7, 8, 9, 0), max_tokens=1)),
)


RELEASE = get_profile("vllm-0.19.1")
assert RELEASE is not None
Release = partial(SpecEngine, profile=RELEASE)
"""The specification with the quirks of a release."""


def test_a_state_that_returns_is_known_by_its_cycle() -> None:
    oracle = Release(CONFIG)
    for action in EQUALS[:2]:
        oracle.apply(action)
    watch, why = Watch(), ""
    while not why:
        plan = oracle.schedule()
        why = watch.see(plan, False, False, oracle.snapshot())
        if plan.rows:
            oracle.commit(plan, {})
    assert why == f"the same state returns after {len(watch.cycle)} plans that delivered no token"
    finding = watch.stall({"A": EQUALS[0].request}, why)
    assert (finding.kind, finding.property_id) == (FindingKind.LIVENESS, "P10")
    assert finding.message.endswith("unfinished: A")
    assert [row.field for row in finding.differences] == ["cycle"] * len(watch.cycle)
    assert any("preempted" in row.seen for row in finding.differences)


def test_under_its_profile_the_livelock_of_a_release_is_known() -> None:
    assert RELEASE is not None
    run, findings = run_program(Program(CONFIG, (*EQUALS, Drain())), Release, RELEASE)
    assert findings == []
    assert run.known["P10"] >= 1


def test_the_host_engine_ends_them() -> None:
    _, findings = run_program(Program(CONFIG, (*EQUALS, Drain())), load_engine("host"))
    assert findings == []


def test_progress_is_what_separates_a_cycle_from_a_run() -> None:
    oracle = Oracle(Config(num_blocks=6, block_size=2, max_model_len=16))
    oracle.submit(Request("A", (1, 2), max_tokens=5))
    watch = Watch()
    for token in range(4):
        plan = oracle.schedule()
        assert watch.see(plan, False, False, oracle.snapshot()) == ""
        oracle.commit(plan, {"A": [token]})


def test_an_empty_plan_is_no_stall_while_a_frame_is_in_flight() -> None:
    assert Watch().see(Plan(3), True, False, None) == ""
    assert Watch().see(Plan(3), False, False, None) == (
        "a plan is empty although nothing is due from outside"
    )
    assert Watch().see(Plan(3, preempted_req_ids=("A",)), False, False, None) == ""


def test_counters_do_not_tell_states_apart() -> None:
    oracle = Oracle(CONFIG)
    before = oracle.snapshot()
    oracle.schedule()
    assert is_same_state(before, oracle.snapshot())
    assert not is_same_state(before, replace(before, free_queue=before.free_queue[::-1]))


def test_a_token_in_flight_is_no_cycle() -> None:
    # B is resumed and preempted by turns until the token of A comes in.
    config = replace(
        CONFIG,
        num_blocks=4,
        policy=Policy.FCFS,
        max_frames_in_flight=4,
        async_scheduling=True,
        max_model_len=64,
    )
    actions = [Submit(Request(name, (0, 0), max_tokens=1)) for name in "AB"]
    _, findings = run_program(Program(config, (*actions, Drain())), SpecEngine)
    assert findings == []
