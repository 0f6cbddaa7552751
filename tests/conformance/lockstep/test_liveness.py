"""Liveness: a run that never ends is a finding, which shows the plans that repeat."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from foreign_support.toys import AbortingToy, fit_config

from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.conformance.lockstep import liveness
from blockstep.conformance.lockstep.liveness import (
    LINES_MAX,
    Watch,
    drain_bound,
    idle_bound,
    is_same_state,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Drain, Program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.impl.host import HostEngine
from blockstep.impl.host.lives import take_back
from blockstep.spec import Config, Oracle, Plan, Policy, Request, Submit
from blockstep.spec import vocabulary as v
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


def test_a_state_that_returns_is_a_finding_with_its_cycle() -> None:
    oracle = Release(CONFIG)
    for action in EQUALS[:2]:
        oracle.apply(action)
    watch, why = Watch(), ""
    for _ in range(20):
        plan = oracle.schedule()
        why = watch.see(plan, False, False, oracle.snapshot())
        if why:
            break
        if plan.rows:
            oracle.commit(plan, {})
    assert why == f"the same state returns after {len(watch.cycle)} plans that delivered no token"
    finding = watch.stall({"A": EQUALS[0].request}, why)
    assert (finding.kind, finding.property_id) == (FindingKind.LIVENESS, "P10")
    assert finding.message.endswith("unfinished: A")
    assert [row.field for row in finding.differences] == ["cycle"] * len(watch.cycle)
    assert any("preempted" in row.seen for row in finding.differences)


def test_under_its_profile_the_livelock_of_a_release_is_no_finding() -> None:
    assert RELEASE is not None
    run, findings = run_program(Program(CONFIG, (*EQUALS, Drain())), Release, RELEASE)
    assert findings == []
    assert run.known["P10"] >= 1


def test_the_host_engine_finishes_two_equal_requests() -> None:
    _, findings = run_program(Program(CONFIG, (*EQUALS, Drain())), load_engine("host"))
    assert findings == []


def test_a_run_that_delivers_tokens_is_no_cycle() -> None:
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
        "a plan is empty, although no output, load or other event is due"
    )
    assert Watch().see(Plan(3, preempted_req_ids=("A",)), False, False, None) == ""


LOAD = v.KVLoad("A", ((1,),), 0, 1, is_async=True)


@pytest.mark.parametrize(
    "plan",
    [Plan(3, kv_loads=(LOAD,)), Plan(3, preempted_req_ids=("A",))],
    ids=["load", "preemption"],
)
def test_plans_that_load_or_preempt_for_ever_are_a_stall(plan: Plan) -> None:
    """The engine shows no state, so only the plans can be counted."""
    watch = Watch()
    for _ in range(idle_bound(1)):
        assert watch.see(plan, False, False, None, (0, 1)) == ""
    assert watch.see(plan, False, False, None, (0, 1)) == (
        "7 plans without rows loaded or preempted"
    )
    assert watch.see(plan, False, False, None, (1, 1)) == "", "a token was delivered"


def test_a_state_that_returns_with_a_load_is_a_cycle() -> None:
    state, watch = in_the_middle(), Watch()
    plan = Plan(3, kv_loads=(LOAD,))
    assert watch.see(plan, False, False, state, (0, 1)) == ""
    assert watch.see(plan, False, False, state, (0, 1)).startswith("the same state returns")


class LoadsAgain(HostEngine):
    """An engine whose next plan drops each finished load and loads it again, for ever."""

    def _schedule(self) -> v.Plan | v.Rejected:
        for slot in [] if self.transfers is None else self.transfers.list_received():
            take_back(self.requests.state, slot)
        return super()._schedule()


@pytest.mark.parametrize("is_hidden", [False, True], ids=["shown", "hidden"])
def test_a_load_that_is_dropped_and_repeated_for_ever_is_found(is_hidden: bool) -> None:
    class Foreign(LoadsAgain):
        traits = EngineTraits(equivalence=Safety())

        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - ({"snapshot"} if is_hidden else set())

        def snapshot(self) -> Any:
            return None if is_hidden else super().snapshot()

    config = Config(num_blocks=6, block_size=1, max_model_len=8, kv_connector=True)
    request = Request("A", (1, 2, 3), max_tokens=1)
    actions = (Submit(request), v.KVOffer("A", 2, is_async=True), Drain())
    run, findings = run_program(Program(config, actions), Foreign)
    assert [found.property_id for found in findings] == ["P10"]
    assert run.num_events < 40


# A state that returns.


def in_the_middle() -> v.Snapshot:
    """One request runs with a frame in flight, and one waits."""
    oracle = Oracle(replace(CONFIG, max_num_seqs=1))
    for action in EQUALS:
        oracle.apply(action)
    oracle.schedule()
    return oracle.snapshot()


ONLY_GROWS = {
    "frames_in_flight": (7,),
    "next_frame_id": 8,
    "finished_req_ids": ("Z",),
    "stats": v.Stats(preemptions=9),
    "has_work": False,
}
"""Fields that do not distinguish two states, with another value."""
OTHER = {
    "encoder": v.EncoderSnapshot(num_free=1),
    "pause_state": v.PauseState.PAUSED_NEW,
    "waiting": ("A",),
    "skipped_waiting": ("B",),
    "running": ("B",),
    "requests": (),
    "ref_counts": (2,) * 6,
    "free_queue": (),
    "block_keys": (v.BlockKey(None, (1,)),) * 6,
    "cached": {v.BlockKey(None, (1,)): (1,)},
    "prev_scheduled_req_ids": (),
    "transfers": v.TransfersSnapshot(received=("A",)),
    "pins": v.PinsSnapshot(now=1),
    "admission_closed": True,
}
"""The other fields with another value; each one alone distinguishes two states."""
OTHER_REQUEST = {
    "request_id": "C",
    "status": v.Status.PREEMPTED,
    "output_token_ids": (1,),
    "num_computed_tokens": 3,
    "num_output_placeholders": 1,
    "spec_token_ids": (1,),
    "is_prefill_chunk": False,
    "block_tables": ((5,),),
    "num_cached_blocks": (1,),
    "num_cached_tokens": 4,
    "grammar_ready": True,
    "grammar_state": 1,
    "reasoning_ended": True,
    "prompt_token_ids": (1,),
    "num_streaming_updates": 1,
}


def test_each_field_of_a_state_is_listed_as_compared_or_not() -> None:
    assert {f.name for f in fields(v.Snapshot)} == ONLY_GROWS.keys() | OTHER.keys()
    of_request = {f.name for f in fields(v.RequestSnapshot)}
    assert of_request == OTHER_REQUEST.keys() | {"num_preemptions"}


@pytest.mark.parametrize("name", ONLY_GROWS)
def test_a_field_that_only_grows_does_not_distinguish_states(name: str) -> None:
    state = in_the_middle()
    other = replace(state, **{name: ONLY_GROWS[name]})  # type: ignore[arg-type]
    assert other != state
    assert is_same_state(state, other)


def test_the_number_of_preemptions_does_not_distinguish_states() -> None:
    state = in_the_middle()
    requests = tuple(replace(one, num_preemptions=3) for one in state.requests)
    assert is_same_state(state, replace(state, requests=requests))


def test_the_number_of_frames_in_flight_distinguishes_states() -> None:
    state = in_the_middle()
    assert not is_same_state(state, replace(state, frames_in_flight=()))


@pytest.mark.parametrize("name", OTHER)
def test_each_other_field_distinguishes_states(name: str) -> None:
    state = in_the_middle()
    assert not is_same_state(state, replace(state, **{name: OTHER[name]}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OTHER_REQUEST)
def test_each_other_field_of_a_request_distinguishes_states(name: str) -> None:
    state = in_the_middle()
    one = replace(state.requests[0], **{name: OTHER_REQUEST[name]})  # type: ignore[arg-type]
    assert not is_same_state(state, replace(state, requests=(one, *state.requests[1:])))


def test_a_token_for_any_request_restarts_the_search_for_a_cycle() -> None:
    """The search also restarts if the request that got the token has finished."""
    state, plan = in_the_middle(), Plan(0, new=(v.NewRow(EQUALS[0].request, ((1,),), 0, 1),))
    first = replace(state.requests[0], output_token_ids=(1,))
    for progress in (replace(state, requests=(first, state.requests[1])),
                     replace(state, requests=state.requests[:1])):  # fmt: skip
        watch = Watch()
        assert watch.see(plan, False, False, state) == ""
        assert watch.see(plan, False, False, progress) == ""
        assert watch.see(plan, False, False, state) == ""
        assert watch.see(plan, False, False, state) != ""


def test_a_state_returns_although_similar_states_came_in_between() -> None:
    """The states have equal queues, which are compared first because that is cheap."""
    state, plan = in_the_middle(), Plan(0, new=(v.NewRow(EQUALS[0].request, ((1,),), 0, 1),))
    between = [replace(state, ref_counts=(count,) * 6) for count in (3, 4)]
    watch = Watch()
    for after in (state, *between):
        assert watch.see(plan, False, False, after) == ""
    assert watch.see(plan, False, False, between[0]) == (
        "the same state returns after 2 plans that delivered no token"
    )


def test_only_the_beginning_of_a_long_cycle_is_shown() -> None:
    watch = Watch(cycle=[Plan(index) for index in range(LINES_MAX + 1)])
    shown = watch.stall({}, "it stands").differences
    assert len(shown) == LINES_MAX + 1
    assert shown[-1].seen == f"... {LINES_MAX + 1} plans in all"
    watch.cycle.pop()
    assert len(watch.stall({}, "it stands").differences) == LINES_MAX


class EndsLater(AbortingToy):
    """An engine whose aborted requests end with the next plan."""

    def apply(self, event: v.Event) -> v.Observation:
        seen = super().apply(event)
        return v.Aborted((), seen.request_ids) if isinstance(seen, v.Aborted) else seen


def test_an_empty_plan_that_ends_the_last_requests_is_no_stall() -> None:
    config = fit_config(Config(num_blocks=6, block_size=2, max_model_len=16))
    actions = (Submit(Request("A", (1,), max_tokens=2)), v.Abort(("A",)), Drain())
    run, findings = run_program(Program(config, actions), EndsLater)
    assert findings == []
    assert run.live == {}


# The bound.


class Slow(AbortingToy):
    """An engine without a visible state: all plans except the first and the last ones preempt A."""

    num_plans_in_all = 0

    def capabilities(self) -> frozenset[str]:
        return frozenset()

    def snapshot(self) -> Any:
        return None

    def plan(self) -> Plan:
        left = self.num_plans_in_all - self.num_plans
        if self.num_plans == 0:
            return super().plan()
        if left > 1:
            assert left < 200, "the drain does not end"
            self.num_plans += 1
            return Plan(self.num_plans - 1, preempted_req_ids=("A",))
        (life,), tokens = self.running, tuple(self.running[0].tokens)
        life.num_computed, self.last = 0, []
        plan = super().plan()
        (row,) = plan.cached
        whole = replace(row, resumed=True, new_block_ids=(life.blocks,), all_token_ids=tokens)
        return replace(plan, cached=(whole,))


def test_the_bound_grows_with_the_tokens_and_the_number_of_requests() -> None:
    few = {"A": Request("A", (1, 2), max_tokens=3)}
    assert drain_bound({}) == 20
    assert drain_bound(few) == 20 + 5 * 2
    assert drain_bound({**few, "B": Request("B", (1,) * 50, max_tokens=50)}) == 20 + 105 * 3


@pytest.mark.parametrize("too_many", [0, 1])
def test_an_engine_that_needs_more_plans_than_the_bound_stalls(
    too_many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the bound can find it: no state is shown, each plan preempts a request, and the limit of
    plans without rows is raised here."""
    monkeypatch.setattr(liveness, "idle_bound", lambda _num_live: 1_000)
    request = Request("A", (1,), max_tokens=2)
    bound = drain_bound({"A": request})

    class Engine(Slow):
        num_plans_in_all = bound + too_many

    config = fit_config(Config(num_blocks=6, block_size=2, max_model_len=16))
    run, findings = run_program(Program(config, (Submit(request), Drain())), Engine)
    if not too_many:
        assert findings == []
        assert run.live == {}
    else:
        (finding,) = findings
        assert (finding.kind, finding.property_id) == (FindingKind.LIVENESS, "P10")
        assert finding.message == f"{bound} steps did not end them; unfinished: A"


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
