"""Situations that there are only with grammars: masks, and what they do to drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import RowKind, Step
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    GrammarFailed,
    GrammarRow,
    RequestId,
    RowTokens,
    Status,
)

MASKS = {
    "masks_made": "the mask of a frame had a row",
    "masks_of_drafts": "a row of a mask had a place for a draft",
    "masks_draft_cut": "a mask left a draft out that only the worker had known",
    "masks_behind_a_cut_draft": "a place of a mask stood behind a draft that it had left out",
    "masks_of_the_preempted": "a mask had a row of one who had been preempted meanwhile",
    "masks_in_reasoning": "a mask left a row free because reasoning had not ended",
    "masks_terminated": "a mask left a row free because its grammar was terminated",
    "masks_draft_cut_when_proposed": "a draft was left out when it was proposed",
    "masks_flag_of_frames_behind": "a plan told that its mask must wait for older frames",
    "masks_resumed_amid_its_grammar": "one came back from preemption with its grammar on its way",
    "masks_reasoning_ended": "what a commit delivered ended the reasoning of a request",
    "masks_failed_while_it_waits": "a grammar failed of one who waited for it",
    "masks_failed_while_it_runs": "a grammar failed of one who runs",
    "masks_failed_in_flight": "a grammar failed of one of whom a frame in flight had a row",
}


def of_mask(step: Step, ledger: Ledger, rows: Sequence[GrammarRow]) -> Iterator[str]:
    """What a mask shows."""
    if rows:
        yield "masks_made"
    for row in rows:
        life, request = ledger.lives[row.request_id], step.new[row.request_id]
        if row.draft_token_ids:
            yield "masks_of_drafts"
        if DRAFT_PLACEHOLDER in row.draft_token_ids:
            yield "masks_draft_cut"
            if row.draft_token_ids.count(DRAFT_PLACEHOLDER) > 1:
                yield "masks_behind_a_cut_draft"
        if request.status is Status.PREEMPTED:
            yield "masks_of_the_preempted"
        place = life.find_place()
        if place is not None and row.allowed[0] is None:
            yield "masks_terminated" if place.holds else "masks_in_reasoning"


def of_proposals(
    ledger: Ledger, drafts: Sequence[RowTokens], taken: Sequence[RequestId]
) -> Iterator[str]:
    """Whether drafts were cut when they came."""
    for row in drafts:
        life = ledger.lives.get(row.request_id)
        if (
            life is not None
            and row.request_id in taken
            and life.accept(row.token_ids) != row.token_ids
        ):
            yield "masks_draft_cut_when_proposed"


def of_masked_plan(step: Step) -> Iterator[str]:
    """What a plan shows of those who have grammars."""
    if step.plan.pending_structured_output_tokens:
        yield "masks_flag_of_frames_behind"
    for row in step.admitted_rows:
        if row.kind is RowKind.RESUMED and step.new[row.request_id].grammar_state:
            yield "masks_resumed_amid_its_grammar"


def of_masked_commit(step: Step) -> Iterator[str]:
    """What a commit did to grammars."""
    for name, new in step.new.items():
        if new.reasoning_ended and not step.old[name].reasoning_ended:
            yield "masks_reasoning_ended"


def of_failure(step: Step, ledger: Ledger) -> Iterator[str]:
    """Where a request stood whose grammar failed."""
    assert isinstance(step.event, GrammarFailed)
    name = step.event.request_id
    status = step.old[name].status
    if status is Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        yield "masks_failed_while_it_waits"
    elif status is Status.RUNNING:
        yield "masks_failed_while_it_runs"
    if ledger.in_flight(name):
        yield "masks_failed_in_flight"
