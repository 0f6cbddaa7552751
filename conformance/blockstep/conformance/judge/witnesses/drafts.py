"""Situations of drafts: attached, scheduled, accepted, rolled back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from blockstep.conformance.judge.properties.amounts import blocks_for
from blockstep.conformance.judge.properties.ledger import FlightRow, Ledger
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec.vocabulary import Drafts, DraftsTaken, TokenIds

DRAFTS: Mapping[str, str] = {
    "drafts_taken": "drafts were attached to a request",
    "drafts_dropped": "drafts for one that cannot use them were dropped",
    "drafts_replaced": "drafts were attached over others not yet scheduled",
    "drafts_scheduled": "a row carried drafts",
    "drafts_trimmed": "a row carried fewer drafts than were attached",
    "drafts_lost_by_preemption": "a request was preempted with drafts attached",
    "block_for_lookahead_only": "a row gained a block that only the lookahead needs",
    "drafts_all_accepted": "every draft of a row was right",
    "drafts_some_accepted": "some drafts of a row were right, and some not",
    "drafts_none_accepted": "the first draft of a row was wrong",
    "rollback_over_a_block_boundary": "rejected drafts had reached into another block",
}


def of_acceptance(step: Step, flight: FlightRow, tokens: TokenIds) -> Iterator[str]:
    """How many of a row's drafts were right."""
    if not flight.drafts:
        return
    accepted, size = len(tokens) - 1, step.config.block_size
    if accepted == len(flight.drafts):
        yield "drafts_all_accepted"
    elif accepted:
        yield "drafts_some_accepted"
    else:
        yield "drafts_none_accepted"
    kept = flight.end - (len(flight.drafts) - accepted)
    if blocks_for(step.config, kept) < -(-flight.end // size):
        yield "rollback_over_a_block_boundary"


def of_drafts(step: Step, ledger: Ledger) -> Iterator[str]:
    """What becomes of drafts that are handed in."""
    assert isinstance(step.event, Drafts)
    assert isinstance(step.observation, DraftsTaken)
    for row in step.event.drafts:
        if row.request_id not in step.observation.request_ids:
            yield "drafts_dropped"
        elif row.token_ids:
            yield "drafts_taken"
            if ledger.lives[row.request_id].drafts:
                yield "drafts_replaced"
