"""Goals that need grammars: bitmasks, and their effect on drafts."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import RowKind, Step
from blockstep.spec import vocabulary as v

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


def of_mask(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a bitmask."""
    assert isinstance(step.observation, v.GrammarOutput)
    rows = step.observation.rows
    if rows:
        yield "masks_made"
    for row in rows:
        life, request = history.lives[row.request_id], step.new[row.request_id]
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


def of_proposals(step: Step, history: History) -> Iterator[str]:
    """Yield a goal for each proposal whose drafts a grammar cut."""
    assert isinstance(step.event, v.Drafts)
    assert isinstance(step.observation, v.DraftsTaken)
    taken = step.observation.request_ids
    for row in step.event.drafts if history.has_grammars else ():
        life = history.lives.get(row.request_id)
        if (
            life is not None
            and row.request_id in taken
            and life.accept(row.token_ids) != row.token_ids
        ):
            yield "masks_draft_cut_when_proposed"


def of_masked_plan(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan with grammars."""
    if not history.has_grammars:
        return
    if step.plan.pending_structured_output_tokens:
        yield "masks_flag_of_frames_behind"
    for row in step.admitted_rows:
        if row.kind is RowKind.RESUMED and step.new[row.request_id].grammar_state:
            yield "masks_resumed_amid_its_grammar"


def of_masked_commit(step: Step, history: History) -> Iterator[str]:
    """Yield a goal for each request whose reasoning ended."""
    for name, new in step.new.items() if history.has_grammars else ():
        if new.reasoning_ended and not step.old[name].reasoning_ended:
            yield "masks_reasoning_ended"


def of_failure(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a failed grammar."""
    assert isinstance(step.event, v.GrammarFailed)
    name = step.event.request_id
    status = step.old[name].status
    if status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        yield "masks_failed_while_it_waits"
    elif status is v.Status.RUNNING:
        yield "masks_failed_while_it_runs"
    if history.in_flight(name):
        yield "masks_failed_in_flight"


GOALS = Goals(
    TEXTS,
    {
        v.Schedule: of_masked_plan,
        v.Commit: of_masked_commit,
        v.Drafts: of_proposals,
        v.GrammarBitmask: of_mask,
        v.GrammarFailed: of_failure,
    },
)
