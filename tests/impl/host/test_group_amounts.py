"""Block counts of KV groups: compiled functions return the figures of the specification.

All kinds are tried with all ends of blocks, windows, chunks and drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from as_python import load_as_python

from blockstep.impl.host import state as c
from blockstep.spec.core.slots import compute_num_new_blocks
from blockstep.spec.features import mamba
from blockstep.spec.features.groups import kinds
from blockstep.spec.vocabulary import (
    BlockId,
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    SpecMethod,
)

SLOTS = range(14)
DRAFTS = Config(32, 1, spec_method=SpecMethod.DRAFT_MODEL, num_speculative_tokens=2)
CONFIGS = [
    Config(32, 1, max_num_batched_tokens=3),
    Config(32, 1, max_num_batched_tokens=4, long_prefill_token_threshold=2),
    Config(32, 1, max_num_batched_tokens=2, long_prefill_token_threshold=4),
    replace(DRAFTS, max_num_batched_tokens=4),
    replace(DRAFTS, max_num_batched_tokens=4, max_frames_in_flight=3),
    replace(DRAFTS, max_num_batched_tokens=4, max_frames_in_flight=3, async_scheduling=True),
    replace(DRAFTS, max_num_batched_tokens=2, max_frames_in_flight=2, async_scheduling=True),
]
"""Rows limited by the budget or the threshold; with and without drafts in flight."""
KINDS = (GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL, GroupKind.RECURRENT)


def draw_groups(kind: GroupKind) -> Iterator[KVGroup]:
    """Yield groups of one kind, of all small sizes."""
    for size in (1, 2, 3, 4):
        match kind:
            case GroupKind.SLIDING_WINDOW:
                yield from (KVGroup(kind, size, sliding_window=number) for number in range(1, 7))
            case GroupKind.CHUNKED_LOCAL:
                chunks = (2, 3, 4, 5, 6)
                yield from (KVGroup(kind, size, attention_chunk_size=tokens) for tokens in chunks)
            case GroupKind.RECURRENT:
                for mode, spare in product(MambaCacheMode, (0, 1, 2)):
                    # One state that is written over has a block as long as the model.
                    slots = max(SLOTS) if mode is MambaCacheMode.NONE else size
                    yield KVGroup(kind, slots, mamba_cache_mode=mode, num_speculative_blocks=spare)
            case _:
                yield KVGroup(kind, size)


def make_state(group: KVGroup) -> Any:
    """Return the state of an engine with this group, and one request with a batch row."""
    state: Any = load_as_python().state.make_state(Config(32, 1, groups=(group,)))
    state.requests[0, c.BATCH_ROW] = state.requests[0, c.LAST_FRAME] = 0
    return state


def list_table(state: Any) -> tuple[BlockId, ...]:
    table: list[int] = state.block_tables[0, 0, : state.holdings[0, 0, c.HELD]].tolist()
    return tuple(table)


@pytest.mark.parametrize("kind", KINDS)
def test_the_maximum_of_held_blocks_equals_the_specification(kind: GroupKind) -> None:
    for config, group in product(CONFIGS, draw_groups(kind)):
        groups = c.make_groups(replace(config, groups=(group,)))
        reach, doubt = kinds.compute_max_reach(config), kinds.compute_max_unverified(config)
        held = [c.count_most_blocks(groups, slots, 0) for slots in SLOTS]
        charged = [kinds.compute_max_held_blocks(group, slots, reach, doubt) for slots in SLOTS]
        assert held[1:] == charged[1:], (config, group)


WALKS = [[*range(row, 14, row)] for row in (1, 2, 3, 5)] + [[6, 4, 7, 5, 6, 11], [5, 1, 2, 9]]
"""Ends of the rows of one request; it decreases after rejected drafts."""


@pytest.mark.parametrize("kind", KINDS)
def test_block_tables_grow_as_in_the_specification(kind: GroupKind) -> None:
    """Each step is tried with and without lookahead slots."""
    functions = load_as_python().groups
    for group, walk, ahead in product(draw_groups(kind), WALKS, (0, 1)):
        state = make_state(group)
        table: tuple[BlockId, ...] = ()
        for end in walk:
            if kind is GroupKind.RECURRENT:
                length = mamba.compute_num_state_blocks(group, end, end + ahead)
                missing = mamba.compute_num_new_states(group, length, len(table), 0)
            else:
                length = -(-(end + ahead) // group.block_size)
                missing = compute_num_new_blocks(end + ahead, group.block_size, len(table))
            free = state.scalars[c.NUM_FREE]
            functions.take_needed(state, 0, end, end + ahead, 0)
            assert free - state.scalars[c.NUM_FREE] == missing, (group, walk, end)
            grown = list_table(state)
            new = tuple([block for block in grown if block and block not in table])
            table = mamba.get_extended_states(group, table, bool(table), length, new)
            assert grown == table, (group, walk, end)


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_blocks_equal_those_of_the_specification(kind: GroupKind) -> None:
    functions = load_as_python().groups
    for group, computed, in_doubt in product(draw_groups(kind), SLOTS, (0, 1, 2)):
        state, doubt = make_state(group), min(in_doubt, computed)
        certain = mamba.compute_num_certain(group, computed, doubt)
        skipped = kinds.compute_num_skipped_blocks(group, certain)
        functions.take_needed(state, 0, computed, computed, 0)
        before = list_table(state)
        state.requests[0, c.NUM_COMPUTED], state.requests[0, c.NUM_IN_DOUBT] = computed, doubt
        functions.leave_blocks(state, 0)
        where = (group, computed, in_doubt)
        assert list_table(state) == (*[0] * skipped, *before[skipped:]), where
        assert state.holdings[0, 0, c.LEFT] == skipped, where
