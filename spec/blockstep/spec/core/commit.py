"""Commit: sampled tokens become known, are delivered, and may finish a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blockstep.spec.copies import replace
from blockstep.spec.core.async_ import get_fulfilled, publish_verified
from blockstep.spec.core.block_pool import free_deferred_blocks
from blockstep.spec.core.endings import get_ended, get_extended, take_changes
from blockstep.spec.core.prefix_cache import get_keyed
from blockstep.spec.core.requests import Frame
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.speculation import (
    count_drafts,
    get_rolled_back,
    get_verifiable_drafts,
    is_accepted_prefix,
)
from blockstep.spec.core.state import State
from blockstep.spec.frozen_map import freeze
from blockstep.spec.vocabulary import (
    Commit,
    OutputRow,
    Outputs,
    RejectCode,
    Rejected,
    RequestId,
    TokenIds,
)


def process_commit(state: State, commit: Commit) -> tuple[State, Outputs] | Rejected:
    """Process the model output of a frame, the oldest one in flight.

    Rows of requests that finished meanwhile are ignored. A request that was preempted while its
    frame was in flight still gets its tokens; it computes their KV again. So no token is lost, and
    none is sampled twice, because it was not admitted again yet (upstream #48245, #42043). Source:
    seed 001 "Speculative Decoding & update_from_output()"; P13, P14, P18.
    """
    # refuse
    if commit.frame_id not in [frame.frame_id for frame in state.frames]:
        detail = f"frame {commit.frame_id} is not in flight; commit each plan with rows once"
        return Rejected(RejectCode.UNKNOWN_FRAME, detail)
    frame = state.frames[0]
    if frame.frame_id != commit.frame_id:
        detail = f"frame {frame.frame_id} is older than {commit.frame_id}; commit it first"
        return Rejected(RejectCode.FRAME_OUT_OF_ORDER, detail)
    problem = get_result_problem(frame, commit, state.rules)
    for dispute in state.rules.hooks.disputes:
        problem = problem or state.rules[dispute](state, frame, commit)
    if problem:
        return Rejected(RejectCode.BAD_RESULT, problem)
    # pool
    pool = free_deferred_blocks(state.pool, frame.frame_id, state.rules)
    state = state if pool is state.pool else replace(state, pool=pool)
    # requests
    state, outputs = state.rules[get_committed](state, commit)
    # observe
    state, changes = take_changes(state)
    return state, Outputs(tuple(outputs), changes)


def get_committed(state: State, commit: Commit) -> tuple[State, list[OutputRow]]:
    """Return the state after the oldest frame in flight ended, and what its rows deliver.

    Source: seed 001 "Speculative Decoding & update_from_output()"; P13.
    """
    sampled = {row.request_id: row.token_ids for row in commit.sampled}
    state, outputs = state.rules[get_rows_committed](state, state.frames[0], sampled)
    return get_all_ended(state, outputs), outputs


def get_rows_committed(
    state: State, frame: Frame, sampled: Mapping[RequestId, TokenIds]
) -> tuple[State, list[OutputRow]]:
    """Return the state after the rows of the oldest frame in flight, and what they deliver.

    Source: seed 001 "Speculative Decoding & update_from_output()"; P12, P13, P14.
    """
    pool, stats, requests = state.pool, state.stats, state.requests.to_dict()
    outputs: list[OutputRow] = []
    extend = state.rules[get_extended]
    for row in frame.rows:
        request, tokens = requests.get(row.request_id), sampled[row.request_id]
        if request is None or row.is_dropped or not tokens:
            continue
        request = get_fulfilled(state.config, request, len(row.draft_token_ids))
        request = get_rolled_back(request, len(row.draft_token_ids), len(tokens))
        stats = count_drafts(stats, len(state.rules[get_verifiable_drafts](row)), len(tokens))
        request, output = extend(request, tokens, state.config.max_model_len, state.rules)
        for read in state.rules.hooks.reads:
            request = state.rules[read](state, row, request, output.new_token_ids)
        outputs.append(output)
        request = get_keyed(state.config, request, state.rules)
        pool, requests[row.request_id] = publish_verified(state, pool, request)
    state = replace(
        state,
        pool=pool,
        requests=freeze(requests),
        frames=state.frames[1:],
        stats=stats,
    )
    return state, outputs


def get_all_ended(state: State, outputs: Sequence[OutputRow]) -> State:
    """Finish the requests that have stopped, in the order of the rows.

    Source: vLLM 0.19.1 `_handle_stopped_request`; P1, P13.
    """
    for output in outputs:
        if output.finish_reason is not None:
            state = state.rules[get_request_ended](state, output.request_id)
    return state


def get_request_ended(state: State, request_id: RequestId) -> State:
    """Finish a request that an output has stopped. Source: vLLM 0.19.1 `_handle_stopped_request`;
    P1, P13."""
    for stop in state.rules.hooks.stops:
        state = state.rules[stop](state, request_id)
    return get_ended(state, [request_id])


def get_result_problem(frame: Frame, commit: Commit, rules: Rules) -> str:
    """Return why the model output does not fit the frame; "" if it does.

    Source: seed 001 "_update_request_with_output" (prefill rows return no token); P3, P18.
    """
    answered = [row.request_id for row in commit.sampled]
    asked = [row.request_id for row in frame.rows]
    if sorted(answered) != sorted(asked):
        return f"frame {frame.frame_id} has one row each of {asked}, not {answered}"
    sampled = {row.request_id: row.token_ids for row in commit.sampled}
    for row in frame.rows:
        tokens = sampled[row.request_id]
        if not row.samples and tokens:
            return f"{row.request_id!r} has prompt left to compute and cannot sample: send no token"
        drafts = rules[get_verifiable_drafts](row)
        if row.samples and not is_accepted_prefix(tokens, drafts):
            return (
                f"{row.request_id!r}: send some leading drafts of {drafts} "
                f"and one token more, not {tokens}"
            )
    return ""
