"""Victims saved for a store, and two thresholds, through the specification and the host: alike.

The programs are those of a store that says anything at any time (`stored_support`), in pools that
are short of blocks.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from alike_support import Pair, draw_thresholds, play_all
from stored_support import drain, draw_event, draw_stored

from blockstep.spec.vocabulary import NULL_BLOCK, Config, Event, Plan, Snapshot, config_problems


def draw_swapping(draw: random.Random) -> Config:
    """Short of blocks, so that somebody is preempted; mostly all that they have is saved."""
    while True:
        config = draw_thresholds(draw, draw_stored(draw))
        config = replace(
            config,
            num_blocks=max(config.num_blocks * 2 // 3, 4),
            max_num_seqs=max(config.max_num_seqs, 3),
            max_num_batched_tokens=max(config.max_num_batched_tokens, draw.choice((2, 6, 12))),
            admission_low_blocks=config.admission_low_blocks if draw.random() < 0.5 else 0,
            scheduler_reserve_full_isl=draw.random() < 0.2,
            swap_min_tokens=draw.choice((0, 1, 1, 1, config.block_size + 1, 3 * config.block_size)),
        )
        if not config_problems(config):
            return config


def count_witnesses(event: Event, found: object, before: Snapshot, after: Snapshot) -> Counter[str]:
    """What shows that the programs reach what they are to reach."""
    seen: Counter[str] = Counter()
    if isinstance(found, Plan):
        saved = {save.request_id: save for save in found.kv_saves}
        known = {r.request_id: r for r in before.requests}
        seen["saved"] += len(saved)
        seen["with others"] += len(saved) > 1
        seen["not saved"] += len({*found.preempted_req_ids} - {*saved})
        tables = [table for save in saved.values() for table in save.block_ids]
        seen["left behind"] += any(NULL_BLOCK in table for table in tables)
        seen["in flight"] += bool(saved and before.frames_in_flight)
        seen["drafts"] += any(known[name].spec_token_ids for name in saved)
        seen["come back"] += any(known[load.request_id].num_preemptions for load in found.kv_loads)
        seen["closed"] += after.admission_closed and not before.admission_closed
        seen["kept closed"] += before.admission_closed and after.admission_closed
        seen["opened"] += before.admission_closed and not after.admission_closed
        seen["nobody ran"] += before.admission_closed and not before.running
    return seen


def run(seeds: range, num_events: int) -> Counter[str]:
    def begin(draw: random.Random, seed: int) -> Pair:
        return Pair(draw_swapping(draw), seed, count_witnesses)

    return play_all(seeds, num_events, begin, draw_event, drain)


WITNESSES = (
    *("saved", "with others", "not saved", "left behind", "in flight", "drafts", "come back"),
    *("closed", "kept closed", "opened", "nobody ran"),
)


def test_specification_and_host_are_alike() -> None:
    witnessed = run(range(120), 100)
    for name in WITNESSES:
        assert witnessed[name] > 0, (name, witnessed)


@pytest.mark.soak
def test_specification_and_host_are_alike_for_long() -> None:
    witnessed = run(range(1000, 1400), 250)
    assert witnessed["events"] > 100_000
