"""At safety a mistake may be refused or come to nothing, and must change nothing.

Each engine here is our specification with one answer of its own, so what it is accused of, or not,
follows from that answer alone.
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
TAKEN = ["stale_or_wrong_event_is_rejected"]
"""What is found where a mistake was taken."""


class AtSafety(SpecEngine):
    """The specification, compared with nothing."""

    traits = EngineTraits(equivalence=Safety())


def answering(answer: Callable[[v.Event, v.Observation], v.Observation]) -> EngineFactory:
    """An engine that says something else where the specification refuses."""

    class Answering(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            return answer(event, seen) if isinstance(seen, v.Rejected) else seen

    return Answering


def hearing(
    make_engine: EngineFactory, config: v.Config, *actions: Action
) -> tuple[Any, list[str]]:
    """The run of a program, and the sentences that found something wrong."""
    run, findings = run_program(Program(config, actions), make_engine)
    return run, [found.sentence for found in findings]


@pytest.mark.parametrize("mistake", Mistake)
@pytest.mark.parametrize("config", [CONFIG, AHEAD, DRAFTING], ids=["plain", "ahead", "drafting"])
def test_a_wrong_answer_is_given_and_its_refusal_is_right(
    config: v.Config, mistake: Mistake
) -> None:
    start: tuple[Action, ...] = (*RUNS, Answer(), Propose(((2, 1),)), v.Submit(B), v.Schedule())
    start += (v.Schedule(),) if config is AHEAD else ()
    run, wrong = hearing(AtSafety, config, *start, Misanswer(mistake), Drain())
    assert wrong == []
    refused = [one for one in run.exchanges if isinstance(one.seen, v.Rejected)]
    possible = mistake is not Mistake.TOO_EARLY or config is AHEAD
    possible &= mistake is not Mistake.WRONG_DRAFT or config is DRAFTING
    # Nobody has a grammar.
    possible &= mistake not in (Mistake.PREFILL_TOKEN, Mistake.FORBIDDEN_TOKEN)
    assert len(refused) == possible


def test_a_forbidden_token_may_be_refused_and_not_be_taken() -> None:
    """Whoever takes it hands a client what its grammar forbids."""
    grammar = v.Grammar((((0, 0), (1, 0)),))
    held = v.Request("A", (1, 2, 3), 6, structured_output=True, grammar=grammar)
    program = (
        v.Submit(held),
        v.GrammarReady("A"),
        v.Schedule(),
        Misanswer(Mistake.FORBIDDEN_TOKEN),
    )
    run, wrong = hearing(AtSafety, CONFIG, *program)
    assert wrong == []
    assert run.exchanges[-1].seen == v.Rejected(v.RejectCode.BAD_RESULT)
    taken = answering(lambda _event, _seen: v.Outputs((v.OutputRow("A", (2,)),)))
    assert hearing(taken, CONFIG, *program)[1] == TAKEN


WRONG: dict[str, tuple[v.Config, tuple[Action, ...], v.Event, v.Observation]] = {
    "unknown": (CONFIG, RUNS, v.Commit(9, ()), v.Outputs((v.OutputRow("A", (1,)),))),
    "bad result": (CONFIG, RUNS, v.Commit(0, (v.RowTokens("A", (1, 1, 1)),)),
        v.Outputs((v.OutputRow("A", (1, 1, 1)),))),
    "one plan too many": (CONFIG, (*RUNS, v.Submit(B)), v.Schedule(), v.Plan(1,
        finished_req_ids=("A",))),
    "no prompt": (CONFIG, RUNS, v.Submit(v.Request("C", ())), v.Ack()),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_that_is_taken_is_found(name: str) -> None:
    config, start, event, answer = WRONG[name]
    run = start_program(Program(config, ()), answering(lambda _event, _seen: answer))
    for action in start:
        assert run.perform(action) == []
    if isinstance(answer, v.Plan):  # one that runs something; an empty one would be none too many
        row = run.plans[0].new[0]
        answer = v.Plan(1, new=(replace(row, request=B),))
    assert [found.sentence for found in run.perform(Hostile(event))] == TAKEN


HARMLESS: dict[str, tuple[v.Event, v.Observation]] = {
    "an answer to nothing": (v.Commit(9, ()), v.Outputs()),
    "a grammar of nobody": (v.GrammarReady("nobody"), v.Ack()),
    "a grammar of somebody without": (v.GrammarReady("A"), v.Ack()),
    "somebody once more": (v.Submit(A), v.Ack()),
    "too many drafts": (v.Drafts((v.RowTokens("A", (1, 2, 3)),)), v.DraftsTaken()),
    "an empty plan": (v.Schedule(), v.Plan(1)),
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


def test_an_answer_out_of_turn_that_no_request_waits_for_may_be_taken() -> None:
    """Each request of a pipeline has its own token; those of an earlier plan it does not touch."""

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
    run, wrong = hearing(AnyOrder, PIPELINE, *two, Misanswer(Mistake.TOO_EARLY), Answer(), Drain())
    assert wrong == []
    assert [one.event.frame_id for one in run.exchanges if isinstance(one.event, v.Commit)][:2] == [
        1,
        0,
    ]
    ahead = (*RUNS, v.Schedule(), Misanswer(Mistake.TOO_EARLY))
    assert hearing(AnyOrder, AHEAD, *ahead)[1] == TAKEN  # A waits for its first token


def test_a_refusal_changes_nothing() -> None:
    class Forgetful(AtSafety):
        forgets = False

        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            self.forgets |= isinstance(seen, v.Rejected)
            return seen

        def snapshot(self) -> v.Snapshot:
            shown = super().snapshot()
            return replace(shown, free_queue=shown.free_queue[::-1]) if self.forgets else shown

    assert hearing(Forgetful, CONFIG, *RUNS, Hostile(v.Commit(9, ())))[1] == [
        "rejected_event_changes_nothing"
    ]
    assert hearing(Forgetful, CONFIG, *RUNS, v.Submit(replace(B, max_tokens=99)))[1] == []
    long = v.Request("L", tuple(range(40)), 4)
    assert hearing(Forgetful, CONFIG, *RUNS, v.Submit(long))[1] == [
        "rejected_event_changes_nothing"
    ]


LONG = v.Request("L", tuple(range(12)), 4)
SMALL_POOL = replace(CONFIG, num_blocks=7)


def test_a_request_that_never_fits_may_be_refused_and_is_counted_nowhere() -> None:
    run, wrong = hearing(AtSafety, SMALL_POOL, v.Submit(LONG), Drain())
    assert wrong == []
    assert run.exchanges[0].seen == v.Rejected(v.RejectCode.NEVER_FITS)
    assert run.skipped == {}


def test_an_engine_that_takes_what_never_fits_must_serve_it() -> None:
    class Promising(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            return v.Ack() if isinstance(seen, v.Rejected) and isinstance(event, v.Submit) else seen

    _, wrong = hearing(Promising, SMALL_POOL, v.Submit(LONG), Drain())
    assert wrong == ["every_request_finishes_after_faults_stop"]


def test_without_refusals_nothing_is_given_that_may_be_refused() -> None:
    class Trusting(AtSafety):
        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {"rejection"}

    mistakes = (Hostile(v.Commit(9, ())), v.Submit(LONG), v.Schedule(), v.Submit(A))
    run, wrong = hearing(Trusting, SMALL_POOL, *RUNS, *mistakes)
    assert wrong == []
    assert [type(one.event) for one in run.exchanges] == [v.Submit, v.Schedule]


def test_no_request_has_a_name_that_a_plan_in_flight_has() -> None:
    """If it were taken, nobody could tell whose the tokens are."""
    given = (*RUNS, v.Abort(("A",)), v.Submit(A), v.Submit(B), Answer(), v.Submit(A))
    run, wrong = hearing(AtSafety, CONFIG, *given)
    assert wrong == []
    names = [
        one.event.request.request_id for one in run.exchanges if isinstance(one.event, v.Submit)
    ]
    assert names == ["A", "B", "A"]


class RefusesDrafts(AtSafety):
    """Takes no drafts at all."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Drafts):
            return v.Rejected(v.RejectCode.BAD_DRAFTS)
        return super().apply(event)


def test_drafts_in_time_must_be_taken_and_late_ones_may_be_refused() -> None:
    timely = (*RUNS, Answer(), Propose(((1, 1),)))
    assert hearing(RefusesDrafts, DRAFTING, *timely)[1] == ["answer_is_of_the_kind_of_the_event"]
    late = (*RUNS, Answer(), v.Schedule(), Propose(((1, 1),)))
    assert hearing(RefusesDrafts, DRAFTING, *late)[1] == []


def test_what_an_adapter_declines_or_cannot_read_is_not_given_to_be_refused() -> None:
    def fit_request(request: v.Request, _config: v.Config) -> v.Request | None:
        return request if request.prompt_token_ids[0] < 9 else None

    class Choosy(AtSafety):
        traits = EngineTraits(equivalence=Safety(fit_request=fit_request))

    ill = (v.Request("bad", ()), v.Request("bad", (9,), 0), v.Request("bad", (1,), 0))
    run, wrong = hearing(Choosy, CONFIG, *(Hostile(v.Submit(request)) for request in ill))
    assert wrong == []
    assert [one.event for one in run.exchanges] == [v.Submit(ill[2])]
    assert run.skipped == {}


FORKING = replace(CONFIG, enable_forks=True)
SAMPLED = (*RUNS, Answer())
GRAMMAR = v.Grammar((((0, 0), (1, 0)),))
HELD = v.Request("A", (1, 2, 3), 6, structured_output=True, grammar=GRAMMAR)
UNFIT: dict[str, tuple[tuple[Action, ...], v.Fork, v.RejectCode]] = {
    "malformed": (SAMPLED, v.Fork("A", ""), v.RejectCode.MALFORMED_EVENT),
    "of nobody": (SAMPLED, v.Fork("Z", "C"), v.RejectCode.UNKNOWN_REQUEST),
    "under a name that is there": (SAMPLED, v.Fork("A", "A"), v.RejectCode.DUPLICATE_REQUEST),
    "under a name in flight": ((v.Submit(A), v.Submit(B), v.Schedule(), v.Abort(("B",))),
        v.Fork("A", "B"),
        v.RejectCode.REQUEST_IN_FLIGHT),
    "of a waiting request": ((*SAMPLED, v.Submit(B)), v.Fork("B", "C"), v.RejectCode.BAD_FORK),
    "of a branch that waits": ((*SAMPLED, v.Fork("A", "B")), v.Fork("B", "C"),
        v.RejectCode.BAD_FORK),
    "of a session": ((v.Submit(replace(A, resumable=True)), v.Schedule(), Answer()), v.Fork("A",
        "C"),
        v.RejectCode.BAD_FORK),
    "of who is in flight": (RUNS, v.Fork("A", "C"), v.RejectCode.FORK_IN_FLIGHT),
    "with its last output": (SAMPLED, v.Fork("A", "C", (1,) * 6), v.RejectCode.BAD_FORK),
    "with what is forbidden": ((v.Submit(HELD), v.GrammarReady("A"), v.Schedule(), Answer()),
        v.Fork("A",
        "C", (2,)), v.RejectCode.BAD_FORK),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_a_branch_that_cannot_begin_may_be_refused_and_not_be_taken(name: str) -> None:
    start, fork, code = UNFIT[name]
    run, wrong = hearing(AtSafety, FORKING, *start, Hostile(fork))
    assert wrong == []
    assert run.exchanges[-1].seen == v.Rejected(code, run.exchanges[-1].seen.detail)
    taking = answering(lambda _event, _seen: v.Ack())
    assert hearing(taking, FORKING, *start, Hostile(fork))[1] == TAKEN


def test_without_forks_no_request_goes_on_as_two() -> None:
    assert hearing(AtSafety, CONFIG, *SAMPLED, Hostile(v.Fork("A", "C")))[1] == []
    taking = answering(lambda _event, _seen: v.Ack())
    assert hearing(taking, CONFIG, *SAMPLED, Hostile(v.Fork("A", "C")))[1] == TAKEN


class RefusesForks(AtSafety):
    """Takes no branch at all."""

    def apply(self, event: v.Event) -> v.Observation:
        return (
            v.Rejected(v.RejectCode.BAD_FORK) if isinstance(event, v.Fork) else super().apply(event)
        )


def test_a_branch_that_can_begin_must_be_taken() -> None:
    """Of who was preempted, too; without prefix caching what it shares is no hit."""
    uncached = replace(FORKING, enable_prefix_caching=False)
    for config in (FORKING, uncached):
        branching = (*SAMPLED, v.Fork("A", "C", (0,)))
        assert hearing(AtSafety, config, *branching, Drain())[1] == []
        assert hearing(RefusesForks, config, *branching)[1] == [
            "answer_is_of_the_kind_of_the_event"
        ]
    preempted = (*SAMPLED, v.Reset(reset_running_requests=True), v.Fork("A", "C", (0,)))
    assert hearing(AtSafety, FORKING, *preempted, Drain())[1] == []
    assert hearing(RefusesForks, FORKING, *preempted)[1] == ["answer_is_of_the_kind_of_the_event"]


def test_a_branch_begins_with_its_own_outputs() -> None:
    class Mixes(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            seen = super().apply(event)
            if not (isinstance(seen, v.Plan) and seen.new and seen.new[0].output_token_ids):
                return seen
            return replace(seen, new=(replace(seen.new[0], output_token_ids=(1,)),))

    branching = (*SAMPLED, v.Fork("A", "C", (0,)), v.Schedule())
    assert "new_row_carries_the_request_as_submitted" in hearing(Mixes, FORKING, *branching)[1]


def test_a_request_that_is_about_to_end_is_not_asked_for_a_branch() -> None:
    class EndsLate(AtSafety):
        def apply(self, event: v.Event) -> v.Observation:
            assert not isinstance(event, v.Fork)
            seen = super().apply(event)
            return v.Aborted((), seen.request_ids) if isinstance(seen, v.Aborted) else seen

    given = (*SAMPLED, v.Abort(("A",)), v.Fork("A", "C", (0,)))
    assert hearing(EndsLate, FORKING, *given)[1] == []
