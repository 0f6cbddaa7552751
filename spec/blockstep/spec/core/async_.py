"""Asynchronous scheduling: steps are planned before the tokens of frames in flight are known.

    known tokens         |------ prompt ------|-- verified outputs --|
    placeholders                                                     |- in flight --|
    the next step                                                                   |-- new --|

A row that samples adds a placeholder for its token, and one for each draft; its commit removes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.requests import Frame, FrameRow, RequestState, list_rows_in_flight
from blockstep.spec.core.slots import publish_slots
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, Config, RequestId, Status


def is_past_max_tokens(
    num_computed: int, num_placeholders: int, num_prompt: int, max_tokens: int
) -> bool:
    """Whether a frame in flight ends the request even if all of its drafts are rejected.

    With placeholders, computed - placeholders + 1 tokens are known, and at least one more is in
    flight; so nothing is scheduled after the last token. Deeper pipelines may still run one row too
    many, which ends with its request. Source: seed 001 "Async scheduling skip-ahead"; P13.
    """
    return num_placeholders > 0 and num_computed + 2 - num_placeholders >= num_prompt + max_tokens


def process_flight_gate(step: Step, request: RequestState) -> Verdict | None:
    """Skip a preempted request until frames in flight have delivered its tokens.

    Admitted before, it would sample a position twice (upstream #48245). Source: P13.
    """
    frames = step.state.frames
    is_held = bool(frames) and step.state.rules[is_held_by_frames](frames, request)
    return Verdict.PASSED_OVER if is_held else None


def is_held_by_frames(frames: Sequence[Frame], request: RequestState) -> bool:
    """Whether a frame in flight samples for the request. Source: upstream #48245; P13."""
    return any(row.samples for row in list_rows_in_flight(frames, request.request_id))


def process_placeholders(step: Step, rows: Sequence[FrameRow]) -> None:
    """Add placeholders for the tokens that the step will sample, and for the drafts after them.

    A row that samples adds one for the token and one per draft. Only the worker knows what it then
    proposes, and only until the next plan: a request without a row in this plan has no drafts in
    the next. Source: vLLM 0.19.1 `AsyncScheduler._update_after_schedule`; upstream #46899; P12,
    P24.
    """
    planned = {row.request_id: row for row in rows}
    for request_id in step.running:
        request = step.requests[request_id]
        step.requests[request_id] = step.state.rules[get_promising](step, request, planned)


def get_promising(
    step: Step, request: RequestState, planned: Mapping[RequestId, FrameRow]
) -> RequestState:
    """Return a running request with the placeholders of its row, if it has one that samples; else
    without drafts. Source: vLLM 0.19.1 `AsyncScheduler._update_after_schedule`; P12, P24.
    """
    row = planned.get(request.request_id)
    if row is None or not row.samples:
        return replace(request, spec_token_ids=()) if request.spec_token_ids else request
    return replace(
        request,
        num_output_placeholders=request.num_output_placeholders + 1 + len(row.draft_token_ids),
        spec_token_ids=(DRAFT_PLACEHOLDER,) * step.state.config.num_speculative_tokens,
    )


def get_fulfilled(config: Config, request: RequestState, num_drafts: int) -> RequestState:
    """Remove the placeholders of a row: one for its token, and one for each draft.

    Source: vLLM 0.19.1 `AsyncScheduler._update_request_with_output`; P12.
    """
    if not config.async_scheduling:
        return request
    num_placeholders = request.num_output_placeholders - 1 - num_drafts
    assert num_placeholders >= 0, "no frame delivers more than its placeholders (P12)"
    return replace(request, num_output_placeholders=num_placeholders)


def publish_verified(state: State, pool: Pool, request: RequestState) -> tuple[Pool, RequestState]:
    """Publish what has just been verified: full blocks of tokens whose KV is written.

    Under asynchronous scheduling the next step may be planned long before, so publishing does not
    wait for it; also the last blocks of a request that finishes here are published. All known
    tokens but the last are computed by now. A preempted request has no block to publish. Source:
    vLLM 0.19.1 `AsyncScheduler._update_request_with_output`; P4.
    """
    config, is_running = state.config, request.status is Status.RUNNING
    if not (
        config.enable_prefix_caching and is_running and state.rules[publishes_at_commit](config)
    ):
        return pool, request
    num_verified = request.num_known_tokens - 1
    nums_full = [num_verified // block_size for block_size in config.block_sizes]
    return publish_slots(config, pool, request, nums_full, state.rules)


def publishes_at_commit(config: Config) -> bool:
    """Whether a commit publishes the blocks that it fills: if the next plan, which otherwise would,
    may be made long before. Source: P4.
    """
    return config.async_scheduling
