"""What a store may say at any time, beside all else that is drawn: nothing of it makes sense.

`alike_support` plays what is drawn here through two engines.
"""

from __future__ import annotations

import random
from dataclasses import replace

from alike_support import (
    NAMES,
    Pair,
    draw_answer,
    draw_config,
    draw_drafts,
    draw_request,
    draw_update,
    list_attending,
)
from groups_support import full

from blockstep.spec import vocabulary as v


def draw_stored(draw: random.Random) -> v.Config:
    return replace(
        draw_config(draw, list_groups),
        policy=draw.choice((v.Policy.FCFS, v.Policy.PRIORITY)),
        enable_prefix_caching=draw.random() < 0.85,
        kv_connector=True,
        kv_load_failure_policy=draw.choice(list(v.KVLoadFailurePolicy)),
    )


def list_groups(size: int, _num_drafts: int) -> tuple[tuple[v.KVGroup, ...], ...]:
    return ((full(size),), *list_attending(size))


def draw_offer(draw: random.Random, name: str) -> v.KVOffer:
    num_tokens = draw.choice((None, *range(18)))
    return v.KVOffer(name, num_tokens, draw.random() < 0.6, draw.random() < 0.3)


def draw_report(draw: random.Random, state: v.Snapshot, plan: v.Plan | None) -> v.KVTransfers:
    """Of anybody and of nobody; mostly of what is under way."""
    assert state.transfers is not None
    parked = [r for r in state.requests if r.status is v.Status.WAITING_FOR_REMOTE_KVS]
    held = [h.request_id for h in state.transfers.held]
    names = [*[r.request_id for r in parked], *held, draw.choice(NAMES)]
    loads = () if plan is None else plan.kv_loads
    loading = [b for load in loads for table in load.block_ids for b in table]
    loading += [b for r in parked for table in r.block_tables for b in table]
    blocks = [*draw.sample(loading, min(len(loading), draw.choice((0, 0, 0, 1, 1, 2, 9))))]
    if draw.random() < 0.1:
        blocks.append(draw.randint(1, 20))
    return v.KVTransfers(
        finished_recving=tuple(name for name in names if draw.random() < 0.4),
        finished_sending=tuple(name for name in names if draw.random() < 0.3),
        invalid_block_ids=tuple(blocks),
    )


def answer(draw: random.Random, pair: Pair) -> v.Event:
    """With a report half of the time."""

    def report(frame_id: int) -> v.KVTransfers:
        if draw.random() < 0.5:
            return v.NO_TRANSFERS
        return draw_report(draw, pair.host.snapshot(), pair.plans[frame_id])

    return draw_answer(draw, pair.host, report)


def draw_event(draw: random.Random, pair: Pair) -> v.Event:
    kind, name, host = draw.random(), draw.choice(NAMES), pair.host
    config, table = host.config, host.table
    fresh = [n for n, slot in table.slot_of.items() if not table.num_computed[slot]]
    assert host.transfers is not None
    unoffered = [n for n in fresh if n not in host.transfers.offers]
    if draw.random() < (0.5 if unoffered else 0.1 if fresh else 0.0):
        return draw_offer(draw, draw.choice(unoffered or fresh))
    if kind < 0.14:
        unused = [n for n in NAMES if n not in table.slot_of]
        return v.Submit(
            draw_request(draw, draw.choice(unused or NAMES), priority=draw.randrange(3))
        )
    if kind < 0.17:
        return v.KVOffer(name) if draw.random() < 0.2 else draw_offer(draw, name)
    if kind < 0.25:
        return v.TransfersReported(draw_report(draw, host.snapshot(), None))
    if kind < 0.3:
        return draw_drafts(draw, host, name)
    if kind < 0.32:
        return v.Abort((name, draw.choice(NAMES)))
    if kind < 0.37:
        return v.GrammarReady(name) if draw.random() < 0.8 else v.GrammarFailed(name)
    if kind < 0.39 and host.frames:
        return v.GrammarBitmask(draw.choice(list(host.frames)))
    if kind < 0.41:
        return draw_update(draw, draw_request(draw, name, priority=draw.randrange(3)))
    if kind < 0.42:
        return v.SetPause(draw.choice((*v.PauseState, *[v.PauseState.UNPAUSED] * 9)))
    if kind < 0.43:
        return v.Reset(draw.random() < 0.7, draw.random() < 0.3)
    if kind < (0.55 if config.max_frames_in_flight == 1 else 0.68):
        return v.Schedule()
    return answer(draw, pair)


def drain(draw: random.Random, pair: Pair) -> None:
    """All is healed, and nothing more is submitted: every request ends, and holds nothing."""
    state = pair.apply(v.SetPause(v.PauseState.UNPAUSED))
    for name in [r.request_id for r in state.requests]:
        pair.apply(v.GrammarReady(name))
        pair.apply(v.StreamingUpdate(v.Request(name, (0,))))
        pair.apply(v.KVOffer(name))
    for _ in range(400):
        state = pair.apply(heal(pair.host.snapshot()))
        if not state.requests and not pair.host.frames:
            break
        pair.apply(draw_answer(draw, pair.host))
    assert not state.requests, f"seed {pair.seed}: {state.requests}"
    assert len(state.free_queue) == pair.host.config.num_usable_blocks


def heal(state: v.Snapshot) -> v.Event:
    """Every load and every store comes to its end."""
    assert state.transfers is not None
    held = tuple(h.request_id for h in state.transfers.held)
    parked = [r for r in state.requests if r.status is v.Status.WAITING_FOR_REMOTE_KVS]
    loading = tuple(r.request_id for r in parked)
    return v.TransfersReported(v.KVTransfers((*loading, *held), held))
