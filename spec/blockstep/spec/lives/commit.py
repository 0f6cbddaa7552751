"""Commit: what the worker sampled becomes known, is delivered, and may end a request."""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec.hashing import extend_block_keys
from blockstep.spec.lives.drafts import compute_num_rejected, is_accepted_prefix
from blockstep.spec.maps import FrozenMap
from blockstep.spec.memory.slots import publish_slots, release_slots
from blockstep.spec.pool import Pool
from blockstep.spec.profiles import Quirk
from blockstep.spec.state import Frame, RequestState, State
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    FinishReason,
    OutputRow,
    Outputs,
    RejectCode,
    Rejected,
    RepetitionDetection,
    RequestId,
    Stats,
    Status,
    TokenIds,
)


def process_commit(state: State, commit: Commit) -> tuple[State, Outputs] | Rejected:
    """Take the worker's answer to a frame, the oldest one in flight.

    Rows of requests that ended meanwhile are passed over. A request that was preempted while its
    frame was in flight still gets its tokens; it computes their KV anew. No token is lost then, and
    none sampled twice, because it was not admitted again yet (upstream #48245, #42043).
    Source: seed 001 "Speculative Decoding & update_from_output()"; P13, P14, P18.
    """
    # refuse
    frame = next((f for f in state.frames if f.frame_id == commit.frame_id), None)
    if frame is None:
        detail = f"frame {commit.frame_id} is not in flight; commit each plan with rows once"
        return Rejected(RejectCode.UNKNOWN_FRAME, detail)
    if frame is not state.frames[0]:
        detail = f"frame {state.frames[0].frame_id} is older than {frame.frame_id}; commit it first"
        return Rejected(RejectCode.FRAME_OUT_OF_ORDER, detail)
    problem = get_result_problem(frame, commit)
    if problem:
        return Rejected(RejectCode.BAD_RESULT, problem)
    # requests
    sampled = {row.request_id: row.token_ids for row in commit.sampled}
    pool, stats = state.pool, state.stats
    requests = state.requests.to_dict()
    outputs: list[OutputRow] = []
    ended: list[RequestId] = []
    for row in frame.rows:
        request = requests.get(row.request_id)
        tokens = sampled[row.request_id]
        if request is None or not tokens or row.is_dropped:
            continue
        request = get_fulfilled(state.config, request, len(row.draft_token_ids))
        request = get_rolled_back(request, len(row.draft_token_ids), len(tokens))
        stats = count_drafts(stats, len(row.draft_token_ids), len(tokens))
        request, output = get_extended(request, tokens, state.config.max_model_len, state.quirks)
        outputs.append(output)
        if state.config.enable_prefix_caching:
            keys = extend_block_keys(request, state.config.block_size, state.quirks)
            pool, request = publish_verified(state, pool, replace(request, block_keys=keys))
        if output.finish_reason is None:
            requests[row.request_id] = request
        else:
            pool = release_slots(pool, request, state.frees_unnamed_first)
            del requests[row.request_id]
            ended.append(row.request_id)
    frames = tuple(f for f in state.frames if f.frame_id != frame.frame_id)
    state = replace(state, requests=FrozenMap(requests), frames=frames, stats=stats)
    # observe
    return forget(state, pool, ended), Outputs(tuple(outputs))


def get_result_problem(frame: Frame, commit: Commit) -> str:
    """Why the rows do not answer the frame; "" if they do.

    Source: seed 001 "_update_request_with_output" (prefill rows return no token); P3, P18.
    """
    answered = [row.request_id for row in commit.sampled]
    asked = [row.request_id for row in frame.rows]
    if sorted(answered) != sorted(asked):
        return f"frame {frame.frame_id} asks for one row each of {asked}, not {answered}"
    sampled = {row.request_id: row.token_ids for row in commit.sampled}
    for row in frame.rows:
        tokens = sampled[row.request_id]
        if not row.samples and tokens:
            return f"{row.request_id!r} has prompt left to compute and cannot sample: send no token"
        if row.samples and not is_accepted_prefix(tokens, row.draft_token_ids):
            return (
                f"{row.request_id!r}: send some leading drafts of {row.draft_token_ids} "
                f"and one token more, not {tokens}"
            )
    return ""


def get_fulfilled(config: Config, request: RequestState, num_drafts: int) -> RequestState:
    """The request once a row has delivered what it promised: a token, and room for its drafts.

    Source: vLLM 0.19.1 `AsyncScheduler._update_request_with_output`; P12.
    """
    if not config.async_scheduling:
        return request
    num_placeholders = request.num_output_placeholders - 1 - num_drafts
    assert num_placeholders >= 0, "no frame delivers more than was promised (P12)"
    return replace(request, num_output_placeholders=num_placeholders)


def publish_verified(state: State, pool: Pool, request: RequestState) -> tuple[Pool, RequestState]:
    """Make findable what has just been verified: full blocks of tokens whose KV is written.

    Under asynchronous scheduling the next step may be planned long before, so publishing does not
    wait for it; also the last blocks of a request that ends here become findable. All known tokens
    but the last are computed by now. A preempted request has no block to publish.
    Source: vLLM 0.19.1 `AsyncScheduler._update_request_with_output`; P4.
    """
    is_due = state.config.async_scheduling or (
        Quirk.DRAFTS_PUBLISH_AT_COMMIT in state.quirks and state.config.num_speculative_tokens > 0
    )
    if not is_due or request.status is not Status.RUNNING:
        return pool, request
    num_verified = request.num_known_tokens - 1
    return publish_slots(pool, request, num_verified // state.config.block_size)


def get_rolled_back(request: RequestState, num_drafts: int, num_sampled: int) -> RequestState:
    """The request as if its rejected drafts had never been scheduled.

    Source: seed 001 "Rejection Clawback in update_from_output()"; P14.
    """
    num_rejected = compute_num_rejected(num_drafts, num_sampled)
    if num_rejected == 0 or request.status is not Status.RUNNING:
        return request
    return replace(request, num_computed_tokens=request.num_computed_tokens - num_rejected)


def count_drafts(stats: Stats, num_drafts: int, num_sampled: int) -> Stats:
    """Statistics after a row with drafts. Source: seed 001 (`make_spec_decoding_stats`); P21."""
    if num_drafts == 0:
        return stats
    return replace(
        stats,
        drafts_scheduled=stats.drafts_scheduled + num_drafts,
        drafts_accepted=stats.drafts_accepted + num_sampled - 1,
    )


def get_extended(
    request: RequestState,
    tokens: TokenIds,
    max_model_len: int,
    quirks: frozenset[Quirk] = frozenset(),
) -> tuple[RequestState, OutputRow]:
    """Append tokens one by one until one of them ends the request; drop those after it.

    Source: seed 001 "Request Completion", vLLM 0.19.1 `_update_request_with_output`; P13.
    """
    outputs = request.output_token_ids
    num_prompt = len(request.request.prompt_token_ids)
    num_taken = 0
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    while reason is None and num_taken < len(tokens):
        num_taken += 1
        known_outputs = outputs + tokens[:num_taken]
        num_known = num_prompt + len(known_outputs)
        reason, stop_token_id = compute_stop(
            request, known_outputs, num_known, max_model_len, quirks
        )
    delivered = tokens[:num_taken]
    row = OutputRow(
        request.request_id,
        delivered,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_cached_tokens=max(request.num_cached_tokens, 0),
    )
    return replace(request, output_token_ids=outputs + delivered), row


def compute_stop(
    request: RequestState,
    outputs: TokenIds,
    num_known: int,
    max_model_len: int,
    quirks: frozenset[Quirk] = frozenset(),
) -> tuple[FinishReason | None, int | None]:
    """Why the request ends after the last of `outputs`, and by which stop token.

    In this order: eos, stop token, length, repetition. `min_tokens` holds off what the text
    decides, never the length caps: upstream lets it mask them, and the request then waits for
    ever at the model length. Source: vLLM 0.19.1 `check_stop`; seed 000 "Request Completion"; P10,
    P13.
    """
    asked = request.request
    last = outputs[-1]
    text_may_stop = len(outputs) >= asked.min_tokens
    if Quirk.MIN_TOKENS_MASK_LENGTH in quirks and not text_may_stop:
        return None, None
    is_at_length = num_known >= max_model_len or len(outputs) >= asked.max_tokens
    if Quirk.LENGTH_COMES_BEFORE_STOP in quirks and is_at_length:
        return FinishReason.LENGTH, None
    token_may_stop = text_may_stop or Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS in quirks
    if token_may_stop and last == asked.eos_token_id:
        return FinishReason.STOP, None
    if token_may_stop and last in asked.stop_token_ids:
        return FinishReason.STOP, last
    if is_at_length:
        return FinishReason.LENGTH, None
    detection = asked.repetition_detection
    if text_may_stop and detection is not None and is_repeating(outputs, detection):
        return FinishReason.REPETITION, None
    return None, None


def is_repeating(outputs: TokenIds, detection: RepetitionDetection) -> bool:
    """Whether the outputs end with `min_count` copies of one pattern of an allowed size.

    Source: vLLM 0.19.1 `check_sequence_repetition`, when run.
    """
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        num_tokens = size * detection.min_count
        if num_tokens > len(outputs):
            return False
        tail = outputs[len(outputs) - num_tokens :]
        if tail == tail[:size] * detection.min_count:
            return True
    return False


def forget(state: State, pool: Pool, ended: list[RequestId]) -> State:
    """The state without requests that ended and whose blocks are free in `pool` already.

    The next plan tells the worker. Source: seed 001 "Request Completion"; P13.
    """
    gone = set(ended)
    return replace(
        state,
        pool=pool,
        running=tuple(r for r in state.running if r not in gone),
        waiting=tuple(r for r in state.waiting if r not in gone),
        skipped_waiting=tuple(r for r in state.skipped_waiting if r not in gone),
        finished_req_ids=tuple(sorted(gone.union(state.finished_req_ids))),
    )
