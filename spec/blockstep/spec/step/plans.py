"""Plans: the plan for the worker, and the state after planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blockstep.spec.copies import replace
from blockstep.spec.requests import Frame, FrameRow, RequestState
from blockstep.spec.state import State
from blockstep.spec.step.work import Step
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    CachedRow,
    NewRow,
    Plan,
    RequestId,
    Status,
)


def get_frame_rows(step: Step) -> tuple[FrameRow, ...]:
    """Return the rows of this step's frame.

    A row samples if it computes the last token that will be known by then. Source: seed 001
    "_update_after_schedule()"; P12.
    """
    rules, rows = step.state.rules, []
    for row in step.rows:
        request = step.requests[row.request_id]
        num_promised = request.num_known_tokens + request.num_output_placeholders
        samples = row.num_computed + row.num_scheduled >= num_promised
        frame_row = FrameRow(row.request_id, row.drafts, samples)
        for fill in rules.hooks.rows:
            frame_row = rules[fill](step, row, frame_row)
        rows.append(frame_row)
    return tuple(rows)


def get_plan(step: Step, frame_rows: Sequence[FrameRow]) -> Plan:
    """Return the plan of the step: all data of new requests, differences of known ones.

    Source: seed 001 "SchedulerOutput Construction", "CachedRequestData Construction"; P26.
    """
    new: list[NewRow] = []
    cached: list[CachedRow] = []
    resumed: list[CachedRow] = []
    for row in step.rows:
        request = step.requests[row.request_id]
        if row.status is Status.WAITING:
            new.append(
                NewRow(
                    request.request,
                    row.new_blocks,
                    row.num_computed,
                    row.num_scheduled,
                )
            )
            continue
        known_to_worker = row.request_id in step.state.prev_scheduled_req_ids
        is_resumed = row.status is Status.PREEMPTED
        assert not (is_resumed and known_to_worker), "a preempted request was not in the last plan"
        (resumed if is_resumed else cached).append(
            CachedRow(
                request_id=row.request_id,
                resumed=is_resumed,
                new_block_ids=row.new_blocks,
                all_token_ids=None if known_to_worker else request.all_token_ids,
                num_computed_tokens=row.num_computed,
                num_output_tokens=len(request.output_token_ids) + request.num_output_placeholders,
                num_scheduled_tokens=row.num_scheduled,
                draft_token_ids=row.drafts,
            )
        )
    plan = Plan(
        frame_id=step.state.next_frame_id,
        new=tuple(new),
        cached=(*cached, *resumed),
        finished_req_ids=step.state.finished_req_ids,
        preempted_req_ids=step.state.rules[list_preempted](step),
    )
    for tell in step.state.rules.hooks.fields:
        plan = step.state.rules[tell](step, frame_rows, plan)
    return plan


def list_preempted(step: Step) -> tuple[RequestId, ...]:
    """Return the requests that the step preempted, for the plan. Source: P26."""
    return tuple(sorted(step.preempted))


def process_advance(step: Step, frame_rows: tuple[FrameRow, ...]) -> State:
    """Return the state after planning: scheduled tokens count as computed.

    So a next step can be planned before this one ends; the commit rolls rejected tokens back.
    Source: seed 001 "_update_after_schedule()"; P12.
    """
    for row, frame_row in zip(step.rows, frame_rows, strict=True):
        request, num_computed = step.requests[row.request_id], row.num_computed + row.num_scheduled
        step.requests[row.request_id] = replace(
            request, num_computed_tokens=num_computed, is_prefill_chunk=not frame_row.samples
        )
    if step.state.config.async_scheduling:
        process_promises(step, frame_rows)
    frames, frame_id = step.state.frames, step.state.next_frame_id
    if frame_rows:
        frame = Frame(frame_id, frame_rows)
        for fill in step.state.rules.hooks.frames:
            frame = step.state.rules[fill](step, frame)
        frames = (*frames, frame)
    for sent in step.state.rules.hooks.sent:
        step.state.rules[sent](step, frame_rows)
    return step.get_state(
        frames=frames,
        next_frame_id=frame_id + 1,
        finished_req_ids=(),
        prev_scheduled_req_ids=tuple(sorted(row.request_id for row in step.rows)),
    )


def process_promises(step: Step, rows: Sequence[FrameRow]) -> None:
    """Add placeholders for the tokens that the step will sample, and for the drafts after them.

    A row that samples adds one for the token and one per draft. Only the worker knows what it then
    proposes, and only until the next plan: a request without a row in this plan has no drafts in
    the next. Upstream keeps its placeholders and has them verified as if they were drafts (#46899).
    Source: vLLM 0.19.1 `AsyncScheduler._update_after_schedule`; P12, P24.
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
    num_promised = 1 + len(row.draft_token_ids) if row is not None and row.samples else 0
    placeholders = (DRAFT_PLACEHOLDER,) * step.state.config.num_speculative_tokens
    return replace(
        request,
        num_output_placeholders=request.num_output_placeholders + num_promised,
        spec_token_ids=placeholders if num_promised else (),
    )
