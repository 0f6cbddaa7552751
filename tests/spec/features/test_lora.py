"""LoRA slots: a request whose adapter has no free slot is skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockstep.spec import Commit, Config, Oracle, Outputs, Policy, Request
from blockstep.spec.features.lora import has_lora_slot
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.profiles import Profile, Quirk
from blockstep.spec.vocabulary import Plan, RowTokens, Status

CONFIG = Config(num_blocks=20, block_size=2, max_model_len=12, max_loras=1)


def request(
    name: str, adapter: str | None = None, max_tokens: int = 2, priority: int = 0
) -> Request:
    return Request(name, (1, 2, 3), adapter=adapter, max_tokens=max_tokens, priority=priority)


def rows(plan: Plan) -> list[str]:
    return [row.request_id for row in plan.rows]


def answer(oracle: Oracle) -> None:
    """Commit the oldest frame: every row that can sample samples the same token."""
    frame = oracle.state.frames[0]
    tokens = [RowTokens(row.request_id, (50,) if row.samples else ()) for row in frame.rows]
    assert isinstance(oracle.apply(Commit(frame.frame_id, tuple(tokens))), Outputs)


def test_a_request_without_a_lora_slot_is_skipped_and_blocks_no_other() -> None:
    oracle = Oracle(CONFIG)
    for name, adapter in (("A", "x"), ("B", "y"), ("C", None), ("D", "x"), ("E", "z")):
        oracle.submit(request(name, adapter))
    assert rows(oracle.schedule()) == ["A", "C", "D"]
    assert oracle.state.skipped_waiting == ("B", "E")
    answer(oracle)
    assert rows(oracle.schedule()) == ["A", "C", "D"]
    answer(oracle)
    assert rows(oracle.schedule()) == ["B"], "the head of the waiting queue takes the free slot"
    assert list(oracle.state.skipped_waiting) == ["E"]


def test_all_adapters_run_without_a_limit() -> None:
    oracle = Oracle(replace(CONFIG, max_loras=0))
    for name in "xyz":
        oracle.submit(request(name, name))
    assert rows(oracle.schedule()) == ["x", "y", "z"]


def test_a_preempted_request_gives_up_its_slot_and_waits_for_the_next() -> None:
    """After a forced reset, the head of the waiting queue takes the slot."""
    oracle = Oracle(CONFIG)
    oracle.submit(request("A", "x", max_tokens=5))
    oracle.schedule()
    answer(oracle)
    oracle.submit(request("B", "y"))
    assert rows(oracle.schedule()) == ["A"]
    answer(oracle)
    oracle.reset(reset_running_requests=True)
    assert rows(oracle.schedule()) == ["B"], "it was skipped before A was preempted"
    assert oracle.state.requests["A"].status is Status.PREEMPTED
    answer(oracle)
    assert rows(oracle.schedule()) == ["B"]
    answer(oracle)
    assert rows(oracle.schedule()) == ["A"]


def test_priority_decides_which_request_gets_the_slot() -> None:
    oracle = Oracle(replace(CONFIG, policy=Policy.PRIORITY))
    oracle.submit(request("A", "x", priority=2))
    oracle.schedule()
    answer(oracle)
    for name, adapter, priority in (("B", "y", 3), ("C", "z", 1), ("D", "x", 4)):
        oracle.submit(request(name, adapter, priority=priority))
    assert sorted(rows(oracle.schedule())) == ["A", "D"]
    answer(oracle)
    assert rows(oracle.schedule()) == ["D"], "as long as A or D runs, x is in use"
    answer(oracle)
    assert rows(oracle.schedule()) == ["C"]


@pytest.mark.parametrize(
    "several",
    [
        {"max_frames_in_flight": 2},
        {"max_frames_in_flight": 2, "async_scheduling": True},
    ],
    ids=["pipeline", "async"],
)
@pytest.mark.parametrize("quirk", [False, True])
def test_lora_slots_of_rows_only(several: dict[str, bool | int], quirk: bool) -> None:
    """A has no row, since its last token is in flight; it keeps its LoRA slot."""
    quirks = {Quirk.LORA_SLOTS_OF_ROWS_ONLY} if quirk else set()
    config = replace(CONFIG, **several)  # type: ignore[arg-type]
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(request("A", "x", max_tokens=1))
    oracle.schedule()
    oracle.submit(request("B", "y", max_tokens=1))
    assert rows(oracle.schedule()) == ["B"] * quirk
    broken = get_broken_invariants(oracle.state)
    assert broken == (("is_every_running_adapter_in_a_slot",) if quirk else ())
    answer(oracle)
    assert rows(oracle.schedule()) == ["B"] * (not quirk)


def test_a_slot_is_shared_and_none_is_needed_without_an_adapter() -> None:
    assert has_lora_slot(None, ["x"], 1)
    assert has_lora_slot("x", ["x", "x", None], 1)
    assert not has_lora_slot("y", ["x", None], 1)
    assert has_lora_slot("y", ["x", "x"], 2)
    assert not has_lora_slot("z", ["x", "y"], 2)
    assert has_lora_slot("y", ["x"], 0)
