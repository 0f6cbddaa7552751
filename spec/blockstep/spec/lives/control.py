"""Control: pausing, and forgetting what is cached."""

from __future__ import annotations

from blockstep.spec.beside.encoder import create_encoder
from blockstep.spec.beside.transfers import NO_OFFERS, is_moving
from blockstep.spec.copies import replace
from blockstep.spec.lives.turns import without_pins
from blockstep.spec.pool import Pool, get_num_free_blocks, take_events, withdraw_all
from blockstep.spec.state import State
from blockstep.spec.step.giving import find_giver, process_gift
from blockstep.spec.step.preemption import process_preemption
from blockstep.spec.step.schedule import create_step
from blockstep.spec.vocabulary import Ack, PauseState, Reset, ResetDone


def process_pause(state: State, pause_state: PauseState) -> tuple[State, Ack]:
    """Set what the next Schedule may schedule. Source: seed 001 "Unified Token Budget"; P16."""
    return replace(state, pause_state=pause_state), Ack()


def process_reset(state: State, reset: Reset) -> tuple[State, ResetDone]:
    """Empty the prefix cache, so that nothing computed before can be hit.

    It is told at once, where somebody is told: an idle engine has no commit to tell it by, and
    upstream does not tell it before the next one.
    Blocks in use would be published again, so without `reset_running_requests` nothing happens
    while any block is held. With it the running requests are preempted first, the last one first,
    and so they wait in the order in which they ran; then sessions that do not run give up their
    blocks, where upstream stops by an error. Of a transfer that is under way nobody can. Pins stand
    against no reset: they end with what they keep. Blocks that wait for frames in flight count as
    held, but do not stand against a forced reset, as in vLLM 0.33.0: they lose their keys, and
    nobody is given them before those frames are answered.
    With `reset_connector` the store is told to forget, too. Source: seed 001 "Reset Prefix Cache",
    vLLM 0.19.1 `reset_connector_cache`; P17, P25.
    """
    if reset.reset_connector and state.rules.resets_apart:
        return process_resets_apart(state, reset)
    # refuse
    num_free = get_num_free_blocks(without_pins(state).pool)
    is_idle = num_free == state.config.num_usable_blocks
    if not is_idle and not reset.reset_running_requests:
        return state, ResetDone(False)
    is_without_store = reset.reset_connector and not state.config.kv_connector
    may_pass = is_idle and not state.rules.waits_for_empty_transfers
    if is_without_store or (is_moving(state.transfers) and not may_pass):
        return state, ResetDone(False)
    # requests
    if reset.reset_running_requests:
        state = process_forced_preemption(state)
    state = without_pins(state)
    if is_held_besides(state.pool):
        return state, ResetDone(False)  # by a quirk only
    if reset.reset_connector:
        state = replace(state, transfers=replace(state.transfers, offers=NO_OFFERS))
    # pool
    pool = withdraw_all(state.pool)
    # observe
    pool, kv_events = take_events(pool) if state.rules.tells_resets_at_once else (pool, ())
    return replace(state, pool=pool), ResetDone(True, kv_events)


def is_held_besides(pool: Pool) -> bool:
    """Whether blocks are held by more than what waits for frames in flight. Source: P17, P25."""
    num_deferred = sum([len(deferred.block_ids) for deferred in pool.deferred_frees])
    return sum(pool.ref_counts) > num_deferred


def process_resets_apart(state: State, reset: Reset) -> tuple[State, ResetDone]:
    """Reset the pool and the store, each whether or not the other is; by a quirk only.

    Source: vLLM 0.19.1 `reset_prefix_cache`; P25.
    """
    state, done = process_reset(state, replace(reset, reset_connector=False))
    state = replace(state, transfers=replace(state.transfers, offers=NO_OFFERS))
    return state, replace(done, success=done.success and state.config.kv_connector)


def process_encoder_reset(state: State) -> tuple[State, Ack]:
    """Forget every encoded item, those in use as well: what reads of one has it encoded anew.

    A worker forgets behind the frames in flight, and each of those finds what it reads. KV that was
    computed from items stays, and what a connector holds, it holds.
    Source: vLLM 0.19.1 `reset_encoder_cache`; P25.
    """
    encoder = replace(create_encoder(state.config), offered=state.encoder.offered)
    return replace(state, encoder=encoder), Ack()


def process_encoder_offer(state: State, identifiers: tuple[str, ...]) -> tuple[State, Ack]:
    """Set what a connector holds of encoded items.

    Nothing is loaded for an encoder-decoder model: what a step reads, it makes. Upstream loads it,
    and takes no blocks for it across. Source: vLLM 0.19.1 `has_cache_item`; P8, P22.
    """
    if not state.encoder.size or not state.encoder.is_shared:
        return state, Ack()
    offered = tuple(sorted({*identifiers}))
    return replace(state, encoder=replace(state.encoder, offered=offered)), Ack()


def process_forced_preemption(state: State) -> State:
    """Preempt everything that runs, and take the blocks of all sessions that hold some without.

    As in a step of which nothing is planned. The next plan treats nobody as known from the last
    one. Source: vLLM 0.19.1 `reset_prefix_cache`; P17, P25, P26.
    """
    rules, step = state.rules, create_step(state)
    # pool, requests
    while step.running:
        name = process_preemption(step, len(step.running) - 1)
        step.requests[name] = rules.get_reset_request(step.requests[name])
    while (giver_id := find_giver(step)) is not None:
        process_gift(step, giver_id)
    # observe
    named = state.running if rules.names_victims_of_resets else ()
    return replace(
        step.get_state(),
        frames=rules.get_frames_after_reset(state.frames, state.running),
        prev_scheduled_req_ids=(),
        reset_req_ids=(*state.reset_req_ids, *named),
    )
