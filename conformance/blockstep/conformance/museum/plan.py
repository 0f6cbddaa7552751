"""Seeded bugs in plans and outputs: what the worker gets, when a request finishes, and when the
engine loop sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.endings import is_at_length
from blockstep.spec.core.plans import get_plan, process_advance
from blockstep.spec.core.requests import FrameRow
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.idle import has_work
from blockstep.spec.releases.finish import min_tokens_mask_length
from blockstep.spec.vocabulary import CachedRow, Config, NewRow, Plan, Status

PAGE = Page()


def change_cached(rules: Rules, change: Callable[[CachedRow], CachedRow]) -> Rules:
    """Return rules by which a plan's rows of known requests are changed."""

    def make_plan(step: Step, frame_rows: Sequence[FrameRow]) -> Plan:
        plan = rules[get_plan](step, frame_rows)
        return replace(plan, cached=tuple(map(change, plan.cached)))

    return rules.replacing(get_plan, make_plan)


@PAGE.exhibit("a request gets one token more than max_tokens", "vLLM V1: Request Completion", "P13")
@instead(is_at_length)
def length_off_by_one(right: Right[bool], num_outputs: int, num_known: int) -> bool:
    """The length cap is checked one token too late."""
    return right(num_outputs=num_outputs - 1, num_known=num_known - 1)


@PAGE.exhibit("min_tokens suspends the length caps", "vLLM 0.19.1 check_stop", "P13 P10")
def min_tokens_masks_length(rules: Rules, config: Config) -> Rules:
    """A request at the model length can neither stop nor get another token."""
    return min_tokens_mask_length(rules, config)


@PAGE.exhibit("a resumed request is sent as a new one", "#31583", "P26")
@instead(get_plan)
def resumed_as_new(right: Right[Plan], step: Step) -> Plan:
    """The worker loses the outputs that the request has so far."""
    rows = step.rows
    step.rows = [
        replace(row, status=Status.WAITING) if row.status is Status.PREEMPTED else row
        for row in rows
    ]
    plan = right()
    step.rows = rows
    return plan


@PAGE.exhibit(
    "tokens are not sent again after a step without a row of the request", "#26385", "P26"
)
def gap_not_resent(rules: Rules, _config: Config) -> Rules:
    """The worker continues with the last tokens that it got."""
    return change_cached(
        rules, lambda row: row if row.resumed else replace(row, all_token_ids=None)
    )


@PAGE.exhibit("a resumed request is sent without its tokens", "#26385", "P26 P13")
def resumed_without_tokens(rules: Rules, _config: Config) -> Rules:
    """The worker keeps what it had at the preemption, or has nothing."""
    return change_cached(
        rules, lambda row: replace(row, all_token_ids=None) if row.resumed else row
    )


@PAGE.exhibit(
    "a resumed request is sent with its computed tokens only",
    "#28787, #27756",
    "P26 P13",
    wrong_fix_of="resumed-without-tokens",
)
def tokens_cut_to_computed(rules: Rules, _config: Config) -> Rules:
    """A resumed request has few computed tokens, so its outputs are cut off."""

    def cut(row: CachedRow) -> CachedRow:
        if not row.resumed or row.all_token_ids is None:
            return row
        reached = row.num_computed_tokens + row.num_scheduled_tokens
        return replace(row, all_token_ids=row.all_token_ids[:reached])

    return change_cached(rules, cut)


@PAGE.exhibit("the worker gets one computed token too many", "#52617", "P26 P12 P3 P4")
def told_one_token_more(rules: Rules, _config: Config) -> Rules:
    """The scheduler drops the last token of a hit, but the worker still counts it."""

    def shift(row: NewRow) -> NewRow:
        computed, scheduled = row.num_computed_tokens, row.num_scheduled_tokens
        if not computed or scheduled == 1:
            return row
        return replace(row, num_computed_tokens=computed + 1, num_scheduled_tokens=scheduled - 1)

    def make_plan(step: Step, frame_rows: Sequence[FrameRow]) -> Plan:
        plan = rules[get_plan](step, frame_rows)
        return replace(plan, new=tuple(map(shift, plan.new)))

    return rules.replacing(get_plan, make_plan)


@PAGE.exhibit(
    "without prefix caching a chunk makes no progress", "SGLang #36855, #37024", "P12 P10 P8 P26"
)
def uncached_chunk_repeats(rules: Rules, config: Config) -> Rules:
    """The update of the computed tokens is skipped together with the publishing."""

    def advance(step: Step, frame_rows: tuple[FrameRow, ...]) -> State:
        state = rules[process_advance](step, frame_rows)
        requests = state.requests.to_dict()
        for row, frame_row in zip(step.rows, frame_rows, strict=True):
            if not frame_row.samples:
                request = requests[row.request_id]
                requests[row.request_id] = replace(request, num_computed_tokens=row.num_computed)
        return replace(state, requests=FrozenMap(requests))

    return rules if config.enable_prefix_caching else rules.replacing(process_advance, advance)


LOOP = "vLLM 0.19.1 has_requests"
SHOWN = "books: only the state shows whether the loop may sleep"


@PAGE.exhibit("the engine loop sleeps while requests wait", LOOP, "P10", invisible_if_hidden=SHOWN)
def waiting_are_no_work(rules: Rules, _config: Config) -> Rules:
    """Only running requests count as work, so the last preempted one is never scheduled again."""
    return rules.replacing(has_work, lambda state: bool(state.finished_req_ids or state.running))


@PAGE.exhibit(
    "the engine loop keeps running while everything is paused",
    LOOP,
    "P10",
    invisible_if_hidden=SHOWN,
)
def paused_are_work(rules: Rules, _config: Config) -> Rules:
    """It makes empty plans as fast as it can."""
    return rules.replacing(has_work, lambda state: bool(state.finished_req_ids or state.requests))
