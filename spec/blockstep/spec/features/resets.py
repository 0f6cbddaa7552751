"""Reset: the prefix cache is emptied, so that nothing computed before can be hit."""

from __future__ import annotations

from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Pool, get_num_free_blocks, withdraw_all
from blockstep.spec.core.endings import take_changes
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.preemption import process_preemption
from blockstep.spec.core.schedule import create_step
from blockstep.spec.core.state import State
from blockstep.spec.vocabulary import Reset, ResetDone


def process_reset(state: State, reset: Reset) -> tuple[State, ResetDone]:
    """Empty the prefix cache, so that nothing computed before can be hit.

    KV events of it are returned at once, because an idle engine has no commit that could return
    them. Blocks in use would be published again, so without `reset_running_requests` nothing
    happens while any block is held. With it the running requests are preempted first, the last one
    first, so that they wait in the order in which they ran; then sessions that do not run release
    their blocks. Blocks that a reset frees (`Hooks.resets`) do not prevent it. Blocks that wait for
    frames in flight count as held, but do not prevent a forced reset: they lose their keys, and are
    not reused before those frames are committed. There is no connector to reset. Source: seed 001
    "Reset Prefix Cache"; vLLM 0.33.0 `reset_prefix_cache`; P17, P25.
    """
    # refuse
    if reset.reset_connector or not (reset.reset_running_requests or is_idle(state)):
        return state, ResetDone(False)
    # requests
    if reset.reset_running_requests:
        state = state.rules[process_forced_preemption](state)
    state = get_reset_parts(state)
    if is_held_besides(state.pool):
        return state, ResetDone(False)
    # pool
    pool = withdraw_all(state.pool)
    # observe
    state, changes = take_changes(replace(state, pool=pool))
    return state, ResetDone(True, changes)


def is_idle(state: State) -> bool:
    """Whether no block is held, but for what ends with a reset. Source: P25."""
    return get_num_free_blocks(get_reset_parts(state).pool) == state.config.num_usable_blocks


def get_reset_parts(state: State) -> State:
    """Return the state without what does not prevent a reset, and ends with it. Source: P25."""
    for reset in state.rules.hooks.resets:
        state = state.rules[reset](state)
    return state


def is_held_besides(pool: Pool) -> bool:
    """Return whether blocks are held other than deferred frees. Source: P17, P25."""
    num_deferred = sum([len(deferred.block_ids) for deferred in pool.deferred_frees])
    return sum(pool.ref_counts) > num_deferred


def process_forced_preemption(state: State) -> State:
    """Preempt all running requests, and take the blocks of all sessions that do not run.

    As in a step in which nothing is planned. In the next plan no request counts as known from the
    last one. Source: vLLM 0.19.1 `reset_prefix_cache`; P17, P25, P26.
    """
    step = create_step(state)
    # pool, requests
    while step.running:
        process_preemption(step, len(step.running) - 1)
    for clear in state.rules.hooks.clears:
        state.rules[clear](step)
    # observe
    return replace(step.get_state(), prev_scheduled_req_ids=())


FEATURE: Final = Feature("resets", is_always, events={Reset: process_reset})
