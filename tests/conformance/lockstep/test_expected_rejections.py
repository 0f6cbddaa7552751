"""Rejections at safety: a wrong event may be rejected or ignored, and must change nothing.

Each engine here is the specification with one answer of its own, so its findings follow from that
answer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from blockstep.conformance.engine import EngineFactory, EngineTraits, Safety
from blockstep.conformance.lockstep.start_run import run_program, start_program
from blockstep.conformance.protocol.program import (
    Action,
    Answer,
    Drain,
    Hostile,
    Misanswer,
    Mistake,
    Program,
    Propose,
)
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v

CONFIG = v.Config(num_blocks=9, block_size=2, max_model_len=16, max_num_batched_tokens=16)
AHEAD = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True)
PIPELINE = replace(CONFIG, max_frames_in_flight=2)
DRAFTING = replace(CONFIG, spec_method=v.SpecMethod.NGRAM, num_speculative_tokens=2)
A, B = v.Request("A", (1, 2, 3), 6), v.Request("B", (4, 5), 6)
RUNS: tuple[Action, ...] = (v.Submit(A), v.Schedule())
FAILED = ["stale_or_wrong_event_is_rejected"]
"""The check that fails where a wrong event was accepted."""


class AtSafety(SpecEngine):
    """The specification, judged at safety."""

    traits = EngineTraits(equivalence=Safety())


def answering(answer: Callable[[v.Event, v.Observation], v.Observation]) -> EngineFactory:
    """Return an engine with another answer where the specification rejects an event."""

    class Answering(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            return answer(event, seen) if isinstance(seen, v.Rejected) else seen

    return Answering


def list_failed_checks(
    make_engine: EngineFactory, config: v.Config, *actions: Action
) -> tuple[Any, list[str]]:
    """Return the run of a program and the checks that fail."""
    run, findings = run_program(Program(config, actions), make_engine)
    return run, [found.sentence for found in findings]


@pytest.mark.parametrize("mistake", Mistake)
@pytest.mark.parametrize("config", [CONFIG, AHEAD, DRAFTING], ids=["plain", "ahead", "drafting"])
def test_a_wrong_model_output_is_given_and_may_be_rejected(
    config: v.Config, mistake: Mistake
) -> None:
    start: tuple[Action, ...] = (*RUNS, Answer(), Propose(((2, 1),)), v.Submit(B), v.Schedule())
    start += (v.Schedule(),) if config is AHEAD else ()
    run, wrong = list_failed_checks(AtSafety, config, *start, Misanswer(mistake), Drain())
    assert wrong == []
    refused = [one for one in run.exchanges if isinstance(one.seen, v.Rejected)]
    possible = mistake is not Mistake.TOO_EARLY or config is AHEAD
    possible &= mistake is not Mistake.WRONG_DRAFT or config is DRAFTING
    # No request has a grammar.
    possible &= mistake not in (Mistake.PREFILL_TOKEN, Mistake.FORBIDDEN_TOKEN)
    assert len(refused) == possible


def test_a_forbidden_token_may_be_rejected_and_not_be_accepted() -> None:
    """An engine that accepts it delivers a token that the grammar forbids."""
    grammar = v.Grammar((((0, 0), (1, 0)),))
    held = v.Request("A", (1, 2, 3), 6, structured_output=True, grammar=grammar)
    program = (
        v.Submit(held),
        v.GrammarReady("A"),
        v.Schedule(),
        Misanswer(Mistake.FORBIDDEN_TOKEN),
    )
    run, wrong = list_failed_checks(AtSafety, CONFIG, *program)
    assert wrong == []
    assert run.exchanges[-1].seen == v.Rejected(v.RejectCode.BAD_RESULT)
    taken = answering(lambda _event, _seen: v.Outputs((v.OutputRow("A", (2,)),)))
    assert list_failed_checks(taken, CONFIG, *program)[1] == FAILED


WRONG: dict[str, tuple[v.Config, tuple[Action, ...], v.Event, v.Observation]] = {
    "unknown": (CONFIG, RUNS, v.Commit(9, ()), v.Outputs((v.OutputRow("A", (1,)),))),
    "bad result": (CONFIG, RUNS, v.Commit(0, (v.RowTokens("A", (1, 1, 1)),)),
        v.Outputs((v.OutputRow("A", (1, 1, 1)),))),
    "one plan too many": (CONFIG, (*RUNS, v.Submit(B)), v.Schedule(), v.Plan(1,
        finished_req_ids=("A",))),
    "no prompt": (CONFIG, RUNS, v.Submit(v.Request("C", ())), v.Ack()),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_engine_that_accepts_a_wrong_event_is_found(name: str) -> None:
    config, start, event, answer = WRONG[name]
    run = start_program(Program(config, ()), answering(lambda _event, _seen: answer))
    for action in start:
        assert run.perform(action) == []
    if isinstance(answer, v.Plan):  # an empty plan would be harmless
        row = run.plans[0].new[0]
        answer = v.Plan(1, new=(replace(row, request=B),))
    assert [found.sentence for found in run.perform(Hostile(event))] == FAILED


HARMLESS: dict[str, tuple[v.Event, v.Observation]] = {
    "a commit of an unknown frame": (v.Commit(9, ()), v.Outputs()),
    "a grammar of an unknown request": (v.GrammarReady("nobody"), v.Ack()),
    "a grammar of a request without one": (v.GrammarReady("A"), v.Ack()),
    "a request submitted twice": (v.Submit(A), v.Ack()),
    "too many drafts": (v.Drafts((v.RowTokens("A", (1, 2, 3)),)), v.DraftsTaken()),
    "an empty plan": (v.Schedule(), v.Plan(1)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_an_engine_that_ignores_a_wrong_event_is_not_accused(name: str) -> None:
    event, answer = HARMLESS[name]
    make_engine = answering(lambda _event, _seen: answer)
    run, wrong = list_failed_checks(make_engine, CONFIG, *RUNS, Hostile(event))
    assert wrong == []
    assert run.exchanges[-1].seen == answer
    assert [*run.live] == ["A"]
    assert len(run.plans) == 1
    assert run.perform(Answer()) == []  # it continues as if nothing had happened


def test_an_out_of_order_commit_may_be_accepted_if_no_token_depends_on_it() -> None:
    """Plans of a pipeline have different requests, so no commit depends on an earlier one."""

    class AnyOrder(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            if isinstance(event, v.Commit) and event.frame_id == 1:
                self.late = event
                return v.Outputs(
                    tuple(v.OutputRow(row.request_id, row.token_ids) for row in event.sampled)
                )
            seen = super().apply(event)
            if isinstance(event, v.Commit) and event.frame_id == 0:
                super().apply(self.late)
            return seen

        def snapshot(self) -> None:  # type: ignore[override]
            return

        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {"snapshot"}

    two = (*RUNS, v.Submit(B), v.Schedule())
    run, wrong = list_failed_checks(
        AnyOrder, PIPELINE, *two, Misanswer(Mistake.TOO_EARLY), Answer(), Drain()
    )
    assert wrong == []
    assert [one.event.frame_id for one in run.exchanges if isinstance(one.event, v.Commit)][:2] == [
        1,
        0,
    ]
    ahead = (*RUNS, v.Schedule(), Misanswer(Mistake.TOO_EARLY))
    assert list_failed_checks(AnyOrder, AHEAD, *ahead)[1] == FAILED  # A waits for its first token


def test_a_rejection_that_changes_the_state_is_found() -> None:
    class Forgetful(AtSafety):
        forgets = False

        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            self.forgets |= isinstance(seen, v.Rejected)
            return seen

        def snapshot(self) -> v.Snapshot:
            shown = super().snapshot()
            return replace(shown, free_queue=shown.free_queue[::-1]) if self.forgets else shown

    assert list_failed_checks(Forgetful, CONFIG, *RUNS, Hostile(v.Commit(9, ())))[1] == [
        "rejected_event_changes_nothing"
    ]
    assert (
        list_failed_checks(Forgetful, CONFIG, *RUNS, v.Submit(replace(B, max_tokens=99)))[1] == []
    )
    long = v.Request("L", tuple(range(40)), 4)
    assert list_failed_checks(Forgetful, CONFIG, *RUNS, v.Submit(long))[1] == [
        "rejected_event_changes_nothing"
    ]


LONG = v.Request("L", tuple(range(12)), 4)
SMALL_POOL = replace(CONFIG, num_blocks=7)


def test_a_request_that_never_fits_may_be_rejected_and_is_not_counted() -> None:
    run, wrong = list_failed_checks(AtSafety, SMALL_POOL, v.Submit(LONG), Drain())
    assert wrong == []
    assert run.exchanges[0].seen == v.Rejected(v.RejectCode.NEVER_FITS)
    assert run.skipped == {}


def test_an_engine_that_accepts_a_request_must_serve_it() -> None:
    class Promising(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            return v.Ack() if isinstance(seen, v.Rejected) and isinstance(event, v.Submit) else seen

    _, wrong = list_failed_checks(Promising, SMALL_POOL, v.Submit(LONG), Drain())
    assert wrong == ["every_request_finishes_after_faults_stop"]


def test_an_engine_without_rejections_gets_no_wrong_event() -> None:
    class Trusting(AtSafety):
        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {"rejection"}

    mistakes = (Hostile(v.Commit(9, ())), v.Submit(LONG), v.Schedule(), v.Submit(A))
    run, wrong = list_failed_checks(Trusting, SMALL_POOL, *RUNS, *mistakes)
    assert wrong == []
    assert [type(one.event) for one in run.exchanges] == [v.Submit, v.Schedule]


def test_no_request_is_submitted_under_an_id_in_flight() -> None:
    """The tokens in flight could then belong to either request."""
    given = (*RUNS, v.Abort(("A",)), v.Submit(A), v.Submit(B), Answer(), v.Submit(A))
    run, wrong = list_failed_checks(AtSafety, CONFIG, *given)
    assert wrong == []
    names = [
        one.event.request.request_id for one in run.exchanges if isinstance(one.event, v.Submit)
    ]
    assert names == ["A", "B", "A"]


class RefusesDrafts(AtSafety):
    """An engine that rejects all drafts."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Drafts):
            return v.Rejected(v.RejectCode.BAD_DRAFTS)
        return super().apply(event)


def test_drafts_in_time_must_be_accepted_and_late_ones_may_be_rejected() -> None:
    timely = (*RUNS, Answer(), Propose(((1, 1),)))
    assert list_failed_checks(RefusesDrafts, DRAFTING, *timely)[1] == [
        "answer_is_of_the_kind_of_the_event"
    ]
    late = (*RUNS, Answer(), v.Schedule(), Propose(((1, 1),)))
    assert list_failed_checks(RefusesDrafts, DRAFTING, *late)[1] == []


def test_a_malformed_request_that_an_adapter_cannot_fit_is_not_given() -> None:
    def fit_request(request: v.Request, _config: v.Config) -> v.Request | None:
        return request if request.prompt_token_ids[0] < 9 else None

    class Choosy(AtSafety):
        traits = EngineTraits(equivalence=Safety(fit_request=fit_request))

    ill = (v.Request("bad", ()), v.Request("bad", (9,), 0), v.Request("bad", (1,), 0))
    run, wrong = list_failed_checks(
        Choosy, CONFIG, *(Hostile(v.Submit(request)) for request in ill)
    )
    assert wrong == []
    assert [one.event for one in run.exchanges] == [v.Submit(ill[2])]
    assert run.skipped == {}


FORKING = replace(CONFIG, enable_forks=True)
SAMPLED = (*RUNS, Answer())
GRAMMAR = v.Grammar((((0, 0), (1, 0)),))
HELD = v.Request("A", (1, 2, 3), 6, structured_output=True, grammar=GRAMMAR)
UNFIT: dict[str, tuple[tuple[Action, ...], v.Fork, v.RejectCode]] = {
    "malformed": (SAMPLED, v.Fork("A", ""), v.RejectCode.MALFORMED_EVENT),
    "of an unknown request": (SAMPLED, v.Fork("Z", "C"), v.RejectCode.UNKNOWN_REQUEST),
    "under an id in use": (SAMPLED, v.Fork("A", "A"), v.RejectCode.DUPLICATE_REQUEST),
    "under an id in flight": ((v.Submit(A), v.Submit(B), v.Schedule(), v.Abort(("B",))),
        v.Fork("A", "B"),
        v.RejectCode.REQUEST_IN_FLIGHT),
    "of a waiting request": ((*SAMPLED, v.Submit(B)), v.Fork("B", "C"), v.RejectCode.BAD_FORK),
    "of a branch that waits": ((*SAMPLED, v.Fork("A", "B")), v.Fork("B", "C"),
        v.RejectCode.BAD_FORK),
    "of a session": ((v.Submit(replace(A, resumable=True)), v.Schedule(), Answer()), v.Fork("A",
        "C"),
        v.RejectCode.BAD_FORK),
    "of a request in flight": (RUNS, v.Fork("A", "C"), v.RejectCode.FORK_IN_FLIGHT),
    "with its last output": (SAMPLED, v.Fork("A", "C", (1,) * 6), v.RejectCode.BAD_FORK),
    "with a forbidden token": ((v.Submit(HELD), v.GrammarReady("A"), v.Schedule(), Answer()),
        v.Fork("A",
        "C", (2,)), v.RejectCode.BAD_FORK),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_an_invalid_fork_may_be_rejected_and_not_be_accepted(name: str) -> None:
    start, fork, code = UNFIT[name]
    run, wrong = list_failed_checks(AtSafety, FORKING, *start, Hostile(fork))
    assert wrong == []
    assert run.exchanges[-1].seen == v.Rejected(code, run.exchanges[-1].seen.detail)
    taking = answering(lambda _event, _seen: v.Ack())
    assert list_failed_checks(taking, FORKING, *start, Hostile(fork))[1] == FAILED


def test_a_fork_must_not_be_accepted_if_forks_are_disabled() -> None:
    assert list_failed_checks(AtSafety, CONFIG, *SAMPLED, Hostile(v.Fork("A", "C")))[1] == []
    taking = answering(lambda _event, _seen: v.Ack())
    assert list_failed_checks(taking, CONFIG, *SAMPLED, Hostile(v.Fork("A", "C")))[1] == FAILED


class RefusesForks(AtSafety):
    """An engine that rejects all forks."""

    def apply(self, event: v.Event) -> v.Observation:
        return (
            v.Rejected(v.RejectCode.BAD_FORK) if isinstance(event, v.Fork) else super().apply(event)
        )


def test_a_valid_fork_must_be_accepted() -> None:
    """A preempted request may be forked, too; shared blocks are no hit without prefix caching."""
    uncached = replace(FORKING, enable_prefix_caching=False)
    for config in (FORKING, uncached):
        branching = (*SAMPLED, v.Fork("A", "C", (0,)))
        assert list_failed_checks(AtSafety, config, *branching, Drain())[1] == []
        assert list_failed_checks(RefusesForks, config, *branching)[1] == [
            "answer_is_of_the_kind_of_the_event"
        ]
    preempted = (*SAMPLED, v.Reset(reset_running_requests=True), v.Fork("A", "C", (0,)))
    assert list_failed_checks(AtSafety, FORKING, *preempted, Drain())[1] == []
    assert list_failed_checks(RefusesForks, FORKING, *preempted)[1] == [
        "answer_is_of_the_kind_of_the_event"
    ]


def test_the_row_of_a_branch_has_its_own_outputs() -> None:
    class Mixes(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            if not (isinstance(seen, v.Plan) and seen.new and seen.new[0].output_token_ids):
                return seen
            return replace(seen, new=(replace(seen.new[0], output_token_ids=(1,)),))

    branching = (*SAMPLED, v.Fork("A", "C", (0,)), v.Schedule())
    assert (
        "new_row_carries_the_request_as_submitted"
        in list_failed_checks(Mixes, FORKING, *branching)[1]
    )


def test_a_request_that_ends_with_the_next_plan_is_not_forked() -> None:
    class EndsLate(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            assert not isinstance(event, v.Fork)
            seen = super().apply(event)
            return v.Aborted((), seen.request_ids) if isinstance(seen, v.Aborted) else seen

    given = (*SAMPLED, v.Abort(("A",)), v.Fork("A", "C", (0,)))
    assert list_failed_checks(EndsLate, FORKING, *given)[1] == []
