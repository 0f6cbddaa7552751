"""Random branches through the specification and the host: both say the same after every event.

The programs are drawn here, and not by `draw`: branches of branches, of who was preempted, of who
is in flight, unknown or a session; with outputs that are the parent's, some of them, more of them
or others; beside drafts, grammars, adapters, windows, a watermark and either order of the pool.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from alike_support import (
    NAMES,
    Pair,
    draw_answer,
    draw_config,
    draw_drafts,
    draw_request,
    draw_thresholds,
    draw_update,
    list_attending,
    play_all,
)

from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v


def draw_forking(draw: random.Random) -> v.Config:
    """Nearly always with forks; drawn again until nothing is against the fields together."""
    while True:
        config = replace(
            draw_config(draw, list_attending),
            enable_prefix_caching=draw.random() < 0.7,
            policy=draw.choice((v.Policy.FCFS, v.Policy.FCFS, v.Policy.PRIORITY)),
            watermark_blocks=draw.choice((0, 0, 0, 1, 2, 4)),
            pool_order=draw.choice((*v.PoolOrder,)),
            enable_forks=draw.random() < 0.95,
        )
        config = draw_thresholds(draw, config)
        if config.enable_forks:
            config = replace(config, encoder_compute_budget=0, encoder_cache_size=0)
        if not v.config_problems(config):
            return config


def draw_parent(draw: random.Random, name: str) -> v.Request:
    fields = {"max_tokens": draw.randint(1, 9), "priority": draw.randrange(2)}
    return draw_request(draw, name, items=(), **fields)


def list_begun(host: HostEngine) -> list[str]:
    """Who may be forked."""
    table = host.table
    return [
        name
        for name, slot in table.slot_of.items()
        if table.statuses[slot] in (v.Status.RUNNING, v.Status.PREEMPTED)
        and not any(name in frame for frame in host.frames.values())
    ]


def list_unnamed(host: HostEngine) -> list[str]:
    """Of these, who has full blocks that nobody can find yet: of drafts that were accepted."""
    table, config = host.table, host.config
    return [
        name
        for name in list_begun(host)
        if config.enable_prefix_caching
        and any(
            held.num_cached < table.num_computed[table.slot_of[name]] // size
            for held, size in zip(
                table.holdings[table.slot_of[name]], config.block_sizes, strict=True
            )
        )
    ]


def draw_fork(draw: random.Random, host: HostEngine, parents: list[str] | None = None) -> v.Fork:
    """Of anybody, mostly of who may be forked; its outputs are some of the parent's, and others."""
    table = host.table
    begun = list_begun(host) if parents is None else parents
    parent = draw.choice(begun if begun and draw.random() < 0.9 else NAMES)
    unused = [name for name in NAMES if name not in table.slot_of]
    child = draw.choice(unused if unused and draw.random() < 0.95 else NAMES)
    outputs: v.TokenIds = ()
    if parent in table.slot_of:
        outputs = table.output_token_ids(table.slot_of[parent])
    if draw.random() < 0.6:
        num_kept = draw.randint(max(len(outputs) - 3, 0), len(outputs))
        outputs = (*outputs[:num_kept], *draw.choices(range(3), k=draw.choice((0, 1, 1, 2))))
    return v.Fork(parent, child, outputs)


def draw_event(draw: random.Random, pair: Pair) -> v.Event:
    kind, name, host = draw.random(), draw.choice(NAMES), pair.host
    unnamed = list_unnamed(host)
    if unnamed and draw.random() < 0.5:
        return draw_fork(draw, host, unnamed)
    if host.config.num_speculative_tokens and not host.frames and draw.random() < 0.2:
        return draw_drafts(draw, host, name)
    if kind < 0.15:
        unused = [n for n in NAMES if n not in host.table.slot_of]
        return v.Submit(draw_parent(draw, draw.choice(unused or NAMES)))
    if kind < 0.3:
        return draw_fork(draw, host)
    if kind < 0.35:
        return draw_drafts(draw, host, name)
    if kind < 0.38:
        return v.Abort((name, draw.choice(NAMES)))
    if kind < 0.41:
        return v.GrammarReady(name) if draw.random() < 0.8 else v.GrammarFailed(name)
    if kind < 0.42 and host.frames:
        return v.GrammarBitmask(draw.choice(list(host.frames)))
    if kind < 0.43:
        return draw_update(draw, draw_parent(draw, name))
    if kind < 0.44:
        return v.SetPause(draw.choice((*v.PauseState, *[v.PauseState.UNPAUSED] * 9)))
    if kind < 0.45:
        return v.Reset(draw.random() < 0.5, draw.random() < 0.1)
    if kind < (0.55 if host.config.max_frames_in_flight == 1 else 0.68):
        return v.Schedule()
    return draw_answer(draw, host)


def drain(draw: random.Random, pair: Pair) -> None:
    """Nobody is submitted and nobody branches: every request ends, and every block is free."""
    state = pair.apply(v.SetPause(v.PauseState.UNPAUSED))
    for name in [r.request_id for r in state.requests]:
        pair.apply(v.GrammarReady(name))
        pair.apply(v.StreamingUpdate(v.Request(name, (0,))))
    for _ in range(600):
        state = pair.apply(draw_answer(draw, pair.host))
        if not state.requests and not pair.host.frames:
            break
    assert not state.requests, f"seed {pair.seed}: {state.requests}"
    assert len(state.free_queue) == pair.host.config.num_usable_blocks


def count_witnesses(
    event: v.Event, found: object, before: v.Snapshot, after: v.Snapshot
) -> Counter[str]:
    """What shows that the programs reach what they are to reach."""
    seen: Counter[str] = Counter()
    if isinstance(event, v.Fork):
        if isinstance(found, v.Rejected):
            seen[found.code] += 1
        else:
            seen["forked"] += 1
            parent, child = after.request(event.request_id), after.request(event.child_id)
            assert parent is not None
            assert child is not None
            num_shared, computed = child.num_computed_tokens, parent.num_computed_tokens
            seen["shared"] += num_shared > 0
            seen["shared less than there was"] += 0 < num_shared < computed
            seen["of one preempted"] += parent.status is v.Status.PREEMPTED
            seen["of one in prefill"] += parent.is_prefill_chunk
            seen["with null blocks"] += any(v.NULL_BLOCK in table for table in child.block_tables)
            was = before.request(event.request_id)
            assert was is not None
            seen["named for it"] += was.num_cached_blocks != parent.num_cached_blocks
    if isinstance(found, v.Plan):
        seen |= count_copies(found, before)
        left = {r.request_id: r for r in after.requests if r.status is v.Status.WAITING}
        seen["gave its blocks up"] += any(
            (was := before.request(name)) is not None
            and was.num_computed_tokens > 0
            and not now.num_computed_tokens
            for name, now in left.items()
        )
    if isinstance(event, v.Commit | v.Abort):
        seen["parent ended before a branch"] += bool(after.waiting) and len(after.requests) < len(
            before.requests
        )
    return seen


def count_copies(plan: v.Plan, before: v.Snapshot) -> Counter[str]:
    """What a plan copies, and what it says of branches."""
    seen: Counter[str] = Counter()
    written = [copy.destination for copy in plan.block_copies]
    sources = [copy.source for copy in plan.block_copies]
    seen["copied"] += len(written)
    seen["remapped"] += len(plan.remapped_req_ids)
    seen["several copies"] += len(written) > 1
    seen["copied beside a victim"] += bool(written and plan.preempted_req_ids)
    seen["a copy of a copy"] += bool({*written} & {*sources})
    for row in plan.new:
        was = before.request(row.request_id)
        assert was is not None
        seen["began with outputs"] += bool(row.output_token_ids)
        seen["began behind nothing"] += bool(row.output_token_ids and not was.num_computed_tokens)
    tables = [row for row in plan.rows if isinstance(row, v.NewRow) or row.resumed]
    seen["a row admitted with a copy"] += any(
        block in table
        for row in tables
        for table in (row.block_ids if isinstance(row, v.NewRow) else row.new_block_ids)
        for block in written
    )
    return seen


def run(seeds: range, num_events: int) -> Counter[str]:
    def begin(draw: random.Random, seed: int) -> Pair:
        return Pair(draw_forking(draw), seed, count_witnesses)

    return play_all(seeds, num_events, begin, draw_event, drain)


WITNESSES = (
    *("forked", "shared", "shared less than there was", "of one preempted", "of one in prefill"),
    *("with null blocks", "named for it", "copied", "remapped", "several copies"),
    *("copied beside a victim", "began with outputs", "began behind nothing"),
    *("a row admitted with a copy", "gave its blocks up", "parent ended before a branch"),
    *(v.RejectCode.BAD_FORK, v.RejectCode.FORK_IN_FLIGHT, v.RejectCode.UNKNOWN_REQUEST),
    *(v.RejectCode.DUPLICATE_REQUEST, v.RejectCode.REQUEST_IN_FLIGHT),
)


def test_specification_and_host_are_alike() -> None:
    witnessed = run(range(80), 100)
    for name in WITNESSES:
        assert witnessed[name], (name, witnessed)


@pytest.mark.soak
def test_specification_and_host_are_alike_for_long() -> None:
    witnessed = run(range(1000, 1400), 250)
    assert witnessed["events"] > 100_000
