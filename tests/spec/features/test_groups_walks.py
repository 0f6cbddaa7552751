"""Random walks with several KV groups: attended blocks are held, block counts are exact.

The checks know only which token attends to which, not the rules of the kinds of groups.
"""

from itertools import chain
from random import Random

import pytest
from groups_support import attends, chunks, full, window
from walks_support import GroupsWalk

from blockstep.spec import Config, Policy, SpecMethod, State
from blockstep.spec.core import admission, preemption, slots
from blockstep.spec.core.block_pool import Pool, get_num_free_blocks
from blockstep.spec.core.requests import NO_HIT, Hit, RequestState
from blockstep.spec.core.rules import STRICT_RULES, Rules
from blockstep.spec.vocabulary import NULL_BLOCK, Plan

MIXES = (
    (full(2), window(2, 3)),
    (window(1, 4), full(2)),
    (full(1), window(2, 5), chunks(4, 8)),
    (window(2, 1), chunks(2, 3)),
    (chunks(2, 6), full(4), window(4, 3)),
    (window(3, 7),),
)
METHODS = (SpecMethod.NONE, SpecMethod.NGRAM, SpecMethod.EAGLE)


def draw_config(random: Random) -> Config:
    groups = random.choice(MIXES)
    method = random.choice(METHODS)
    depth = random.choice((1, 1, 2, 3))
    return Config(
        num_blocks=random.randint(8, 30),
        block_size=min(group.block_size for group in groups),
        max_num_seqs=3,
        max_num_batched_tokens=random.randint(1, 10),
        max_model_len=24,
        policy=random.choice((Policy.FCFS, Policy.PRIORITY)),
        enable_prefix_caching=random.random() < 0.8,
        long_prefill_token_threshold=random.choice((0, 0, 2, 5)),
        scheduler_reserve_full_isl=random.random() < 0.7,
        spec_method=method,
        num_speculative_tokens=0 if method is SpecMethod.NONE else random.randint(1, 3),
        max_frames_in_flight=depth,
        async_scheduling=depth > 1 and random.random() < 0.7,
        groups=groups,
    )


class Walk(GroupsWalk):
    """Random events; each plan is checked before the worker would run it."""

    def __init__(self, seed: int, config: Config | None = None) -> None:
        random = Random(seed)
        super().__init__(random, config or draw_config(random))
        self.num_nulls = 0

    def check_plan(self, before: State, plan: Plan) -> None:
        """Check that blocks that a row attends to or writes are held, and others are null."""
        config = before.config
        for row in plan.rows:
            start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
            in_flight = [r for f in before.frames for r in f.rows if r.request_id == row.request_id]
            first = start - sum(len(r.draft_token_ids) for r in in_flight)
            tables = self.oracle.state.requests[row.request_id].block_tables
            for group, table in zip(config.groups, tables, strict=True):
                size = group.block_size
                assert len(table) * size >= end
                for index in range(-(-end // size)):
                    block = range(index * size, (index + 1) * size)
                    is_read = any(attends(group, r, p) for r in range(first, end) for p in block)
                    is_written = block.stop > first
                    assert (table[index] != NULL_BLOCK) == (is_read or is_written)
                self.num_nulls += NULL_BLOCK in table


@pytest.fixture
def _estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each allocation takes the number of blocks computed here, or fails for lack."""

    def allocate_slots(
        config: Config,
        pool: Pool,
        request: RequestState,
        num_new: int,
        num_lookahead: int = 0,
        hit: Hit = NO_HIT,
        rules: Rules = STRICT_RULES,
    ) -> tuple[Pool, RequestState] | None:
        granted = slots.allocate_slots(config, pool, request, num_new, num_lookahead, hit, rules)
        num_computed = request.num_computed_tokens + hit.num_tokens
        num_slots = min(num_computed + num_new + num_lookahead, config.max_model_len)
        tables = hit.block_tables or ((),) * len(config.groups)
        num_needed = 0
        for group, held, shared in zip(config.groups, request.block_tables, tables, strict=True):
            num_blocks = -(-num_slots // group.block_size)
            num_needed += max(num_blocks - len(held) - len(shared), 0)
        # A block that several groups share counts once.
        revived = {b for b in chain.from_iterable(tables) if b and pool.ref_counts[b] == 0}
        num_needed += len(revived)
        num_free = get_num_free_blocks(pool)
        assert (granted is None) == (num_needed > num_free)
        if granted is not None:
            assert get_num_free_blocks(granted[0]) == num_free - num_needed
        return granted

    monkeypatch.setattr(admission, "allocate_slots", allocate_slots)
    monkeypatch.setattr(preemption, "allocate_slots", allocate_slots)


@pytest.mark.usefixtures("_estimates")
@pytest.mark.parametrize("part", range(3))
def test_attended_blocks_are_held_and_allocations_are_exact(part: int) -> None:
    walks = [Walk(seed) for seed in range(part * 25, part * 25 + 25)]
    for walk in walks:
        walk.run(60)
    assert all(sum(map(count, walks)) > 0 for count in COUNTS)


COUNTS = (
    lambda walk: walk.num_nulls,
    lambda walk: walk.num_hits,
    lambda walk: walk.num_preempted,
)
