"""Endings: what a request delivers, its finish reason, and the release of all that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Changes, get_fence
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import release_slots
from blockstep.spec.core.state import State
from blockstep.spec.frozen_map import freeze
from blockstep.spec.vocabulary import FinishReason, OutputRow, Request, RequestId, TokenIds

Stop: TypeAlias = tuple[FinishReason | None, int | None]
"""The finish reason, and the stop token if there is one; (None, None) while the request continues.
"""


def get_extended(
    request: RequestState,
    tokens: TokenIds,
    max_model_len: int,
    rules: Rules,
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
        reason, stop_token_id = rules[compute_stop](
            request, known_outputs, num_known, max_model_len
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


def get_error_row(request: RequestState) -> OutputRow:
    """Return the output row of a request that cannot be served.

    Source: vLLM 0.19.1 `update_from_output`; P13.
    """
    num_cached = max(request.num_cached_tokens, 0)
    return OutputRow(request.request_id, (), FinishReason.ERROR, num_cached_tokens=num_cached)


def compute_stop(
    request: RequestState,
    outputs: TokenIds,
    num_known: int,
    max_model_len: int,
) -> Stop:
    """Return why the request ends after the last of `outputs`, and the stop token if there is one.

    In this order: eos, stop token, length. Before `min_tokens` only the length limits
    end it: at the model length it could not continue. Source: vLLM 0.19.1 `check_stop`; seed 000
    "Request Completion"; P10, P13.
    """
    asked = request.request
    last = outputs[-1]
    text_may_stop = len(outputs) >= asked.min_tokens
    if text_may_stop and last == asked.eos_token_id:
        return FinishReason.STOP, None
    if text_may_stop and last in asked.stop_token_ids:
        return FinishReason.STOP, last
    if is_at_length(asked, len(outputs), num_known, max_model_len):
        return FinishReason.LENGTH, None
    return None, None


def is_at_length(asked: Request, num_outputs: int, num_known: int, max_model_len: int) -> bool:
    """Whether the request has all the tokens it may have. Source: vLLM 0.19.1 `check_stop`; P13."""
    return num_known >= max_model_len or num_outputs >= asked.max_tokens


def get_ended(state: State, request_ids: Sequence[RequestId]) -> State:
    """Remove these requests from the state, in order, and free all that they hold.

    The next plan lists them for the worker. Source: seed 001 "Request Completion", vLLM 0.19.1
    `_free_request`; P1, P13, P17, P22.
    """
    if not request_ids:
        return state
    requests = state.requests.to_dict()
    for request_id in request_ids:
        request = requests.pop(request_id)
        state = state.rules[get_released](state, request)
        for leave in state.rules.hooks.leaves:
            state = state.rules[leave](state, request)
    gone = set(request_ids)
    state = replace(
        state,
        requests=freeze(requests),
        running=tuple(r for r in state.running if r not in gone),
        waiting=tuple(r for r in state.waiting if r not in gone),
        skipped_waiting=tuple(r for r in state.skipped_waiting if r not in gone),
        finished_req_ids=tuple(sorted(gone.union(state.finished_req_ids))),
    )
    for end in state.rules.hooks.ends:
        state = state.rules[end](state)
    return state


def get_released(state: State, request: RequestState) -> State:
    """Return the state after a finished request released its blocks. Source: vLLM 0.19.1
    `_free_blocks`; P1, P17."""
    fence = state.rules[get_fence](state.config, state.frames, request.request_id)
    return replace(state, pool=release_slots(state.pool, request, state.rules, fence))


def take_changes(state: State) -> tuple[State, Changes]:
    """Return the state, and the changes of the prefix cache that the next answer reports.

    Source: P20.
    """
    changes: Changes = ()
    for take in state.rules.hooks.answers:
        state, changes = state.rules[take](state)
    return state, changes
