"""Lifecycle: submission, abort and pauses."""

from __future__ import annotations

from blockstep.spec.copies import replace
from blockstep.spec.core.endings import get_ended
from blockstep.spec.core.prefix_cache import get_keyed
from blockstep.spec.core.queues import process_append, waits_apart
from blockstep.spec.core.requests import NOTHING_HELD, RequestState
from blockstep.spec.core.slots import compute_max_blocks, is_servable
from blockstep.spec.core.state import State
from blockstep.spec.vocabulary import (
    Aborted,
    Ack,
    PauseState,
    RejectCode,
    Rejected,
    Request,
    RequestId,
    Status,
    request_problem,
)


def get_submit_problem(state: State, request: Request) -> Rejected | None:
    """Return why this request must be rejected now, or None.

    A request that could never be served is rejected here, with a reason: in the queue it would
    block all requests behind it for ever. The id of an aborted request is free
    again only when no frame in flight has one of its rows: its tokens would go to another request.
    Source: upstream #52520, seed 001 "FINISHED_IGNORED"; P11, P13.
    """
    problem = state.rules[get_id_problem](state, request.request_id)
    if problem is not None:
        return problem
    return get_size_problem(state, request) or get_feature_problem(state, request)


def get_id_problem(state: State, request_id: RequestId) -> Rejected | None:
    """Return why no request can have this id now, or None. Source: P13, P17."""
    if request_id in state.requests:
        detail = f"{request_id!r} is unfinished; choose another id or abort it first"
        return Rejected(RejectCode.DUPLICATE_REQUEST, detail)
    for frame in state.frames:
        if any(row.request_id == request_id for row in frame.rows):
            detail = f"frame {frame.frame_id} still has a row of {request_id!r}; commit it first"
            return Rejected(RejectCode.REQUEST_IN_FLIGHT, detail)
    return None


def get_feature_problem(state: State, request: Request) -> Rejected | None:
    """Return why a feature must reject this request now, or None. Source: architecture D11."""
    for refuse in state.rules.hooks.rejects:
        problem = state.rules[refuse](state, request)
        if problem is not None:
            return problem
    return None


def get_size_problem(state: State, request: Request) -> Rejected | None:
    """Return why this request is too large ever to be served, or None.

    Source: upstream #52520; P11.
    """
    config, rules = state.config, state.rules
    problem = request_problem(config, request)
    if problem is not None:
        return problem
    request_id, num_prompt = request.request_id, len(request.prompt_token_ids)
    if num_prompt >= config.max_model_len:
        detail = f"{request_id!r}: prompt {num_prompt} + 1 output > max_model_len"
        return Rejected(RejectCode.PROMPT_TOO_LONG, f"{detail} {config.max_model_len}; shorten it")
    if not is_servable(config, request, rules):
        num_blocks = compute_max_blocks(config, request, rules)
        detail = f"{request_id!r} may need {num_blocks} blocks, the pool has"
        fix = "lower max_tokens or add blocks"
        return Rejected(RejectCode.NEVER_FITS, f"{detail} {config.num_usable_blocks}; {fix}")
    return None


def process_submit(state: State, request: Request) -> tuple[State, Ack] | Rejected:
    """Append a request to `waiting`, or to `skipped_waiting` while it is blocked.

    Source: seed 000 "Request Arrives"; vLLM 0.19.1 `_enqueue_waiting_request`; P11, P16.
    """
    # refuse
    problem = get_submit_problem(state, request)
    if problem is not None:
        return problem
    # requests
    held = NOTHING_HELD * len(state.config.block_sizes)
    entry = RequestState(request, Status.WAITING, holdings=held)
    for arrive in state.rules.hooks.arrives:
        entry = state.rules[arrive](state, entry)
    entry = get_keyed(state.config, entry, state.rules)
    requests = state.requests.having(request.request_id, entry)
    waiting, skipped = list(state.waiting), list(state.skipped_waiting)
    queue = skipped if state.rules[waits_apart](entry, was_skipped=False) else waiting
    process_append(state.config.policy, queue, request.request_id, requests)
    # observe
    return replace(
        state, requests=requests, waiting=tuple(waiting), skipped_waiting=tuple(skipped)
    ), Ack()


def process_abort(state: State, request_ids: tuple[RequestId, ...]) -> tuple[State, Aborted]:
    """Finish requests at once, whatever their status; unknown ids change nothing.

    A frame in flight still writes their blocks, but before any later step does, so the blocks are
    free at once. Source: seed 001 "finish_requests()"; P13, P17, P18.
    """
    # select
    ended = tuple([name for name in dict.fromkeys(request_ids) if name in state.requests])
    # observe
    return get_ended(state, ended), Aborted(ended)


def process_pause(state: State, pause_state: PauseState) -> tuple[State, Ack]:
    """Set what the next Schedule may schedule. Source: seed 001 "Unified Token Budget"; P16."""
    return replace(state, pause_state=pause_state), Ack()
