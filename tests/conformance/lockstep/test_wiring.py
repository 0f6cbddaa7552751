"""Judges run at each place where they should, at each equivalence, and their findings are reported.

An engine is correct except for one thing at one event, which one judge finds. At `exact` and
`renamed` the comparison finds it, too; the tests require that the judge reports it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from blockstep.conformance.engine import Deviation, EngineTraits, Renamed, Safety, SamePlans
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Action, Answer, Drain, Hostile, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v

EXACT = EngineTraits()
RENAMED = EngineTraits(equivalence=Renamed())
PLAN = EngineTraits(equivalence=SamePlans(shows_blocks=True))
SAFETY = EngineTraits(equivalence=Safety())
SHOWN = {"exact": EXACT, "renamed": RENAMED, "safety": SAFETY}
"""Equivalences at which states are checked."""
CONFIG = v.Config(num_blocks=9, block_size=2, max_model_len=16, max_num_batched_tokens=16)
AHEAD = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True)
A = v.Submit(v.Request("A", (1, 2, 3), max_tokens=5))
STEP: tuple[Action, ...] = (v.Schedule(), Answer())


class Bent(SpecEngine):
    """The specification with another answer or state after the event number `at`."""

    at = 0
    num_events = 0

    def bend_answer(self, answer: Any) -> Any:
        return answer

    def bend_state(self, shown: v.Snapshot) -> Any:
        return shown

    def apply(self, event: v.Event) -> v.Observation:
        self.num_events += 1
        answer: v.Observation = super().apply(event)
        return self.bend_answer(answer) if self.num_events == self.at else answer

    def snapshot(self) -> Any:
        shown = super().snapshot()
        return self.bend_state(shown) if self.num_events == self.at else shown


def bend(traits: EngineTraits, at: int, **bends: Callable[[Any], Any]) -> Any:
    """Return engines that change their answer (`answer`) or state (`state`) after one event."""
    methods = {
        f"bend_{what}": lambda _self, value, change=change: change(value)
        for what, change in bends.items()
    }
    return type("Engine", (Bent,), {"traits": traits, "at": at, **methods})


def list_failed_checks(config: v.Config, make_engine: Any, *actions: Action) -> list[str]:
    """Return the checks that fail at the end of a run; a divergence is not counted."""
    _, findings = run_program(Program(config, actions), make_engine)
    return [found.sentence for found in findings if found.kind is not FindingKind.DIVERGENCE]


# The worker checks states.


def publish(shown: v.Snapshot) -> v.Snapshot:
    """The last block, which is free and was never written, is published."""
    key = v.BlockKey(None, (9, 9))
    return replace(
        shown, block_keys=(*shown.block_keys[:-1], key), cached={**shown.cached, key: (8,)}
    )


def compute_more(shown: v.Snapshot) -> v.Snapshot:
    (request,) = shown.requests
    more = replace(request, num_computed_tokens=request.num_computed_tokens + 1)
    return replace(shown, requests=(more,))


def test_computed_tokens_must_be_held_in_every_group() -> None:
    """Three slots of the one group and four of the other do not hold four tokens."""
    groups = (v.KVGroup(v.GroupKind.FULL, 1), v.KVGroup(v.GroupKind.FULL, 4))
    config = replace(CONFIG, num_blocks=17, block_size=1, groups=groups)
    failed_checks = list_failed_checks(config, bend(SAFETY, 2, state=compute_more), A, *STEP)
    assert "computed_tokens_are_in_blocks_that_are_held" in failed_checks


PLACES: dict[str, tuple[v.Config, int]] = {
    "a plan": (CONFIG, 2),
    "a plan ahead": (AHEAD, 2),
    "a commit ahead": (AHEAD, 3),
}
"""Config, and number of the event after which an unwritten block is published."""


@pytest.mark.parametrize("equivalence", SHOWN)
@pytest.mark.parametrize("place", PLACES)
def test_published_blocks_are_checked_after_plans_and_commits(place: str, equivalence: str) -> None:
    config, at = PLACES[place]
    engine = bend(SHOWN[equivalence], at, state=publish)
    assert "published_block_was_written" in list_failed_checks(config, engine, A, *STEP)


@pytest.mark.parametrize(("at", "event"), [(1, A), (3, STEP[1]), (4, v.Reset(False))])
def test_at_safety_published_blocks_are_checked_after_every_event(at: int, event: Action) -> None:
    program = (A, *STEP, event) if at == 4 else (A, *STEP)
    engine = bend(SAFETY, at, state=publish)
    assert list_failed_checks(CONFIG, engine, *program)[0] == "published_block_was_written"


@pytest.mark.parametrize("equivalence", SHOWN)
@pytest.mark.parametrize("at", [2, 3])
def test_the_state_of_a_request_is_checked_after_plans_and_commits(
    at: int, equivalence: str
) -> None:
    engine = bend(SHOWN[equivalence], at, state=compute_more)
    assert "plans_alone_rebuild_the_request" in list_failed_checks(CONFIG, engine, A, *STEP)


def exchange_a_block(shown: v.Snapshot) -> v.Snapshot:
    """The last block of the table is another one, which is held instead."""
    (request,) = shown.requests
    (table,) = request.block_tables
    gone, new = table[-1], shown.free_queue[-1]
    counts = [*shown.ref_counts]
    counts[gone], counts[new] = 0, 1
    return replace(
        shown,
        requests=(replace(request, block_tables=((*table[:-1], new),)),),
        ref_counts=tuple(counts),
        free_queue=(*shown.free_queue[:-1], gone),
    )


@pytest.mark.parametrize(("at", "is_found"), [(2, True), (3, False)])
def test_at_safety_block_tables_are_compared_after_plans_only(at: int, is_found: bool) -> None:
    engine = bend(SAFETY, at, state=exchange_a_block)
    failed_checks = list_failed_checks(CONFIG, engine, A, *STEP)
    assert ("plans_alone_rebuild_the_request" in failed_checks) == is_found


# The worker checks plans, whether or not a state is shown.


def run_too_far(answer: Any) -> Any:
    """A row that says that a token more was computed."""
    assert isinstance(answer, v.Plan)
    rows = [replace(row, num_computed_tokens=row.num_computed_tokens + 1) for row in answer.cached]
    return replace(answer, cached=tuple(rows))


def give_null_blocks(answer: Any) -> Any:
    """Tables of null blocks for new requests."""
    assert isinstance(answer, v.Plan)
    rows = [replace(row, block_ids=((0,) * len(row.block_ids[0]),)) for row in answer.new]
    return replace(answer, new=tuple(rows))


class Hidden(Bent):
    def snapshot(self) -> Any:
        return None


@pytest.mark.parametrize("traits", [EXACT, RENAMED, PLAN, SAFETY])
def test_the_worker_checks_plans_where_no_state_is_shown(traits: EngineTraits) -> None:
    bent = bend(traits, 4, answer=run_too_far)
    engine = type("Engine", (Hidden, bent), {})
    sentence = "plan_counts_the_computed_tokens_of_the_worker"
    assert list_failed_checks(CONFIG, engine, A, *STEP, *STEP)[0] == sentence


def test_at_plan_blocks_are_not_compared_but_the_worker_checks_them() -> None:
    engine = bend(PLAN, 2, answer=give_null_blocks)
    _, findings = run_program(Program(CONFIG, (A, *STEP)), engine)
    assert findings[0].sentence == "plan_names_real_blocks"
    assert all(found.kind is not FindingKind.DIVERGENCE for found in findings)


def test_an_aborted_request_is_not_also_listed_as_ending_later() -> None:
    engine = bend(SAFETY, 2, answer=lambda answer: replace(answer, ending_req_ids=("A",)))
    assert (
        list_failed_checks(CONFIG, engine, A, v.Abort(("A",)))[0]
        == "abort_finishes_exactly_the_named_requests"
    )


def test_at_plan_requests_that_end_later_are_judged_but_not_compared() -> None:
    engine = bend(PLAN, 2, answer=lambda answer: replace(answer, ending_req_ids=("B",)))
    assert list_failed_checks(CONFIG, engine, A, v.Abort(("A",))) == [
        "abort_finishes_exactly_the_named_requests"
    ]


# A worker that misses an event would accuse a correct engine.


@pytest.mark.parametrize("traits", [EXACT, RENAMED, PLAN, SAFETY])
def test_the_worker_is_given_commits_and_resets(traits: EngineTraits) -> None:
    engine = bend(traits, 0)
    reset = v.Reset(reset_running_requests=True)
    run, findings = run_program(Program(CONFIG, (A, *STEP, *STEP, reset, *STEP, Drain())), engine)
    assert findings == []
    assert run.live == {}
    assert run.worker._gets_commits


# Property checks run on states, and know the history.


def lose_a_block(shown: v.Snapshot) -> v.Snapshot:
    return replace(shown, free_queue=shown.free_queue[1:])


def lose_a_token(shown: v.Snapshot) -> v.Snapshot:
    return replace(
        shown, requests=tuple(replace(one, output_token_ids=()) for one in shown.requests)
    )


@pytest.mark.parametrize("equivalence", SHOWN)
@pytest.mark.parametrize(
    ("change", "at", "sentence"),
    [
        (lose_a_block, 2, "every_block_is_free_or_held"),
        (lose_a_token, 5, "outputs_in_the_state_are_those_delivered"),
    ],
)
def test_property_checks_run_on_states(
    change: Callable[[v.Snapshot], v.Snapshot], at: int, sentence: str, equivalence: str
) -> None:
    engine = bend(SHOWN[equivalence], at, state=change)
    assert sentence in list_failed_checks(CONFIG, engine, A, *STEP, *STEP)


# Events that should not be sent must change nothing.

STALE = Hostile(v.Commit(99, ()))
TAKEN = bend(SAFETY, 3, answer=lambda _refused: v.Outputs((v.OutputRow("A", (7,)),)))


def keep(request: v.Request, _config: v.Config) -> v.Request:
    return request


def mend(request: v.Request, _config: v.Config) -> v.Request:
    return replace(request, max_tokens=max(request.max_tokens, 1))


def leave(request: v.Request, _config: v.Config) -> v.Request | None:
    return request if request.max_tokens > 0 else None


def fail(request: v.Request, _config: v.Config) -> v.Request:
    if request.max_tokens < 1:
        raise ValueError("no length")
    return request


@pytest.mark.parametrize(
    ("fit_request", "is_given"), [(keep, True), (mend, False), (leave, False), (fail, False)]
)
def test_an_ill_formed_request_is_given_as_it_is_or_not_at_all(
    fit_request: Any, is_given: bool
) -> None:
    """If the adapter changes it, leaves it out or raises, the engine does not get it."""
    bad = v.Submit(v.Request("B", (1,), max_tokens=0))
    traits = EngineTraits(equivalence=Safety(fit_request=fit_request))
    run, findings = run_program(Program(CONFIG, (A, Hostile(bad), Drain())), bend(traits, 0))
    assert findings == []
    assert (bad in [one.event for one in run.exchanges]) == is_given


# The last state of a run.


def compare_last_state(bend_state: Callable[[Any], Any]) -> list[Finding]:
    """Return the findings about the last state, if no other one is compared."""
    run = LockStep.start(CONFIG, bend(EXACT, 1, state=bend_state), compare_every=0)
    assert run.compare_states() == [], "nothing has happened"
    assert run.perform(A) == []
    return run.compare_states()


def test_the_last_state_is_checked_like_the_others() -> None:
    def break_down(_shown: v.Snapshot) -> v.Snapshot:
        raise ZeroDivisionError("inside the engine")

    assert compare_last_state(lambda shown: shown) == []
    (raised,) = compare_last_state(break_down)
    assert (raised.kind, raised.sentence) == (FindingKind.FAULT, "engine_raises_nothing")
    (ill_typed,) = compare_last_state(lambda shown: replace(shown, running=["A"]))
    assert (ill_typed.kind, "running" in str(ill_typed)) == (FindingKind.FAULT, True)
    (diverged,) = compare_last_state(lose_a_block)
    assert diverged.kind is FindingKind.DIVERGENCE


def test_a_run_without_judges_still_reports_a_divergence() -> None:
    """A replay of a long trace runs like this, with a comparison now and then."""
    run = LockStep.start(CONFIG, bend(EXACT, 1, answer=lambda _: v.Outputs(())), compare_every=1)
    (diverged,) = run.perform(A)
    assert diverged.kind is FindingKind.DIVERGENCE


# A drain also commits frames that no request waits for.


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_drain_commits_frames_in_the_order_of_the_engine(plans_ahead: bool) -> None:
    traits = EngineTraits(equivalence=Safety(plans_ahead=plans_ahead))
    program = Program(AHEAD, (A, v.Schedule(), v.Abort(("A",)), Drain()))
    run, findings = run_program(program, bend(traits, 0))
    assert (findings, run.live, run.plans) == ([], {}, [])
    last = [v.Schedule if plans_ahead else v.SetPause, v.Commit]
    assert [type(one.event) for one in run.exchanges][-2:] == last


# A declared deviation is suppressed wherever it is found.


def make_deviation(*sentences: str, fields: tuple[str, ...] = ()) -> Deviation:
    return Deviation("known", "it is known", Program(CONFIG, (A,)), sentences, fields)


class Raises(Bent):
    def bend_answer(self, answer: Any) -> Any:
        raise ZeroDivisionError


class Stalls(SpecEngine):
    """An engine with empty plans and without a visible state."""

    def apply(self, event: v.Event) -> v.Observation:
        return v.Plan(0) if isinstance(event, v.Schedule) else super().apply(event)

    def snapshot(self) -> Any:
        return None


def declare(engine: type, traits: EngineTraits, deviation: Deviation, **fields: Any) -> Any:
    declared = replace(traits, deviations=(deviation,))
    return type("Declared", (engine,), {"traits": declared, **fields})


WRONG_KIND = bend(SAFETY, 2, answer=lambda _plan: v.Outputs())
DECLARED: dict[str, Any] = {
    "it raises": declare(Raises, EXACT, make_deviation("engine_raises_nothing"), at=2),
    "it raises at safety": declare(Raises, SAFETY, make_deviation("engine_raises_nothing"), at=2),
    "it stalls at safety": declare(
        Stalls, SAFETY, make_deviation("every_request_finishes_after_faults_stop")
    ),
    "it answers with another kind": declare(
        WRONG_KIND, SAFETY, make_deviation("answer_is_of_the_kind_of_the_event")
    ),
    "it accepts a stale commit": declare(
        TAKEN, SAFETY, make_deviation("stale_or_wrong_event_is_rejected")
    ),
}


@pytest.mark.parametrize("what", DECLARED)
def test_a_declared_deviation_is_suppressed_wherever_it_is_found(what: str) -> None:
    engine = DECLARED[what]
    program = Program(CONFIG, (A, v.Schedule(), STALE, Answer(), Drain()))
    run, findings = run_program(program, engine)
    assert findings == []
    assert run.excuses.counts == {"known": 1}
    assert run.excuses.is_over
    undeclared = type("Undeclared", (engine,), {"traits": replace(engine.traits, deviations=())})
    assert run_program(program, undeclared)[1] != []
