"""Refusable: at safety a mistake may be refused or come to nothing, and must change nothing.

Each engine here is our specification with one answer of its own, so what it is accused of, or not,
follows from that answer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from blockstep.conformance.engine import EngineFactory, EngineTraits, Safety
from blockstep.conformance.lockstep.runs import run_program, start_program
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
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    Commit,
    Config,
    Drafts,
    DraftsTaken,
    Event,
    Fork,
    Grammar,
    GrammarReady,
    Observation,
    OutputRow,
    Outputs,
    Plan,
    RejectCode,
    Rejected,
    Request,
    Reset,
    RowTokens,
    Schedule,
    Snapshot,
    SpecMethod,
    Submit,
)

CONFIG = Config(num_blocks=9, block_size=2, max_model_len=16, max_num_batched_tokens=16)
AHEAD = replace(CONFIG, max_frames_in_flight=2, async_scheduling=True)
PIPELINE = replace(CONFIG, max_frames_in_flight=2)
DRAFTING = replace(CONFIG, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
A, B = Request("A", (1, 2, 3), 6), Request("B", (4, 5), 6)
RUNS: tuple[Action, ...] = (Submit(A), Schedule())
TAKEN = ["stale_or_wrong_event_is_refused"]
"""What is found where a mistake was taken."""


class AtSafety(SpecEngine):
    """The specification, compared with nothing."""

    traits = EngineTraits(equivalence=Safety())


def answering(answer: Callable[[Event, Observation], Observation]) -> EngineFactory:
    """An engine that says something else where the specification refuses."""

    class Answering(AtSafety):
        def apply(self, event: Event) -> Observation:
            seen = super().apply(event)
            return answer(event, seen) if isinstance(seen, Rejected) else seen

    return Answering


def hearing(make_engine: EngineFactory, config: Config, *actions: Action) -> tuple[Any, list[str]]:
    """The run of a program, and the sentences that found something wrong."""
    run, findings = run_program(Program(config, actions), make_engine)
    return run, [found.sentence for found in findings]


@pytest.mark.parametrize("mistake", Mistake)
@pytest.mark.parametrize("config", [CONFIG, AHEAD, DRAFTING], ids=["plain", "ahead", "drafting"])
def test_a_wrong_answer_is_given_and_its_refusal_is_right(config: Config, mistake: Mistake) -> None:
    start: tuple[Action, ...] = (*RUNS, Answer(), Propose(((2, 1),)), Submit(B), Schedule())
    start += (Schedule(),) if config is AHEAD else ()
    run, wrong = hearing(AtSafety, config, *start, Misanswer(mistake), Drain())
    assert wrong == []
    refused = [one for one in run.exchanges if isinstance(one.seen, Rejected)]
    possible = mistake is not Mistake.TOO_EARLY or config is AHEAD
    possible &= mistake is not Mistake.WRONG_DRAFT or config is DRAFTING
    # Nobody has a grammar.
    possible &= mistake not in (Mistake.PREFILL_TOKEN, Mistake.FORBIDDEN_TOKEN)
    assert len(refused) == possible


def test_a_forbidden_token_may_be_refused_and_not_be_taken() -> None:
    """Whoever takes it hands a client what its grammar forbids."""
    grammar = Grammar((((0, 0), (1, 0)),))
    held = Request("A", (1, 2, 3), 6, structured_output=True, grammar=grammar)
    program = (Submit(held), GrammarReady("A"), Schedule(), Misanswer(Mistake.FORBIDDEN_TOKEN))
    run, wrong = hearing(AtSafety, CONFIG, *program)
    assert wrong == []
    assert run.exchanges[-1].seen == Rejected(RejectCode.BAD_RESULT)
    taken = answering(lambda _event, _seen: Outputs((OutputRow("A", (2,)),)))
    assert hearing(taken, CONFIG, *program)[1] == TAKEN


WRONG: dict[str, tuple[Config, tuple[Action, ...], Event, Observation]] = {
    "unknown": (CONFIG, RUNS, Commit(9, ()), Outputs((OutputRow("A", (1,)),))),
    "bad result": (
        CONFIG,
        RUNS,
        Commit(0, (RowTokens("A", (1, 1, 1)),)),
        Outputs((OutputRow("A", (1, 1, 1)),)),
    ),
    "one plan too many": (
        CONFIG,
        (*RUNS, Submit(B)),
        Schedule(),
        Plan(1, finished_req_ids=("A",)),
    ),
    "no prompt": (CONFIG, RUNS, Submit(Request("C", ())), Ack()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_that_is_taken_is_told(name: str) -> None:
    config, start, event, answer = WRONG[name]
    run = start_program(Program(config, ()), answering(lambda _event, _seen: answer))
    for action in start:
        assert run.perform(action) == []
    if isinstance(answer, Plan):  # one that runs something; an empty one would be none too many
        row = run.plans[0].new[0]
        answer = Plan(1, new=(replace(row, request=B),))
    assert [found.sentence for found in run.perform(Hostile(event))] == TAKEN


HARMLESS: dict[str, tuple[Event, Observation]] = {
    "an answer to nothing": (Commit(9, ()), Outputs()),
    "a grammar of nobody": (GrammarReady("nobody"), Ack()),
    "a grammar of somebody without": (GrammarReady("A"), Ack()),
    "somebody once more": (Submit(A), Ack()),
    "too many drafts": (Drafts((RowTokens("A", (1, 2, 3)),)), DraftsTaken()),
    "an empty plan": (Schedule(), Plan(1)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_comes_to_nothing_is_no_mistake(name: str) -> None:
    event, answer = HARMLESS[name]
    make_engine = answering(lambda _event, _seen: answer)
    run, wrong = hearing(make_engine, CONFIG, *RUNS, Hostile(event))
    assert wrong == []
    assert run.exchanges[-1].seen == answer
    assert [*run.live] == ["A"]
    assert len(run.plans) == 1
    assert run.perform(Answer()) == []  # it goes on as if nothing had been


def test_an_answer_out_of_turn_that_nobody_waits_for_may_be_taken() -> None:
    """Each request of a pipeline has its own token; those of an earlier plan it does not touch."""

    class AnyOrder(AtSafety):
        def apply(self, event: Event) -> Observation:
            if isinstance(event, Commit) and event.frame_id == 1:
                self.late = event
                return Outputs(
                    tuple(OutputRow(row.request_id, row.token_ids) for row in event.sampled)
                )
            seen = super().apply(event)
            if isinstance(event, Commit) and event.frame_id == 0:
                super().apply(self.late)
            return seen

        def snapshot(self) -> None:  # type: ignore[override]
            return

        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {"snapshot"}

    two = (*RUNS, Submit(B), Schedule())
    run, wrong = hearing(AnyOrder, PIPELINE, *two, Misanswer(Mistake.TOO_EARLY), Answer(), Drain())
    assert wrong == []
    assert [one.event.frame_id for one in run.exchanges if isinstance(one.event, Commit)][:2] == [
        1,
        0,
    ]
    ahead = (*RUNS, Schedule(), Misanswer(Mistake.TOO_EARLY))
    assert hearing(AnyOrder, AHEAD, *ahead)[1] == TAKEN  # A waits for its first token


def test_a_refusal_changes_nothing() -> None:
    class Forgetful(AtSafety):
        forgets = False

        def apply(self, event: Event) -> Observation:
            seen = super().apply(event)
            self.forgets |= isinstance(seen, Rejected)
            return seen

        def snapshot(self) -> Snapshot:
            shown = super().snapshot()
            return replace(shown, free_queue=shown.free_queue[::-1]) if self.forgets else shown

    assert hearing(Forgetful, CONFIG, *RUNS, Hostile(Commit(9, ())))[1] == [
        "rejected_event_changes_nothing"
    ]
    assert (
        hearing(
            Forgetful,
            CONFIG,
            *RUNS,
            Submit(
                replace(B, max_tokens=99),
            ),
        )[1]
        == []
    )
    long = Request("L", tuple(range(40)), 4)
    assert hearing(Forgetful, CONFIG, *RUNS, Submit(long))[1] == ["rejected_event_changes_nothing"]


LONG = Request("L", tuple(range(12)), 4)
SMALL_POOL = replace(CONFIG, num_blocks=7)


def test_a_request_that_never_fits_may_be_refused_and_is_counted_nowhere() -> None:
    run, wrong = hearing(AtSafety, SMALL_POOL, Submit(LONG), Drain())
    assert wrong == []
    assert run.exchanges[0].seen == Rejected(RejectCode.NEVER_FITS)
    assert run.skipped == {}


def test_who_takes_what_never_fits_must_serve_it() -> None:
    class Promising(AtSafety):
        def apply(self, event: Event) -> Observation:
            seen = super().apply(event)
            return Ack() if isinstance(seen, Rejected) and isinstance(event, Submit) else seen

    _, wrong = hearing(Promising, SMALL_POOL, Submit(LONG), Drain())
    assert wrong == ["every_request_ends_once_all_is_healed"]


def test_without_refusals_nothing_is_given_that_may_be_refused() -> None:
    class Trusting(AtSafety):
        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {"rejection"}

    mistakes = (Hostile(Commit(9, ())), Submit(LONG), Schedule(), Submit(A))
    run, wrong = hearing(Trusting, SMALL_POOL, *RUNS, *mistakes)
    assert wrong == []
    assert [type(one.event) for one in run.exchanges] == [Submit, Schedule]


def test_no_request_has_a_name_that_a_plan_in_flight_has() -> None:
    """If it were taken, nobody could tell whose the tokens are."""
    given = (*RUNS, Abort(("A",)), Submit(A), Submit(B), Answer(), Submit(A))
    run, wrong = hearing(AtSafety, CONFIG, *given)
    assert wrong == []
    names = [one.event.request.request_id for one in run.exchanges if isinstance(one.event, Submit)]
    assert names == ["A", "B", "A"]


class RefusesDrafts(AtSafety):
    """Takes no drafts at all."""

    def apply(self, event: Event) -> Observation:
        if isinstance(event, Drafts):
            return Rejected(RejectCode.BAD_DRAFTS)
        return super().apply(event)


def test_drafts_in_time_must_be_taken_and_late_ones_may_be_refused() -> None:
    timely = (*RUNS, Answer(), Propose(((1, 1),)))
    assert hearing(RefusesDrafts, DRAFTING, *timely)[1] == ["answer_is_of_the_kind_of_the_event"]
    late = (*RUNS, Answer(), Schedule(), Propose(((1, 1),)))
    assert hearing(RefusesDrafts, DRAFTING, *late)[1] == []


def test_what_an_adapter_declines_or_cannot_read_is_not_given_to_be_refused() -> None:
    def fit_request(request: Request, _config: Config) -> Request | None:
        return request if request.prompt_token_ids[0] < 9 else None

    class Choosy(AtSafety):
        traits = EngineTraits(equivalence=Safety(fit_request=fit_request))

    ill = (Request("bad", ()), Request("bad", (9,), 0), Request("bad", (1,), 0))
    run, wrong = hearing(Choosy, CONFIG, *(Hostile(Submit(request)) for request in ill))
    assert wrong == []
    assert [one.event for one in run.exchanges] == [Submit(ill[2])]
    assert run.skipped == {}


FORKING = replace(CONFIG, enable_forks=True)
SAID = (*RUNS, Answer())
GRAMMAR = Grammar((((0, 0), (1, 0)),))
HELD = Request("A", (1, 2, 3), 6, structured_output=True, grammar=GRAMMAR)
UNFIT: dict[str, tuple[tuple[Action, ...], Fork, RejectCode]] = {
    "malformed": (SAID, Fork("A", ""), RejectCode.MALFORMED_EVENT),
    "of nobody": (SAID, Fork("Z", "C"), RejectCode.UNKNOWN_REQUEST),
    "under a name that is there": (SAID, Fork("A", "A"), RejectCode.DUPLICATE_REQUEST),
    "under a name in flight": (
        (Submit(A), Submit(B), Schedule(), Abort(("B",))),
        Fork("A", "B"),
        RejectCode.REQUEST_IN_FLIGHT,
    ),
    "of who waits": ((*SAID, Submit(B)), Fork("B", "C"), RejectCode.BAD_FORK),
    "of a branch that waits": ((*SAID, Fork("A", "B")), Fork("B", "C"), RejectCode.BAD_FORK),
    "of a session": (
        (Submit(replace(A, resumable=True)), Schedule(), Answer()),
        Fork("A", "C"),
        RejectCode.BAD_FORK,
    ),
    "of who is in flight": (RUNS, Fork("A", "C"), RejectCode.FORK_IN_FLIGHT),
    "with its last output": (SAID, Fork("A", "C", (1,) * 6), RejectCode.BAD_FORK),
    "with what is forbidden": (
        (Submit(HELD), GrammarReady("A"), Schedule(), Answer()),
        Fork("A", "C", (2,)),
        RejectCode.BAD_FORK,
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_branch_that_cannot_begin_may_be_refused_and_not_be_taken(name: str) -> None:
    start, fork, code = UNFIT[name]
    run, wrong = hearing(AtSafety, FORKING, *start, Hostile(fork))
    assert wrong == []
    assert run.exchanges[-1].seen == Rejected(code, run.exchanges[-1].seen.detail)
    taking = answering(lambda _event, _seen: Ack())
    assert hearing(taking, FORKING, *start, Hostile(fork))[1] == TAKEN


def test_without_forks_nobody_goes_on_as_two() -> None:
    assert hearing(AtSafety, CONFIG, *SAID, Hostile(Fork("A", "C")))[1] == []
    taking = answering(lambda _event, _seen: Ack())
    assert hearing(taking, CONFIG, *SAID, Hostile(Fork("A", "C")))[1] == TAKEN


class RefusesForks(AtSafety):
    """Takes no branch at all."""

    def apply(self, event: Event) -> Observation:
        return Rejected(RejectCode.BAD_FORK) if isinstance(event, Fork) else super().apply(event)


def test_a_branch_that_can_begin_must_be_taken() -> None:
    """Of who was preempted, too; without prefix caching what it shares is no hit."""
    uncached = replace(FORKING, enable_prefix_caching=False)
    for config in (FORKING, uncached):
        branching = (*SAID, Fork("A", "C", (0,)))
        assert hearing(AtSafety, config, *branching, Drain())[1] == []
        assert hearing(RefusesForks, config, *branching)[1] == [
            "answer_is_of_the_kind_of_the_event"
        ]
    preempted = (*SAID, Reset(reset_running_requests=True), Fork("A", "C", (0,)))
    assert hearing(AtSafety, FORKING, *preempted, Drain())[1] == []
    assert hearing(RefusesForks, FORKING, *preempted)[1] == ["answer_is_of_the_kind_of_the_event"]


def test_a_branch_begins_with_its_own_outputs() -> None:
    class Mixes(AtSafety):
        def apply(self, event: Event) -> Observation:
            seen = super().apply(event)
            if not (isinstance(seen, Plan) and seen.new and seen.new[0].output_token_ids):
                return seen
            return replace(seen, new=(replace(seen.new[0], output_token_ids=(1,)),))

    branching = (*SAID, Fork("A", "C", (0,)), Schedule())
    assert "new_row_carries_the_request_as_submitted" in hearing(Mixes, FORKING, *branching)[1]


def test_who_is_about_to_end_is_not_asked_for_a_branch() -> None:
    class EndsLate(AtSafety):
        def apply(self, event: Event) -> Observation:
            assert not isinstance(event, Fork)
            seen = super().apply(event)
            return Aborted((), seen.request_ids) if isinstance(seen, Aborted) else seen

    given = (*SAID, Abort(("A",)), Fork("A", "C", (0,)))
    assert hearing(EndsLate, FORKING, *given)[1] == []
