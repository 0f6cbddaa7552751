"""Speculation: tokens that a proposer proposed and the next step verifies.

A step that reaches past the known tokens carries drafts (`token_budget`); the worker returns those
that it accepts and one token of its own. Under asynchronous scheduling the placeholders of frames
in flight count as known, and drafts are placeholders: only the worker knows them.
"""

from __future__ import annotations

from blockstep.spec.copies import replace
from blockstep.spec.core.requests import FrameRow, RequestState
from blockstep.spec.core.state import State
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    DraftsTaken,
    RejectCode,
    Rejected,
    RowTokens,
    SpecMethod,
    Stats,
    Status,
    TokenIds,
)


def compute_num_rejected(num_drafts: int, num_sampled: int) -> int:
    """Return the drafts that the worker did not accept; the last sampled token is its own.

    Source: seed 001 "Rejection Clawback in update_from_output()"; P14.
    """
    return num_drafts - (num_sampled - 1)


def is_accepted_prefix(sampled: TokenIds, drafts: TokenIds) -> bool:
    """Whether `sampled` is some leading drafts and one token more.

    The KV of an accepted position was computed from the draft, so accepting anything else would
    leave KV that does not belong to the tokens. Only the worker knows the draft behind a
    placeholder. Source: seed 001 "Rejection Clawback"; P3.
    """
    num_accepted = len(sampled) - 1
    return 0 <= num_accepted <= len(drafts) and all(
        draft in (token, DRAFT_PLACEHOLDER)
        for token, draft in zip(sampled[:-1], drafts, strict=False)
    )


def can_take_drafts(state: State, request: RequestState) -> bool:
    """Whether drafts proposed now are for the position that this request computes next.

    Not while a frame in flight will move that position, not in the middle of its prefill, and not
    before it runs: they would be scheduled at a later position.
    Source: seed 001 "Attaching Fresh Drafts for the Next Step"; P24.
    """
    in_flight = any(
        row.request_id == request.request_id for frame in state.frames for row in frame.rows
    )
    return (
        request.status is Status.RUNNING
        and not in_flight
        and not request.is_prefill_chunk
        and request.num_computed_tokens == request.num_known_tokens - 1
    )


def process_drafts(
    state: State, drafts: tuple[RowTokens, ...]
) -> tuple[State, DraftsTaken] | Rejected:
    """Keep drafts for the requests that can take them; those of others are dropped.

    A proposer may be late: ids that finished or were preempted meanwhile are no error (P18).
    Source: seed 001 "Attaching Fresh Drafts for the Next Step"; P18, P24.
    """
    # refuse
    if state.config.spec_method is SpecMethod.NONE:
        return Rejected(RejectCode.BAD_DRAFTS, "spec_method is none: configure one to send drafts")
    if state.config.async_scheduling:
        detail = "under asynchronous scheduling drafts stay with the worker: send none"
        return Rejected(RejectCode.BAD_DRAFTS, detail)
    limit = state.config.num_speculative_tokens
    named = [row.request_id for row in drafts]
    for row in drafts:
        if len(row.token_ids) > limit:
            detail = f"{row.request_id!r}: {len(row.token_ids)} drafts; at most {limit} per request"
            return Rejected(RejectCode.BAD_DRAFTS, detail)
        if named.count(row.request_id) > 1:
            detail = f"{row.request_id!r} is named twice; send one row per request"
            return Rejected(RejectCode.BAD_DRAFTS, detail)
    # requests
    requests = state.requests.to_dict()
    taken = []
    for row in drafts:
        request = requests.get(row.request_id)
        if request is not None and state.rules[can_take_drafts](state, request):
            tokens = row.token_ids
            for accept in state.rules.hooks.accepts:
                tokens = state.rules[accept](state, request, tokens)
            requests[row.request_id] = replace(request, spec_token_ids=tokens)
            taken.append(row.request_id)
    # observe
    return replace(state, requests=type(state.requests)(requests)), DraftsTaken(tuple(taken))


def get_verifiable_drafts(row: FrameRow) -> TokenIds:
    """Return the drafts of a row that its output may accept: all of them. Source: P3, P14."""
    return row.draft_token_ids


def get_rolled_back(request: RequestState, num_drafts: int, num_sampled: int) -> RequestState:
    """Roll back the request's rejected drafts, as if they had never been scheduled.

    Source: seed 001 "Rejection Clawback in update_from_output()"; P14.
    """
    num_rejected = compute_num_rejected(num_drafts, num_sampled)
    if num_rejected == 0 or request.status is not Status.RUNNING:
        return request
    if request.num_computed_tokens == 0:  # it was rolled back behind all of them
        return request
    return replace(request, num_computed_tokens=request.num_computed_tokens - num_rejected)


def count_drafts(stats: Stats, num_drafts: int, num_sampled: int) -> Stats:
    """Return the statistics after a row with drafts.

    Source: seed 001 (`make_spec_decoding_stats`); P21.
    """
    if num_drafts == 0:
        return stats
    return replace(
        stats,
        drafts_scheduled=stats.drafts_scheduled + num_drafts,
        drafts_accepted=stats.drafts_accepted + num_sampled - 1,
    )
