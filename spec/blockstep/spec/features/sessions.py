"""Sessions: requests that a stop does not end, because they continue with further input.

    an input    |------ prompt ------|---- outputs ----|x|         x: sampled last, never computed
    the next    |--------- its prompt: all but x ------|-- input --|---- outputs ----

A session that stops is idle, with its blocks, until further input arrives. Then it waits for
admission like a new request, but with computed tokens. It keeps every known token but the last:
that one was never computed, and the next input takes its place. So what a session keeps does not
depend on drafts, frames in flight or preemption.

Tokens that frames in flight sample after a stop belong to an input that is over, and are dropped.
The positions that they write are computed again for the next input, in later frames.
"""

from __future__ import annotations

from typing import Final

from blockstep.spec import idle
from blockstep.spec.copies import replace
from blockstep.spec.core import commit
from blockstep.spec.core.block_pool import Pool, get_fence
from blockstep.spec.core.endings import get_ended
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.lifecycle import get_feature_problem, get_size_problem
from blockstep.spec.core.parts import Part
from blockstep.spec.core.prefix_cache import get_keyed
from blockstep.spec.core.queues import process_append, waits_apart
from blockstep.spec.core.requests import Frame, RequestState, list_rows_in_flight
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import release_slots
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features.groups.kinds import compute_num_skipped_blocks
from blockstep.spec.features.reclaim import without_blocks
from blockstep.spec.features.structured_output import drop_row
from blockstep.spec.features.structured_output.grammar import GRAMMAR, get_first_state
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    SESSION_FIELDS,
    Aborted,
    Ack,
    Config,
    FrameId,
    GroupKind,
    Policy,
    RejectCode,
    Rejected,
    Request,
    RequestId,
    Status,
    StreamingUpdate,
    TokenIds,
)
from blockstep.spec.vocabulary.constants import shown

_LEFT_OUT = Request("", ())
"""A request whose fields have the values that count as left out."""
RESTING = Status.WAITING_FOR_STREAMING_REQ
UPDATES: Final = Part[tuple[Request, ...]]("updates", ())
"""The waiting inputs of a session, oldest first; one that is not resumable is the last."""


# Input.


def process_streaming_update(
    state: State, event: StreamingUpdate
) -> tuple[State, Ack | Aborted] | Rejected:
    """Continue a session, or end it: now if it is idle, else when it stops.

    An idle session keeps its place in the queue under FCFS; that is before all new requests.
    Source: vLLM 0.19.1 `add_request`; P11, P16.
    """
    # refuse
    update = event.request
    request = state.requests.get(update.request_id)
    if request is None:
        detail = f"no unfinished request {update.request_id!r}; submit it first"
        return Rejected(RejectCode.UNKNOWN_REQUEST, detail)
    problem = get_update_problem(state, request, update)
    if problem is not None:
        return problem
    # pool, requests
    name, is_resting = update.request_id, request.status is RESTING
    if is_resting and not update.resumable:
        return get_ended(state, [name]), Aborted((name,))
    if is_resting:
        request = state.rules[get_continued](state.config, request, update, state.rules)
    else:
        request = UPDATES.put(request, (*UPDATES.of(request), update))
    state = replace(state, requests=state.requests.having(name, request))
    if is_resting and state.config.policy is Policy.PRIORITY:
        state = get_queued(state, name, was_skipped=True)
    return state, Ack()


def get_update_problem(state: State, request: RequestState, update: Request) -> Rejected | None:
    """Return why an unfinished request cannot continue with this input, or None.

    The limits apply to the whole session: its known tokens, or those at its longest, and then all
    further inputs, each at its longest, too. Source: vLLM 0.19.1 `add_request`; upstream #42489,
    #40072; P11.
    """
    name = update.request_id
    if not request.request.resumable:
        detail = f"{name!r} was submitted without resumable"
        return Rejected(RejectCode.NOT_RESUMABLE, detail)
    updates = UPDATES.of(request)
    if updates and not updates[-1].resumable:
        detail = f"the input of {name!r} has ended; submit it again when it has finished"
        return Rejected(RejectCode.NOT_RESUMABLE, detail)
    if not update.resumable:
        return None
    name_of_field = get_foreign_field(request.request, update)
    if name_of_field is not None:
        value = shown(getattr(update, name_of_field))
        rule = f"an input brings {name_of_field} = {value}, which is the session's: leave it out"
        return Rejected(RejectCode.BAD_REQUEST, f"request {name!r}: {rule}")
    longest = get_longest_request(state, request, update)
    return get_size_problem(state, longest) or get_feature_problem(state, update)


def get_foreign_field(asked: Request, update: Request) -> str | None:
    """Return the first field of an input that belongs to the session, and is neither left out nor
    equal.

    Source: upstream #57685; P6, P23.
    """
    for name in SESSION_FIELDS:
        if getattr(update, name) not in (getattr(_LEFT_OUT, name), getattr(asked, name)):
            return name
    return None


def get_longest_request(state: State, request: RequestState, update: Request) -> Request:
    """Return the request that a session becomes at its longest, with all its inputs and this one.

    Items of different inputs are placed as near to each other as possible: a stop may come at once.
    Source: upstream #42489; P11.
    """
    asked, max_model_len = request.request, state.config.max_model_len
    longest, num_least = request.num_known_tokens, compute_num_kept(request.num_known_tokens)
    if request.status is not RESTING:
        num_least = len(asked.prompt_token_ids)
        longest = compute_longest(num_least, asked.max_tokens, max_model_len)
    for chunk in (*UPDATES.of(request), update):
        kept = (0,) * compute_num_kept(longest)
        asked = state.rules[get_joined](asked, chunk, kept, num_least)
        num_least += len(chunk.prompt_token_ids)
        longest = compute_longest(len(asked.prompt_token_ids), asked.max_tokens, max_model_len)
    return asked


def get_joined(asked: Request, update: Request, kept: TokenIds, offset: int) -> Request:
    """Return the request of a session with its next input; `offset`: position of the input's items.

    Stop conditions and arrival time are those of the input; priority, adapter, salt and grammar are
    the session's. Source: vLLM 0.33.0 `_update_request_as_session`; P6, P13.
    """
    items = [replace(item, offset=item.offset + offset) for item in update.items]
    return replace(
        asked,
        prompt_token_ids=kept + update.prompt_token_ids,
        items=(*asked.items, *items),
        max_tokens=update.max_tokens,
        min_tokens=update.min_tokens,
        eos_token_id=update.eos_token_id,
        stop_token_ids=update.stop_token_ids,
        repetition_detection=update.repetition_detection,
        arrival_time=update.arrival_time,
    )


def compute_longest(num_prompt: int, max_tokens: int, max_model_len: int) -> int:
    """Return the known tokens of a request at its longest.

    Source: seed 000 "Request Completion"; P11.
    """
    return min(num_prompt + max_tokens, max_model_len)


def compute_num_kept(num_known: int) -> int:
    """Return the tokens that a session keeps at a stop: all but the last sampled one.

    Source: vLLM 0.33.0 `_update_request_as_session`; P13.
    """
    return num_known - 1


def get_continued(
    config: Config, request: RequestState, update: Request, rules: Rules
) -> RequestState:
    """Return the session with its next input: the tokens it keeps are part of the prompt now.

    So is its grammar in its first state. The keys of its blocks follow the tokens: the token that
    it does not keep may have completed a block. Source: vLLM 0.19.1 `_update_request_as_session`;
    P3, P6, P23.
    """
    kept = request.all_token_ids[: rules[get_num_kept](request)]
    asked = rules[get_joined](request.request, update, kept, len(kept))
    num_keys = rules[get_num_kept_keys](request, len(kept), config.block_size)
    after = replace(
        request,
        request=asked,
        status=Status.WAITING,
        output_token_ids=(),
        block_keys=request.block_keys[:num_keys],
    )
    if asked.grammar is not None:
        after = GRAMMAR.put(after, get_first_state(config, asked.prompt_token_ids))
    return get_keyed(config, after, rules)


def get_num_kept(request: RequestState) -> int:
    """Return the leading tokens that a session keeps, however many it has computed.

    Source: vLLM 0.33.0 `_update_request_as_session`; P13.
    """
    return compute_num_kept(request.num_known_tokens)


def get_num_kept_keys(request: RequestState, num_kept: int, block_size: int) -> int:
    """Return the leading keys that a session keeps: those of blocks full of kept tokens.

    Source: P3, P6.
    """
    return min(num_kept // block_size, len(request.block_keys))


# A stop.


def goes_on(request: RequestState) -> bool:
    """Whether a request that has stopped is a session whose input has not ended.

    Source: vLLM 0.19.1 `_handle_stopped_request`; P13.
    """
    updates = UPDATES.of(request)
    is_over = bool(updates) and not updates[0].resumable
    return request.request.resumable and not is_over


def get_chunk_ended(state: State, request_id: RequestId) -> State:
    """Continue a session that has stopped with its next input, or make it idle.

    Tokens that frames in flight sample for the input that is over are dropped. Source: vLLM 0.19.1
    `_handle_stopped_request`; P13, P14.
    """
    config, rules, request = state.config, state.rules, state.requests[request_id]
    fence = rules[get_fence](config, state.frames, request_id)
    pool, request = rules[get_stopped](config, state.pool, request, rules, fence)
    if UPDATES.of(request):
        update, *others = UPDATES.of(request)
        request = UPDATES.put(request, tuple(others))
        request = rules[get_continued](config, request, update, rules)
    else:
        request = replace(request, status=RESTING)
    requests = state.requests.having(request_id, request)
    frames = rules[get_frames_behind_stop](state.frames, request_id)
    state = replace(state, pool=pool, requests=requests, frames=frames)
    return get_queued(state, request_id, was_skipped=False)


def get_stopped(
    config: Config,
    pool: Pool,
    request: RequestState,
    rules: Rules,
    fence: FrameId | None = None,
) -> tuple[Pool, RequestState]:
    """Return pool and session after its stop: it has computed what it keeps, without placeholders.

    Drafts that were accepted past the stop, and frames in flight, are rolled back. If a window or a
    state has moved on since, it releases all its blocks, and computes everything again. Source: P3,
    P12, P14, P24.
    """
    num_kept = rules[get_num_kept](request)
    num_computed = min(request.num_computed_tokens, num_kept)
    request = replace(request, num_output_placeholders=0, spec_token_ids=())
    if config.groups and not can_go_back(config, request, num_computed):
        pool = release_slots(pool, request, rules, fence)
        return pool, without_blocks(request)
    return pool, replace(request, num_computed_tokens=num_computed)


def can_go_back(config: Config, request: RequestState, num_computed: int) -> bool:
    """Whether all blocks are held that a row from position `num_computed` on reads.

    If there are states for drafts, only the worker knows which block has the last state, and only
    while the request runs. Source: P3, P14, P26.
    """
    for group, table in zip(config.groups, request.block_tables, strict=True):
        is_elsewhere = group.num_speculative_blocks or num_computed != request.num_computed_tokens
        if group.kind is GroupKind.RECURRENT and is_elsewhere:
            return False
        if NULL_BLOCK in table[compute_num_skipped_blocks(group, num_computed) :]:
            return False
    return True


def get_queued(state: State, request_id: RequestId, was_skipped: bool) -> State:
    """Put a session at the end of its queue: a continued one stays among the skipped requests.

    Source: vLLM 0.19.1 `_enqueue_waiting_request`; P13, P16.
    """
    waiting = [name for name in state.waiting if name != request_id]
    skipped = [name for name in state.skipped_waiting if name != request_id]
    is_apart = state.rules[waits_apart](state.requests[request_id], was_skipped)
    queue = skipped if is_apart else waiting
    process_append(state.config.policy, queue, request_id, state.requests)
    running = tuple([name for name in state.running if name != request_id])
    return replace(state, waiting=tuple(waiting), skipped_waiting=tuple(skipped), running=running)


def get_frames_behind_stop(frames: tuple[Frame, ...], request_id: RequestId) -> tuple[Frame, ...]:
    """Return the frames in flight after a session stopped: its rows deliver nothing. Source:
    P13."""
    return tuple([drop_row(frame, request_id) for frame in frames])


def get_request_ended(state: State, request_id: RequestId) -> State:
    """Return the state after an output stopped a request: a session continues, others finish.

    Source: vLLM 0.19.1 `_handle_stopped_request`; P1, P13.
    """
    if goes_on(state.requests[request_id]):
        return get_chunk_ended(state, request_id)
    return commit.get_request_ended(state, request_id)


def process_idle_gate(step: Step, request: RequestState) -> Verdict | None:
    """Skip an idle session until it gets further input. Source: seed 001 "Filter on blocking
    status"; P15."""
    del step
    return Verdict.PASSED_OVER if request.status is RESTING else None


def has_runnable(state: State) -> bool:
    """Whether there is a request that a plan may schedule: not only idle sessions.

    Source: vLLM 0.19.1 `get_num_unfinished_requests`; P10.
    """
    if not state.running and all(one.status is RESTING for one in state.requests.values()):
        return False
    return idle.has_runnable(state)


def count_updates(request: RequestState) -> int:
    """Return the number of inputs that wait for the session's next stop. Source: architecture
    D1."""
    return len(UPDATES.of(request))


def is_every_rest_behind_a_stop(state: State) -> bool:
    """A session is idle only without further input, rows in flight and placeholders.

    It has computed what it keeps, or holds nothing. Source: P10, P12, P17.
    """
    return all(
        request.request.resumable
        and not UPDATES.of(request)
        and not list_rows_in_flight(state.frames, request.request_id)
        and (request.num_output_placeholders, request.spec_token_ids) == (0, ())
        and request.num_computed_tokens in (0, compute_num_kept(request.num_known_tokens))
        for _, request in sorted(state.requests.items())
        if request.status is RESTING
    )


FEATURE: Final = Feature(
    "sessions",
    is_always,
    Hooks(gates=(process_idle_gate,)),
    instead={
        commit.get_request_ended: get_request_ended,
        idle.has_runnable: has_runnable,
    },
    events={StreamingUpdate: process_streaming_update},
    shows_of_request={"num_streaming_updates": count_updates},
    invariants=(is_every_rest_behind_a_stop,),
)
