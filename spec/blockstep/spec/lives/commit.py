"""Commit: sampled tokens become known, are delivered, and may finish a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blockstep.spec.copies import replace
from blockstep.spec.hashing import get_keyed
from blockstep.spec.lives.drafts import compute_num_rejected, is_accepted_prefix
from blockstep.spec.lives.endings import get_ended, get_extended, take_changes
from blockstep.spec.maps import FrozenMap
from blockstep.spec.memory.deferred import free_deferred_blocks
from blockstep.spec.memory.slots import publish_slots
from blockstep.spec.pool import Pool
from blockstep.spec.requests import Frame, FrameRow, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.state import State
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    OutputRow,
    Outputs,
    RejectCode,
    Rejected,
    RequestId,
    Stats,
    Status,
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
    frame = next((f for f in state.frames if f.frame_id == commit.frame_id), None)
    if frame is None:
        detail = f"frame {commit.frame_id} is not in flight; commit each plan with rows once"
        return Rejected(RejectCode.UNKNOWN_FRAME, detail)
    if frame is not state.frames[0]:
        detail = f"frame {state.frames[0].frame_id} is older than {frame.frame_id}; commit it first"
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
        requests=FrozenMap(requests),
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


def get_verifiable_drafts(row: FrameRow) -> TokenIds:
    """Return the drafts of a row that its output may accept: all of them. Source: P3, P14."""
    return row.draft_token_ids


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


def get_rolled_back(request: RequestState, num_drafts: int, num_sampled: int) -> RequestState:
    """Roll back the request's rejected drafts, as if they had never been scheduled.

    Source: seed 001 "Rejection Clawback in update_from_output()"; P14.
    """
    num_rejected = compute_num_rejected(num_drafts, num_sampled)
    if num_rejected == 0 or request.status is not Status.RUNNING:
        return request
    if request.num_computed_tokens == 0:  # it was rolled back behind all of them; only with a quirk
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
