"""Admission control: admission closes below the low threshold and opens at the high one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from blockstep.spec import Config, ConfigError, Oracle, RejectedEvent, Request
from blockstep.spec.features.admission_control import is_admission_closed
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import KVTransfers, PauseState, Plan, RequestId, Status


def build(**changes: Any) -> Oracle:
    fields: dict[str, Any] = {"num_blocks": 11, "block_size": 1, "max_model_len": 16}
    fields |= {"admission_low_blocks": 4, "admission_high_blocks": 7}
    return Oracle(Config(**fields | changes))


def submit(oracle: Oracle, name: str, num_tokens: int, max_tokens: int = 4, **more: Any) -> None:
    prompt = tuple(range(ord(name), ord(name) + num_tokens))
    oracle.submit(Request(name, prompt, max_tokens=max_tokens, **more))


def step(oracle: Oracle) -> Plan:
    plan = oracle.schedule()
    if plan.rows:
        frame = next(f for f in oracle.state.frames if f.frame_id == plan.frame_id)
        sampled = {row.request_id: (9,) * row.samples for row in frame.rows}
        oracle.commit(plan, sampled, KVTransfers())
    assert get_broken_invariants(oracle.state) == ()
    return plan


def names(plan: Plan) -> list[RequestId]:
    return sorted(row.request_id for row in plan.rows)


def closed(oracle: Oracle) -> bool:
    return oracle.snapshot().admission_closed


def test_admission_never_closes_without_a_high_threshold() -> None:
    oracle = build(num_blocks=9, admission_low_blocks=0, admission_high_blocks=0)
    submit(oracle, "A", 2, max_tokens=6)
    submit(oracle, "B", 6, max_tokens=2)
    while oracle.state.requests:
        step(oracle)
        assert not closed(oracle)
    assert oracle.snapshot().stats.preemptions == 1


def test_a_request_with_a_confirmed_load_waits_while_admission_is_closed() -> None:
    oracle = build(kv_connector=True, admission_low_blocks=5, admission_high_blocks=7)
    submit(oracle, "A", 4, max_tokens=3)
    step(oracle)
    submit(oracle, "B", 3)
    oracle.offer_kv("B", 2, is_async=True)
    step(oracle)
    assert oracle.state.requests["B"].status is Status.WAITING_FOR_REMOTE_KVS
    oracle.report(finished_recving=["B"])
    plan = step(oracle)
    assert (names(plan), closed(oracle)) == (["A"], True)
    assert oracle.state.requests["B"].status is Status.WAITING_FOR_REMOTE_KVS
    assert oracle.state.running == ()
    assert names(step(oracle)) == ["B"]


@pytest.mark.parametrize("pause_state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_admission_opens_and_closes_also_while_the_engine_is_paused(
    pause_state: PauseState,
) -> None:
    oracle = build()
    submit(oracle, "A", 7)
    step(oracle)
    oracle.pause(pause_state)
    step(oracle)
    assert closed(oracle)
    oracle.abort("A")
    step(oracle)
    assert not closed(oracle)


def test_a_rejected_schedule_does_not_close_admission() -> None:
    oracle = build()
    submit(oracle, "A", 7)
    oracle.schedule()
    with pytest.raises(RejectedEvent):
        oracle.schedule()
    assert not closed(oracle)


def test_admission_closes_and_opens_as_documented() -> None:
    """Every combination of running requests, victims and free blocks is compared with the rule.

    If both thresholds are equal, this one number decides.
    """
    for was, running, victims, free in product((False, True), (0, 1, 2), (False, True), range(6)):
        for low, high in ((0, 0), (1, 3), (3, 3), (0, 2)):
            now = is_admission_closed(was, running, victims, free, low, high)
            if high == 0 or running == 0:
                assert not now
            elif victims or free < low:
                assert now
            elif free >= high:
                assert not now
            else:
                assert now is was


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"admission_low_blocks": 8}, "admission_low_blocks"),
        ({"admission_high_blocks": 11}, "admission_high_blocks"),
        ({"admission_low_blocks": -1}, "admission_low_blocks"),
    ],
)
def test_a_bad_threshold_is_rejected_with_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        build(**changes)
