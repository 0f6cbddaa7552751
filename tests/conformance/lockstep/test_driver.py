"""Lockstep driver: a correct engine has no finding, and each kind of defect is a finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockstep.conformance.engine import ALL_CAPABILITIES, Declining
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import (
    Answer,
    Drain,
    Hostile,
    Program,
    Propose,
    describe,
)
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import Abort, Commit, Config, Request, Reset, Schedule, SpecMethod, Submit
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import SPARING, Profile, Quirk

CONFIG = Config(num_blocks=8, block_size=2, max_model_len=16)
PROGRAM = Program(
    CONFIG,
    (
        Submit(Request("A", (1, 2, 3), max_tokens=3)),
        Schedule(),
        Answer(),
        Submit(Request("B", (1, 2, 9), max_tokens=2)),
        Schedule(),
        Answer(),
        Abort(("A",)),
        Drain(),
    ),
)


class Twisted(SpecEngine):
    """The specification with changed answers or states."""

    def bend_answer(self, event: v.Event, answer: v.Observation) -> Any:
        return answer

    def bend_state(self, snapshot: v.Snapshot) -> v.Snapshot | None:
        return snapshot

    def apply(self, event: v.Event) -> Any:
        return self.bend_answer(event, super().apply(event))

    def snapshot(self) -> Any:
        return self.bend_state(super().snapshot())


def test_a_clean_pair_has_no_finding_and_ends_empty() -> None:
    run, findings = run_program(PROGRAM, SpecEngine)
    assert findings == []
    assert run.live == {}
    assert run.num_events == len(run.exchanges) > 8


def test_an_answer_without_a_plan_does_nothing() -> None:
    run = LockStep.start(CONFIG, SpecEngine)
    assert run.perform(Answer()) == []
    assert run.perform(Propose(((1, 1),))) == []
    assert run.num_events == 0


def test_a_different_answer_is_a_divergence() -> None:
    class Engine(Twisted):
        def bend_answer(self, event: v.Event, answer: v.Observation) -> Any:
            return replace(answer, frame_id=7) if isinstance(answer, v.Plan) else answer

    run, findings = run_program(PROGRAM, Engine)
    assert run.num_events == 2
    diverged = [found for found in findings if found.kind is FindingKind.DIVERGENCE]
    assert [row.field for row in diverged[0].differences] == ["frame_id"]


def test_a_different_state_is_a_divergence_at_once() -> None:
    class Engine(Twisted):
        def bend_state(self, snapshot: v.Snapshot) -> v.Snapshot:
            return replace(snapshot, free_queue=snapshot.free_queue[::-1])

    run, findings = run_program(PROGRAM, Engine)
    assert run.num_events == 1
    assert any(found.kind is FindingKind.DIVERGENCE for found in findings)


def test_whatever_the_engine_raises_is_a_finding() -> None:
    class Engine(Twisted):
        def bend_answer(self, event: v.Event, answer: v.Observation) -> Any:
            if isinstance(event, Commit):
                raise ZeroDivisionError("inside the engine")
            return answer

    run, findings = run_program(PROGRAM, Engine)
    assert [found.kind for found in findings] == [FindingKind.FAULT]
    assert "ZeroDivisionError: inside the engine" in findings[0].message
    assert run.exchanges[-1].seen is None


def test_an_answer_that_is_no_observation_is_a_fault() -> None:
    class Engine(Twisted):
        def bend_answer(self, event: v.Event, answer: v.Observation) -> Any:
            return {"ok": True}

    _, findings = run_program(PROGRAM, Engine)
    assert findings[0].kind is FindingKind.FAULT


def test_an_assertion_of_the_spec_is_a_kind_of_its_own() -> None:
    run = LockStep.start(CONFIG, SpecEngine)
    run.spec.state = replace(run.spec.state, running=("ghost",), requests=run.spec.state.requests)

    def broken(event: v.Event) -> v.Observation:
        raise AssertionError("impossible")

    run.spec.apply = broken  # type: ignore[method-assign]
    assert [found.kind for found in run.apply(Schedule())] == [FindingKind.SPEC]


def test_a_scheduler_that_stops_is_a_stall() -> None:
    """Both sides answer alike and no state is shown, but nothing happens either."""

    class Engine(Twisted):
        def bend_state(self, snapshot: v.Snapshot) -> None:
            return None

    run = LockStep.start(CONFIG, Engine)
    assert run.perform(Submit(Request("A", (1, 2, 3), max_tokens=3))) == []
    assert isinstance(run.engine, SpecEngine)
    for side in (run.spec, run.engine):
        side.state = replace(side.state, waiting=(), skipped_waiting=())
    (finding,) = run.perform(Drain())
    assert (finding.kind, finding.property_id) == (FindingKind.LIVENESS, "P10")
    assert finding.message == (
        "a plan is empty, although no output, load or other event is due; unfinished: A"
    )
    assert run.has_failed


def test_a_drain_unpauses_and_compiles_every_grammar() -> None:
    waits = Submit(Request("A", (1, 2, 3), max_tokens=3, structured_output=True))
    run, findings = run_program(
        Program(CONFIG, (waits, v.SetPause(v.PauseState.PAUSED_ALL), Drain())), SpecEngine
    )
    assert findings == []
    assert run.live == {}


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_drain_commits_frames_in_flight_without_a_request(is_alone: bool) -> None:
    """Either no request is left, or the last request ends before the last frame."""
    config = replace(CONFIG, max_frames_in_flight=3, async_scheduling=True)
    submits = [Submit(Request(name, (1,), max_tokens=4)) for name in ("A" if is_alone else "AB")]
    program = Program(config, (*submits, Schedule(), Schedule(), Abort(("A",)), Drain()))
    run, findings = run_program(program, SpecEngine)
    assert findings == []
    assert (run.live, run.plans) == ({}, [])


def test_an_unsupported_event_is_counted_and_not_given() -> None:
    class Engine(SpecEngine):
        def capabilities(self) -> frozenset[str]:
            return frozenset({"snapshot"})

    run = LockStep.start(CONFIG, Engine)
    assert run.perform(Reset(reset_running_requests=False)) == []
    assert run.perform(Hostile(Schedule())) == []
    assert run.skipped == {"reset": 1, "rejection": 1}
    assert run.num_events == 0


class Shy(SpecEngine):
    """An engine that declines some kinds of events, and any plan after the first `num_plans`."""

    shuns: tuple[type, ...] = ()
    num_plans = 1000

    def declines(self, event: v.Event) -> str | None:
        is_late = isinstance(event, Schedule) and self.state.next_frame_id >= self.num_plans
        return "a known defect" if isinstance(event, self.shuns) or is_late else None


def test_a_declined_event_is_given_to_neither_side() -> None:
    class Engine(Shy):
        shuns = (Reset,)

    assert isinstance(Engine(CONFIG), Declining)
    assert not isinstance(SpecEngine(CONFIG), Declining)
    run = LockStep.start(CONFIG, Engine, keep_exchanges=True, profile=SPARING)
    for action in (Submit(Request("A", (1, 2, 3), max_tokens=3)), Schedule()):
        assert run.perform(action) == []
    before = run.spec.state
    assert run.perform(Reset(reset_running_requests=True)) == []
    assert run.spec.state is before
    assert run.engine.snapshot() == run.before
    assert run.skipped == {"a known defect": 1}
    assert run.num_events == len(run.exchanges) == 2
    assert run.perform(Drain()) == []
    assert run.live == {}, "nothing else is declined"


def test_under_strict_a_declined_event_is_given() -> None:
    class Engine(Shy):
        shuns = (Reset,)

    run = LockStep.start(CONFIG, Engine)
    assert run.perform(Reset(reset_running_requests=False)) == []
    assert run.num_events == 1
    assert run.skipped == {}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shunned", [Schedule, Commit])
def test_a_drain_ends_where_all_remaining_events_are_declined(shunned: type, depth: int) -> None:
    class Engine(Shy):
        shuns = (shunned,)

    run = LockStep.start(
        replace(CONFIG, max_frames_in_flight=depth, async_scheduling=depth > 1),
        Engine,
        profile=SPARING,
    )
    assert run.perform(Submit(Request("A", (1, 2, 3), max_tokens=3))) == []
    assert run.perform(Drain()) == []
    assert run.live.keys() == {"A"}
    assert 0 < run.skipped["a known defect"] < 4
    assert run.perform(Abort(("A",))) == []
    assert run.perform(Drain()) == [], "a frame may stay in flight"


def test_the_oldest_frame_is_committed_where_a_plan_is_declined() -> None:
    class Engine(Shy):
        num_plans = 2

    run = LockStep.start(
        replace(CONFIG, max_frames_in_flight=3, async_scheduling=True), Engine, profile=SPARING
    )
    for action in (Submit(Request("A", (1, 2, 3), max_tokens=3)), Drain()):
        assert run.perform(action) == []
    assert len(run.delivered["A"]) == 2
    assert run.plans == []


def test_an_engine_without_a_visible_state_is_held_to_its_answers() -> None:
    class Engine(Twisted):
        def bend_state(self, snapshot: v.Snapshot) -> None:
            return None

    run, findings = run_program(PROGRAM, Engine)
    assert findings == []
    assert run.live == {}


def test_drafts_are_proposed_for_rows_that_sampled() -> None:
    config = replace(CONFIG, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    run = LockStep.start(config, SpecEngine, keep_exchanges=True)
    for action in (
        Submit(Request("A", (1, 2, 3), max_tokens=6)),
        Schedule(),
        Answer(),
        Propose(((2, 1),)),
        Schedule(),
    ):
        assert run.perform(action) == []
    plan = run.exchanges[-1].seen
    assert isinstance(plan, v.Plan)
    assert len(plan.cached[0].draft_token_ids) == 2
    assert run.perform(Answer()) == []
    assert len(run.spec.state.requests["A"].output_token_ids) == 3, "one draft was right"


@pytest.mark.parametrize("has", ["rejection", "late drafts", "neither"])
def test_late_drafts_go_to_engines_that_drop_or_reject_them(has: str) -> None:
    class Engine(SpecEngine):
        def capabilities(self) -> frozenset[str]:
            return ALL_CAPABILITIES - ({"rejection", "late drafts"} - {has})

    config = replace(CONFIG, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    run = LockStep.start(config, Engine, keep_exchanges=True)
    late = Reset(reset_running_requests=True)
    for action in (Submit(Request("A", (1, 2, 3), max_tokens=6)), Schedule(), Answer(), late):
        assert run.perform(action) == []
    assert run.perform(Propose(((2, 2),))) == []
    given = [exchange.event for exchange in run.exchanges if isinstance(exchange.event, v.Drafts)]
    assert len(given) == (has != "neither")


@pytest.mark.parametrize(
    ("lacks", "wrong", "is_found"),
    [
        ({"statistics", "cache statistics"}, v.Stats(prefix_cache_queries=9, preemptions=9), False),
        ({"statistics"}, v.Stats(prefix_cache_queries=9), True),
        ({"statistics"}, v.Stats(drafts_accepted=9), True),
        ({"statistics"}, v.Stats(preemptions=9), False),
        ({"cache statistics"}, v.Stats(preemptions=9), True),
    ],
)
def test_only_counters_that_an_engine_claims_are_compared(
    lacks: set[str], wrong: v.Stats, is_found: bool
) -> None:
    class Engine(Twisted):
        def bend_state(self, snapshot: v.Snapshot) -> v.Snapshot:
            return replace(snapshot, stats=wrong)

        def capabilities(self) -> frozenset[str]:
            return ALL_CAPABILITIES - lacks

    config = replace(CONFIG, enable_prefix_caching=False)
    run = LockStep.start(config, Engine)
    findings = run.perform(Submit(Request("A", (1, 2, 3))))
    assert ("stats" in str([found.differences for found in findings])) == is_found


@pytest.mark.parametrize("has", [True, False])
def test_hints_are_compared_only_if_an_engine_claims_them(has: bool) -> None:
    class Engine(Twisted):
        def bend_answer(self, event: v.Event, answer: v.Observation) -> Any:
            if not isinstance(answer, v.Plan):
                return answer
            return replace(answer, num_common_prefix_blocks=(7,))

        def capabilities(self) -> frozenset[str]:
            return ALL_CAPABILITIES - ({"common prefix"} if not has else set())

    run = LockStep.start(CONFIG, Engine)
    assert run.perform(Submit(Request("A", (1, 2, 3)))) == []
    findings = run.perform(Schedule())
    fields = [row.field for found in findings for row in found.differences]
    assert fields == ["num_common_prefix_blocks"] * has


def test_a_run_continues_after_a_quirk_and_counts_its_goals() -> None:
    """A reset drops tokens that the worker has sampled; the worker follows the next plan."""
    quirks = {Quirk.RESET_DROPS_TOKENS, Quirk.NEXT_PLAN_NAMES_VICTIMS_OF_A_RESET}
    profile = Profile("dropping", frozenset(quirks))
    program = Program(
        Config(num_blocks=9, max_frames_in_flight=2, async_scheduling=True),
        (
            Submit(Request("A", (1, 2), max_tokens=5)), Schedule(),
            Reset(reset_running_requests=True), Schedule(), Answer(), Schedule(), Answer(), Drain(),
        ),
    )  # fmt: skip
    run, findings = run_program(program, lambda config: SpecEngine(config, profile), profile)
    assert findings == []
    assert not run.live
    assert run.known["P13"] > 0
    assert run.witnesses["reset_forced_in_flight"] == 1
    assert run.witnesses["rejected_bad_result"] == 0


@pytest.mark.parametrize("action", PROGRAM.actions)
def test_every_action_is_described_on_one_line(action: Any) -> None:
    assert describe(action)
    assert "\n" not in describe(action)


def test_unchanged_parts_of_a_state_stay_the_same_objects() -> None:
    run = LockStep.start(CONFIG, SpecEngine)
    assert run.apply(Submit(Request("A", (1, 2, 3), max_tokens=3))) == []
    submitted = run.before
    assert submitted is run.spec.snapshot()
    assert run.apply(v.SetPause(v.PauseState.PAUSED_ALL)) == []
    paused = run.before
    assert submitted is not None
    assert paused is not None
    assert paused is not submitted
    assert paused.requests is submitted.requests
    assert paused.free_queue is submitted.free_queue
