"""Control: pausing, and forgetting what is cached."""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec.maps import FrozenMap
from blockstep.spec.pool import free_blocks, get_num_free_blocks, withdraw_all
from blockstep.spec.profiles import Quirk
from blockstep.spec.state import State
from blockstep.spec.step.queues import process_prepend
from blockstep.spec.step.schedule import get_preempted
from blockstep.spec.vocabulary import Ack, PauseState, ResetDone


def process_pause(state: State, pause_state: PauseState) -> tuple[State, Ack]:
    """Set what the next Schedule may schedule. Source: seed 001 "Unified Token Budget"; P16."""
    return replace(state, pause_state=pause_state), Ack()


def process_reset(state: State, reset_running_requests: bool) -> tuple[State, ResetDone]:
    """Empty the prefix cache, so that nothing computed before can be hit.

    Blocks in use would be published again, so without `reset_running_requests` nothing happens
    while any block is held. With it the running requests are preempted first, the last one first,
    and so they wait in the order in which they ran. Source: seed 001 "Reset Prefix Cache"; P25.
    """
    # refuse
    is_idle = get_num_free_blocks(state.pool) == state.config.num_usable_blocks
    if not is_idle and not reset_running_requests:
        return state, ResetDone(False)
    # requests
    if reset_running_requests:
        state = process_forced_preemption(state)
    # pool
    return replace(state, pool=withdraw_all(state.pool)), ResetDone(True)


def process_forced_preemption(state: State) -> State:
    """Preempt everything that runs. The next plan treats nobody as known from the last one.

    Source: vLLM 0.19.1 `reset_prefix_cache`; P25, P26.
    """
    pool = state.pool
    requests = state.requests.to_dict()
    waiting = list(state.waiting)
    for request_id in reversed(state.running):
        table = requests[request_id].block_table
        pool = free_blocks(pool, table, state.frees_unnamed_first)
        requests[request_id] = get_preempted(requests[request_id], state.quirks)
        process_prepend(state.config.policy, waiting, request_id, requests)
    preemptions = state.stats.preemptions + len(state.running)
    if Quirk.RESET_DROPS_TOKENS in state.quirks:
        state = get_without_tokens_in_flight(state)
        for request_id in state.running:
            requests[request_id] = replace(requests[request_id], num_output_placeholders=0)
    if Quirk.RESET_NAMES_ITS_VICTIMS in state.quirks:
        state = replace(state, reset_req_ids=(*state.reset_req_ids, *state.running))
    return replace(
        state,
        pool=pool,
        requests=FrozenMap(requests),
        waiting=tuple(waiting),
        running=(),
        prev_scheduled_req_ids=(),
        stats=replace(state.stats, preemptions=preemptions),
    )


def get_without_tokens_in_flight(state: State) -> State:
    """The state in which what runs gets no token any more from the frames in flight.

    Source: vLLM 0.27.0 `_preempt_request`, when run.
    """
    frames = tuple(
        replace(
            frame,
            rows=tuple(
                replace(row, is_dropped=row.is_dropped or row.request_id in state.running)
                for row in frame.rows
            ),
        )
        for frame in state.frames
    )
    return replace(state, frames=frames)
