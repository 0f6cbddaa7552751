"""Seeded bugs in placeholders, which stand for output tokens of frames in flight under asynchronous
scheduling, and in draft tokens: how they are published, rolled back and dispatched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.async_ import get_fulfilled, is_held_by_frames, publish_verified
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.commit import get_rows_committed
from blockstep.spec.core.parts import Part
from blockstep.spec.core.preemption import get_preempted, process_preemption
from blockstep.spec.core.prefix_cache import get_keyed
from blockstep.spec.core.requests import Frame, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import allocate_slots, publish_slots
from blockstep.spec.core.speculation import compute_num_rejected, get_rolled_back
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.resets import process_forced_preemption
from blockstep.spec.vocabulary import Config, OutputRow, RequestId, Status, TokenIds

PAGE = Page()
Sampled = Mapping[RequestId, TokenIds]
Committed = tuple[State, list[OutputRow]]

_STALE = Part("stale", frozenset[RequestId]())
"""The requests whose next tokens are dropped."""


def get_without_tokens(sampled: Sampled, names: Collection[RequestId]) -> Sampled:
    """Return what was sampled, without the tokens of some requests."""
    return {name: () if name in names else tokens for name, tokens in sampled.items()}


@PAGE.exhibit(
    "a preempted request is resumed while its sampled tokens are in flight",
    "#41190, #48245",
    "P13 P12 P26 P16 P15",
)
def readmitted_with_promises(rules: Rules, _config: Config) -> Rules:
    """The position after the known tokens is sampled twice."""
    return rules.replacing(is_held_by_frames, lambda _frames, _request: False)


def zero_placeholders(rules: Rules) -> Rules:
    """Return rules by which a preempted request has no placeholders."""

    def get_zeroed(request: RequestState) -> RequestState:
        return replace(rules[get_preempted](request), num_output_placeholders=0)

    return rules.replacing(get_preempted, get_zeroed)


@PAGE.exhibit(
    "a preemption sets the placeholder counter to zero",
    "#38624",
    "P12 P13 P26",
    wrong_fix_of="readmitted-with-promises",
)
def promises_zeroed(rules: Rules, _config: Config) -> Rules:
    """The frames in flight are not marked as stale, so their commits make the counter negative."""
    return zero_placeholders(rules)


@PAGE.exhibit(
    "a preemption drops the tokens of one frame in flight only",
    "#47900",
    "P13 P26",
    wrong_fix_of="readmitted-with-promises",
)
def one_stale_frame_dropped(rules: Rules, _config: Config) -> Rules:
    """The tokens of the first frame are lost; the other frames are committed as usual."""

    def preempt(step: Step, victim_index: int) -> RequestId:
        victim = step.requests[step.running[victim_index]]
        if victim.num_output_placeholders:
            _STALE.set(step, _STALE.of(step) | {victim.request_id})
        return rules[process_preemption](step, victim_index)

    def commit(state: State, frame: Frame, sampled: Sampled) -> Committed:
        requests = state.requests
        for row in frame.rows:
            request = requests.get(row.request_id)
            if request and row.request_id in _STALE.of(state) and sampled[row.request_id]:
                request = get_fulfilled(state.config, request, len(row.draft_token_ids))
                requests = requests.having(row.request_id, request)
                sampled = get_without_tokens(sampled, [row.request_id])
                state = _STALE.put(state, _STALE.of(state) - {row.request_id})
        return rules[get_rows_committed](replace(state, requests=requests), frame, sampled)

    return rules.replacing(process_preemption, preempt).replacing(get_rows_committed, commit)


@PAGE.exhibit(
    "tokens without a placeholder are dropped",
    "vllm-gaudi #1794, #1803",
    "P13 P26 P12",
    wrong_fix_of="readmitted-with-promises",
)
def stale_tokens_taken_for_noise(rules: Rules, _config: Config) -> Rules:
    """A preemption clears the placeholders, so all tokens of frames in flight are lost."""

    def commit(state: State, frame: Frame, sampled: Sampled) -> Committed:
        if state.config.async_scheduling:
            unpromised = [n for n, it in state.requests.items() if not it.num_output_placeholders]
            sampled = get_without_tokens(sampled, unpromised)
        return rules[get_rows_committed](state, frame, sampled)

    return zero_placeholders(rules).replacing(get_rows_committed, commit)


@PAGE.exhibit(
    "after a reset without frames in flight the next token is dropped",
    "#42043, #42117",
    "P13 P12 P10 P26",
)
def reset_eats_a_token(rules: Rules, _config: Config) -> Rules:
    """The first token after the reset is dropped as stale, and its placeholder stays for ever."""

    def preempt(state: State) -> State:
        stale = () if state.frames or not state.config.async_scheduling else state.running
        return _STALE.put(rules[process_forced_preemption](state), frozenset(stale))

    def commit(state: State, frame: Frame, sampled: Sampled) -> Committed:
        stale = _STALE.of(state).intersection([name for name, it in sampled.items() if it])
        state = _STALE.put(state, _STALE.of(state) - stale)
        return rules[get_rows_committed](state, frame, get_without_tokens(sampled, stale))

    changed = rules.replacing(process_forced_preemption, preempt)
    return changed.replacing(get_rows_committed, commit)


@PAGE.exhibit(
    "a stale frame rolls back the computed tokens of a preempted request",
    "#48245",
    "P12 P14",
    invisible_if_hidden="books: the counter is set again when the request is resumed",
)
@instead(get_rolled_back)
def stale_frame_rolls_back(
    request: RequestState, num_drafts: int, num_sampled: int
) -> RequestState:
    """A preempted request has no computed tokens, so the counter becomes negative."""
    num_rejected = compute_num_rejected(num_drafts, num_sampled)
    return replace(request, num_computed_tokens=request.num_computed_tokens - num_rejected)


@PAGE.exhibit(
    "a commit publishes a block whose last token is not computed", "#27648, #36052", "P4 P3"
)
@instead(publish_verified)
def last_token_published(
    right: Right[tuple[Pool, RequestState]], state: State, pool: Pool, request: RequestState
) -> tuple[Pool, RequestState]:
    """Known tokens are taken as computed, but the last token's KV is written one step later."""
    pool, request = right()
    config, is_running = state.config, request.status is Status.RUNNING
    if not (config.enable_prefix_caching and config.async_scheduling and is_running):
        return pool, request
    nums_full = [request.num_known_tokens // size for size in config.block_sizes]
    return publish_slots(config, pool, request, nums_full, state.rules)


Granted = tuple[Pool, RequestState] | None


@PAGE.exhibit(
    "blocks with unverified draft tokens are published in the prefix cache",
    "vLLM V1: Draft tokens are never cached",
    "P3",
)
@instead(allocate_slots)
def cached_drafts(
    right: Right[Granted], config: Config, request: RequestState, num_new: int, rules: Rules
) -> Granted:
    """A rejected draft can be hit as if it were part of the request's tokens."""
    num_drafts = request.num_computed_tokens + num_new - request.num_known_tokens
    known = request.output_token_ids
    drafts = request.spec_token_ids[: max(num_drafts, 0)]
    guessed = replace(request, output_token_ids=known + drafts)
    granted = right(request=get_keyed(config, guessed, rules))
    if granted is None:
        return None
    pool, after = granted
    return pool, replace(after, output_token_ids=known, block_keys=request.block_keys)


@PAGE.exhibit("rejected drafts count as computed", "vLLM V1: Rejection Clawback", "P14 P12 P4 P26")
def lost_rollback(rules: Rules, _config: Config) -> Rules:
    """A commit leaves rejected drafts in `num_computed_tokens`, although their KV is not valid."""
    return rules.replacing(get_rolled_back, lambda request, _num_drafts, _num_sampled: request)
