"""`has_work`: a state shows whether work is left, in each scene and after each kind of event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.work import (
    loop_runs_while_there_is_work,
    loop_sleeps_without_work,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.oracle import Oracle
from blockstep.spec.profiles import Profile, Quirk

CONFIG = v.Config(num_blocks=8, block_size=2, max_model_len=16)
STORE = replace(CONFIG, kv_connector=True)
A = v.Request("A", (1, 2, 3), max_tokens=1)
SESSION = v.Request("A", (1, 2, 3), max_tokens=1, resumable=True)


def run_a(oracle: Oracle) -> None:
    """Schedule A and commit the plan."""
    plan = oracle.schedule()
    oracle.commit(plan, {"A": (5,)})


def after_nothing(_oracle: Oracle) -> None:
    """A new engine."""


def after_submit(oracle: Oracle) -> None:
    oracle.submit(A)


def paused(oracle: Oracle) -> None:
    oracle.submit(A)
    oracle.pause()


def closed_to_new_requests(oracle: Oracle) -> None:
    oracle.submit(A)
    oracle.pause(v.PauseState.PAUSED_NEW)


def running_while_closed(oracle: Oracle) -> None:
    oracle.submit(replace(A, max_tokens=3))
    run_a(oracle)
    oracle.pause(v.PauseState.PAUSED_NEW)


def finished_and_not_reported(oracle: Oracle) -> None:
    oracle.submit(A)
    run_a(oracle)


def finished_and_reported(oracle: Oracle) -> None:
    finished_and_not_reported(oracle)
    oracle.schedule()


def with_an_idle_session(oracle: Oracle) -> None:
    oracle.submit(SESSION)
    run_a(oracle)
    oracle.schedule()


def loading_in_a_pause(oracle: Oracle) -> None:
    oracle.submit(A)
    oracle.offer_kv("A", 2, is_async=True)
    oracle.schedule()
    oracle.pause()


def loaded_in_a_pause(oracle: Oracle) -> None:
    loading_in_a_pause(oracle)
    oracle.report(finished_recving=("A",))


def while_the_store_reads(oracle: Oracle) -> None:
    oracle.submit(A)
    oracle.offer_kv("A", 0, delays_free=True)
    run_a(oracle)
    oracle.schedule()


def after_the_store_read(oracle: Oracle) -> None:
    while_the_store_reads(oracle)
    oracle.report(finished_sending=("A",))


SCENES: dict[Callable[[Oracle], None], tuple[v.Config, bool]] = {
    after_nothing: (CONFIG, False),
    after_submit: (CONFIG, True),
    paused: (CONFIG, False),
    closed_to_new_requests: (CONFIG, False),
    running_while_closed: (CONFIG, True),
    finished_and_not_reported: (CONFIG, True),
    finished_and_reported: (CONFIG, False),
    with_an_idle_session: (CONFIG, False),
    loading_in_a_pause: (STORE, True),
    loaded_in_a_pause: (STORE, False),
    while_the_store_reads: (STORE, True),
    after_the_store_read: (STORE, False),
}
"""Scenes with their config, and whether work is left."""


@pytest.mark.parametrize("bring", SCENES, ids=lambda bring: bring.__name__)
def test_work_is_left_while_a_plan_or_a_report_can_change_something(
    bring: Callable[[Oracle], None],
) -> None:
    config, is_left = SCENES[bring]
    oracle = Oracle(config)
    bring(oracle)
    assert oracle.snapshot().has_work is is_left


def test_the_loop_of_a_release_sleeps_during_transfers() -> None:
    """Upstream #46283: the workers are not polled any more, so the blocks are never freed."""
    oracle = Oracle(STORE, Profile("", frozenset({Quirk.LOOP_SLEEPS_DURING_TRANSFERS})))
    while_the_store_reads(oracle)
    assert oracle.snapshot().transfers != v.TransfersSnapshot()
    assert oracle.snapshot().has_work is False


# The judge.

EVENTS: dict[type, tuple[Any, Any]] = {
    v.Submit: (v.Submit(A), v.Ack()),
    v.Schedule: (v.Schedule(), v.Plan(0)),
    v.Commit: (v.Commit(0, ()), v.Outputs()),
    v.Drafts: (v.Drafts(()), v.DraftsTaken()),
    v.Abort: (v.Abort(()), v.Aborted()),
    v.GrammarReady: (v.GrammarReady("A"), v.Ack()),
    v.GrammarFailed: (v.GrammarFailed("A"), v.Outputs()),
    v.GrammarBitmask: (v.GrammarBitmask(0), v.GrammarOutput()),
    v.StreamingUpdate: (v.StreamingUpdate(A), v.Ack()),
    v.SetPause: (v.SetPause(v.PauseState.UNPAUSED), v.Ack()),
    v.Reset: (v.Reset(), v.ResetDone(True)),
    v.EncoderReset: (v.EncoderReset(), v.Ack()),
    v.EncoderOffer: (v.EncoderOffer(), v.Ack()),
    v.KVOffer: (v.KVOffer("A"), v.Ack()),
    v.TransfersReported: (v.TransfersReported(v.NO_TRANSFERS), v.Outputs()),
    v.Clock: (v.Clock(1), v.Ack()),
    v.PinEstimate: (v.PinEstimate("j", 1), v.Ack()),
    v.Fork: (v.Fork("A", "B", ()), v.Ack()),
}


def judge(config: v.Config, state: v.Snapshot, kind: type = v.SetPause) -> list[str]:
    """Return the checks that fail on a state after an event that changed nothing."""
    event, observation = EVENTS[kind]
    step = Step(config, 1, event, observation, state, state)
    sentences = (loop_runs_while_there_is_work, loop_sleeps_without_work)
    return [check.sentence for check in sentences if check(step, History(config))]


@pytest.mark.parametrize("bring", SCENES, ids=lambda bring: bring.__name__)
def test_the_wrong_value_is_a_stall_or_a_busy_loop(bring: Callable[[Oracle], None]) -> None:
    config, is_left = SCENES[bring]
    oracle = Oracle(config)
    bring(oracle)
    state = oracle.snapshot()
    assert judge(config, state) == []
    wrong = "loop_runs_while_there_is_work" if is_left else "loop_sleeps_without_work"
    assert judge(config, replace(state, has_work=not is_left)) == [wrong]


def test_each_kind_of_event_is_judged() -> None:
    assert EVENTS.keys() == set(v.EVENT_TYPES)
    empty, busy = Oracle(CONFIG), Oracle(CONFIG)
    after_submit(busy)
    for kind in EVENTS:
        stalled = replace(busy.snapshot(), has_work=False)
        assert judge(CONFIG, stalled, kind) == ["loop_runs_while_there_is_work"]
        burning = replace(empty.snapshot(), has_work=True)
        assert judge(CONFIG, burning, kind) == ["loop_sleeps_without_work"]


def test_an_engine_that_does_not_show_has_work_is_not_accused() -> None:
    oracle = Oracle(CONFIG)
    after_submit(oracle)
    assert judge(CONFIG, replace(oracle.snapshot(), has_work=None)) == []


def test_the_loop_may_sleep_while_a_frame_is_in_flight() -> None:
    oracle = Oracle(CONFIG)
    after_submit(oracle)
    oracle.schedule()
    assert judge(CONFIG, replace(oracle.snapshot(), has_work=False)) == []


class Silent(HostEngine):
    """An engine that does not show whether work is left."""

    def capabilities(self) -> frozenset[str]:
        return super().capabilities() - {"work"}

    def snapshot(self) -> v.Snapshot:
        return replace(super().snapshot(), has_work=None)


class Sleepy(HostEngine):
    """An engine that always shows that no work is left."""

    def snapshot(self) -> v.Snapshot:
        return replace(super().snapshot(), has_work=False)


PROGRAM = Program(CONFIG, (v.Submit(A), v.Schedule(), Answer(), v.Schedule()))


def test_has_work_is_not_checked_without_the_capability() -> None:
    assert run_program(PROGRAM, Silent)[1] == []
    assert run_program(PROGRAM, SpecEngine)[1] == []


def test_a_loop_that_sleeps_with_work_is_reported_as_a_stall() -> None:
    (found, *_) = run_program(PROGRAM, Sleepy)[1]
    assert (found.property_id, found.sentence) == ("P10", "loop_runs_while_there_is_work")
    assert found.message == "the loop may sleep, and 'A' waits"
