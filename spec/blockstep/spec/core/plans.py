"""Plans: the plan for the worker, and the state after planning."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.spec.copies import replace
from blockstep.spec.core.async_ import process_placeholders
from blockstep.spec.core.requests import Frame, FrameRow
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.vocabulary import CachedRow, NewRow, Plan, RequestId, Status


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
            size = row.num_computed, row.num_scheduled
            new.append(NewRow(request.request, row.new_blocks, *size))
            continue
        known_to_worker = row.request_id in step.state.prev_scheduled_req_ids
        is_resumed = row.status is Status.PREEMPTED
        assert not (is_resumed and known_to_worker), "a preempted request was not in the last plan"
        (resumed if is_resumed else cached).append(
            CachedRow(  # by position: keywords would make a dictionary, which doubles the time
                row.request_id,
                is_resumed,
                row.new_blocks,
                None if known_to_worker else request.all_token_ids,
                row.num_computed,
                len(request.output_token_ids) + request.num_output_placeholders,
                row.num_scheduled,
                row.drafts,
            )
        )
    plan = Plan(
        frame_id=step.state.next_frame_id,
        new=tuple(new),
        cached=(*cached, *resumed),
        finished_req_ids=step.state.finished_req_ids,
        preempted_req_ids=step.state.rules[list_preempted](step),
    )
    for add in step.state.rules.hooks.fields:
        plan = step.state.rules[add](step, frame_rows, plan)
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
        process_placeholders(step, frame_rows)
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
        prev_scheduled_req_ids=tuple(sorted([row.request_id for row in step.rows])),
    )
