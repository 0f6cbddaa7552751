"""Grammars: P23 the grammar state follows from the outputs, and a plan says whether it needs a
bitmask.

The worker judges bitmasks, with automata of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from blockstep.conformance.judge.automaton import Automaton
from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.ledger import WHOLE, Ledger
from blockstep.conformance.judge.properties.sentence import (
    Complaints,
    differing,
    differing_requests,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.step import RowKind, Step
from blockstep.spec import vocabulary as v


@sentence("P23", v.Schedule, v.Commit, v.Drafts, v.GrammarBitmask, v.Reset, needs=WHOLE)
def grammar_stands_where_the_outputs_led_it(step: Step, ledger: Ledger) -> Complaints:
    """The state of a grammar follows from the delivered tokens, whatever else happened: drafts,
    rejections, preemptions, resets.

    So does the flag that reasoning has ended, where the grammar waits for that.
    """
    if not ledger.has_grammars:
        return
    delivered = step.delivered if isinstance(step.event, v.Commit) else {}
    for name, request in step.new.items():
        life = ledger.lives.get(name)
        if life is None:
            continue
        place, due, automaton = life.find_place(delivered.get(name, ())), (0, False), life.automaton
        after = ledger.get_request_after(step, name)
        if automaton is not None and after is not life.request:  # an input restarts it
            automaton = Automaton(ledger.config, after)
            place = automaton.read(())
        if place is not None and automaton is not None:
            due = (place.state, automaton.is_reasoning_over(place))
        seen = (request.grammar_state, request.reasoning_ended)
        if seen != due:
            what = f"the grammar of {name!r} is not where its outputs led it"
            yield unequal(what, "grammar_state, reasoning_ended", due, seen, subjects=name)


@sentence("P23", v.Schedule)
def plan_tells_that_it_has_a_mask(step: Step, ledger: Ledger) -> Complaints:
    """A plan says whether a row samples under a grammar, and whether older frames have tokens of
    such a row in flight, for which its bitmask must wait."""
    plan = step.plan
    if not (
        ledger.has_grammars
        or plan.has_structured_output_requests
        or plan.pending_structured_output_tokens
    ):
        return
    masked = [
        row
        for row in (step.rows if ledger.has_grammars else ())
        if ledger.lives[row.request_id].automaton is not None and ledger.flight_row(row).samples
    ]
    if plan.has_structured_output_requests != bool(masked):
        yield from differing(
            "has_structured_output_requests", bool(masked), plan.has_structured_output_requests
        )
    waits = any(ledger.placeholders(row.request_id) for row in masked)
    if plan.pending_structured_output_tokens != waits:
        yield from differing(
            "pending_structured_output_tokens", waits, plan.pending_structured_output_tokens
        )


@sentence("P23", v.GrammarFailed)
def failed_grammar_ends_its_request(step: Step, _ledger: Ledger) -> Complaints:
    """A request whose grammar failed ends with an error and without a token, and no other request
    does."""
    assert isinstance(step.event, v.GrammarFailed)
    name = step.event.request_id
    # Another check compares the cached tokens.
    seen = tuple(replace(row, num_cached_tokens=0) for row in step.output_rows)
    yield from differing_requests("rows", (v.OutputRow(name, (), v.FinishReason.ERROR),), seen)
    yield from differing_requests("unfinished", sorted(step.old.keys() - {name}), sorted(step.new))


TEXTS = {
    "masks_made": "the bitmask of a frame had a row",
    "masks_of_drafts": "a row of a bitmask had a position for a draft",
    "masks_draft_cut": "a bitmask left out a draft that only the worker knew",
    "masks_behind_a_cut_draft": "a bitmask had a position after a draft that it left out",
    "masks_of_the_preempted": "a bitmask had a row of a request that was preempted since",
    "masks_in_reasoning": "a bitmask allowed all tokens because reasoning had not ended",
    "masks_terminated": "a bitmask allowed all tokens because the grammar was terminated",
    "masks_draft_cut_when_proposed": "a draft was left out when it was proposed",
    "masks_flag_of_frames_behind": "a plan's bitmask had to wait for tokens of older frames",
    "masks_resumed_amid_its_grammar": (
        "a preempted request was resumed after outputs under its grammar"
    ),
    "masks_reasoning_ended": "delivered tokens ended the reasoning of a request",
    "masks_failed_while_it_waits": "the grammar of a request that waited for it failed",
    "masks_failed_while_it_runs": "the grammar of a running request failed",
    "masks_failed_in_flight": "the grammar of a request with a row in flight failed",
}


def of_mask(step: Step, ledger: Ledger, rows: Sequence[v.GrammarRow]) -> Iterator[str]:
    """Yield the goals of a bitmask."""
    if rows:
        yield "masks_made"
    for row in rows:
        life, request = ledger.lives[row.request_id], step.new[row.request_id]
        if row.draft_token_ids:
            yield "masks_of_drafts"
        if v.DRAFT_PLACEHOLDER in row.draft_token_ids:
            yield "masks_draft_cut"
            if row.draft_token_ids.count(v.DRAFT_PLACEHOLDER) > 1:
                yield "masks_behind_a_cut_draft"
        if request.status is v.Status.PREEMPTED:
            yield "masks_of_the_preempted"
        place = life.find_place()
        if place is not None and row.allowed[0] is None:
            yield "masks_terminated" if place.holds else "masks_in_reasoning"


def of_proposals(
    ledger: Ledger, drafts: Sequence[v.RowTokens], taken: Sequence[v.RequestId]
) -> Iterator[str]:
    """Yield a goal for each proposal whose drafts a grammar cut."""
    for row in drafts:
        life = ledger.lives.get(row.request_id)
        if (
            life is not None
            and row.request_id in taken
            and life.accept(row.token_ids) != row.token_ids
        ):
            yield "masks_draft_cut_when_proposed"


def of_masked_plan(step: Step) -> Iterator[str]:
    """Yield the goals of a plan with grammars."""
    if step.plan.pending_structured_output_tokens:
        yield "masks_flag_of_frames_behind"
    for row in step.admitted_rows:
        if row.kind is RowKind.RESUMED and step.new[row.request_id].grammar_state:
            yield "masks_resumed_amid_its_grammar"


def of_masked_commit(step: Step) -> Iterator[str]:
    """Yield a goal for each request whose reasoning ended."""
    for name, new in step.new.items():
        if new.reasoning_ended and not step.old[name].reasoning_ended:
            yield "masks_reasoning_ended"


def of_failure(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of a failed grammar."""
    assert isinstance(step.event, v.GrammarFailed)
    name = step.event.request_id
    status = step.old[name].status
    if status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        yield "masks_failed_while_it_waits"
    elif status is v.Status.RUNNING:
        yield "masks_failed_while_it_runs"
    if ledger.in_flight(name):
        yield "masks_failed_in_flight"


def find(step: Step, ledger: Ledger) -> Iterable[str]:
    """Return the goals of a step of a run that has had a grammar, or of a question for a mask."""
    is_asked = isinstance(step.event, (v.GrammarBitmask, v.GrammarFailed))
    return _find(step, ledger) if ledger.has_grammars or is_asked else ()


def _find(step: Step, ledger: Ledger) -> Iterator[str]:
    match step.event, step.observation:
        case v.Schedule(), v.Plan() if ledger.has_grammars:
            yield from of_masked_plan(step)
        case v.Commit(), v.Outputs() if ledger.has_grammars:
            yield from of_masked_commit(step)
        case v.Drafts(drafts=drafts), v.DraftsTaken(request_ids=taken) if ledger.has_grammars:
            yield from of_proposals(ledger, drafts, taken)
        case v.GrammarBitmask(), v.GrammarOutput(rows=rows):
            yield from of_mask(step, ledger, rows)
        case v.GrammarFailed(), v.Outputs():
            yield from of_failure(step, ledger)


GOALS = Goals(TEXTS, find)
