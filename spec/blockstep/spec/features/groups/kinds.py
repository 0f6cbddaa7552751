"""Kinds: which tokens each kind of attention still reads, and so which blocks must be held.

    | skipped |     attended     |  new  | lookahead |        before a token at position c
    |  null   |       held       |     allocate      |

The kind of a group decides which tokens are skipped; the rest follows from it. A recurrent group
has rules of its own, which are in `features.mamba`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Final, TypeAlias

from blockstep.spec.core import slots
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.requests import Holding
from blockstep.spec.core.slots import Growth, compute_num_blocks
from blockstep.spec.features.full_isl import count_lacking
from blockstep.spec.features.mamba import compute_max_held_states, extend_states, take_states
from blockstep.spec.vocabulary import BlockId, Config, GroupKind, KVGroup, Request

Table: TypeAlias = tuple[BlockId, ...]


def skip_nothing(group: KVGroup, num_computed: int) -> int:
    """Return 0: every token is attended to. Source: vLLM 0.19.1 `get_num_skipped_tokens`."""
    del group, num_computed
    return 0


def skip_before_window(group: KVGroup, num_computed: int) -> int:
    """Return the tokens before a window. Source: vLLM 0.19.1 `get_num_skipped_tokens`."""
    return max(num_computed - group.sliding_window + 1, 0)


def skip_before_chunk(group: KVGroup, num_computed: int) -> int:
    """Return the tokens before an attention chunk. Source: vLLM 0.19.1 `get_num_skipped_tokens`."""
    return num_computed // group.attention_chunk_size * group.attention_chunk_size


def skip_before_state(group: KVGroup, num_computed: int) -> int:
    """Return the tokens before the last one: only the state after that is read.

    Source: vLLM 0.19.1 `get_num_skipped_tokens`.
    """
    del group
    return max(num_computed - 1, 0)


def hold_all(group: KVGroup, num_all: int, max_reach: int, max_doubt: int) -> int:
    """Return all blocks of a request. Source: vLLM 0.19.1 `max_memory_usage_bytes`; P8, P11."""
    del group, max_reach, max_doubt
    return num_all


def hold_window(group: KVGroup, num_all: int, max_reach: int, max_doubt: int) -> int:
    """Return the blocks that a window and the reach of a step touch, wherever they begin.

    Source: vLLM 0.19.1 `max_memory_usage_bytes`, without what cannot happen; P8, P11.
    """
    del max_doubt
    num_tokens = group.block_size - 1 + group.sliding_window - 1 + max_reach
    return min(num_all, compute_num_blocks(num_tokens, group.block_size))


def hold_chunk(group: KVGroup, num_all: int, max_reach: int, max_doubt: int) -> int:
    """Return the blocks that an attention chunk and the reach of a step touch.

    A chunk does not begin anywhere in a block, as a window does. Source: vLLM 0.19.1
    `max_memory_usage_bytes`, without what cannot happen; P8, P11.
    """
    del max_doubt
    offset = group.block_size - gcd(group.attention_chunk_size, group.block_size)
    num_tokens = offset + group.attention_chunk_size - 1 + max_reach
    return min(num_all, compute_num_blocks(num_tokens, group.block_size))


def hold_states(group: KVGroup, num_all: int, max_reach: int, max_doubt: int) -> int:
    """Return the states that a step reads and writes. Source: vLLM 0.19.1
    `MambaSpec.max_memory_usage_bytes`; P8, P11."""
    return compute_max_held_states(group, num_all, max_reach, max_doubt)


def count_embeds(group: KVGroup, num_slots: int, request: Request) -> int:
    """Return one slot for each output of the encoder.

    Source: vLLM 0.19.1 `KVCacheCoordinator.allocate_new_blocks`; P8.
    """
    del group, num_slots
    return sum([item.num_embeds for item in request.items])


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """The decisions of one kind of group; full attention by default."""

    skip: Callable[[KVGroup, int], int] = skip_nothing
    """The leading tokens to which no token from a position on attends."""
    hold: Callable[[KVGroup, int, int, int], int] = hold_all
    """The most blocks held: (.., blocks of all slots, reach of a step, drafts in flight)."""
    count_slots: Callable[[KVGroup, int, Request], int] = slots.get_num_slots_of
    """The slots of the table: (.., slots of the tokens, the request)."""
    take: Callable[[KVGroup, Growth, int, int], int] = slots.count_taken
    """The new blocks for a step: (.., blocks held, blocks hit)."""
    extend: Callable[[KVGroup, Growth, Table, Table, Table], Table] = slots.get_extended_table
    """A table after a step: (.., blocks held, blocks hit, new blocks)."""
    has_kv: bool = True
    """Whether it holds KV of tokens, not states."""
    has_common_prefix: bool = False
    """Whether attention to blocks that all running requests share is computed once."""


KINDS: Final[Mapping[GroupKind, Kind]] = {
    GroupKind.FULL: Kind(has_common_prefix=True),
    GroupKind.CROSS_ATTENTION: Kind(count_slots=count_embeds),
    GroupKind.SLIDING_WINDOW: Kind(skip_before_window, hold_window),
    GroupKind.CHUNKED_LOCAL: Kind(skip_before_chunk, hold_chunk),
    GroupKind.RECURRENT: Kind(
        skip_before_state,
        hold_states,
        take=take_states,
        extend=extend_states,
        has_kv=False,
    ),
}
"""All kinds."""


# Skipped blocks.


def compute_num_skipped_tokens(group: KVGroup, num_computed: int) -> int:
    """Return the leading tokens to which no token from position `num_computed` on attends.

    Source: vLLM 0.19.1 `get_num_skipped_tokens`.
    """
    return KINDS[group.kind].skip(group, num_computed)


def compute_num_skipped_blocks(group: KVGroup, num_computed: int) -> int:
    """Return the leading blocks with no attended token.

    Source: vLLM 0.19.1 `remove_skipped_blocks`.
    """
    return compute_num_skipped_tokens(group, num_computed) // group.block_size


# Held blocks.


def compute_max_row(config: Config) -> int:
    """Return the most tokens of a row. Source: P9."""
    budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
    return min(budget, threshold) if threshold else budget


def compute_max_reach(config: Config) -> int:
    """Return the most slots of one request from the first token on that it may have to compute
    again.

    A row of a step, the lookahead after it, and drafts in flight before it: until they are verified
    a request may have to roll back to the first of them. Source: P8, P14.
    """
    return compute_max_unverified(config) + compute_max_row(config) + config.num_lookahead_tokens


def compute_max_unverified(config: Config) -> int:
    """Return the most computed tokens of one request that are drafts in flight. Source: P14."""
    num_frames = config.max_frames_in_flight - 1 if config.async_scheduling else 0
    return num_frames * min(config.num_speculative_tokens, compute_max_row(config) - 1)


def compute_max_held_blocks(
    group: KVGroup, num_slots: int, max_reach: int, max_doubt: int = 0
) -> int:
    """Return the most blocks of one group that a request of `num_slots` holds at once.

    Whatever its chunks are. Source: vLLM 0.19.1 `max_memory_usage_bytes` of each kind, without what
    cannot happen; upstream #39734; P8, P11.
    """
    num_all = compute_num_blocks(num_slots, group.block_size)
    return KINDS[group.kind].hold(group, num_all, max_reach, max_doubt)


# In the place of functions of the core.


def count_held_at_most(config: Config, group: KVGroup, num_slots: int) -> int:
    """Return the most blocks of a group that a request of `num_slots` holds at once.

    Source: upstream #39734; P8, P11.
    """
    reach, doubt = compute_max_reach(config), compute_max_unverified(config)
    return compute_max_held_blocks(group, num_slots, reach, doubt)


def get_num_slots_of(group: KVGroup, num_slots: int, request: Request) -> int:
    """Return the slots in a group's table: those of the tokens, or of the encoder outputs.

    Source: vLLM 0.19.1 `KVCacheCoordinator.allocate_new_blocks`; P8.
    """
    return KINDS[group.kind].count_slots(group, num_slots, request)


def count_taken(group: KVGroup, growth: Growth, num_held: int, num_hit: int) -> int:
    """Return the blocks that a group takes from the queue in a step. Source: vLLM 0.19.1
    `allocate_new_blocks` of each kind; P8."""
    return KINDS[group.kind].take(group, growth, num_held, num_hit)


def get_extended_table(
    group: KVGroup, growth: Growth, held: Table, found: Table, new_blocks: Table
) -> Table:
    """Return the table of a group after a step. Source: vLLM 0.19.1 `allocate_new_blocks` of each
    kind; P2, P8."""
    return KINDS[group.kind].extend(group, growth, held, found, new_blocks)


def count_reserved_blocks(
    config: Config,
    pool: Pool,
    group: KVGroup,
    num_slots: int,
    hit: Table,
    holding: Holding,
    num_copies: int = 0,
) -> int:
    """Return the free blocks of one group that a waiting request needs for `num_slots`, after its
    hit: while a window moves, skipped blocks become free again.

    Source: seed 001 "Full ISL reservation"; upstream #39734; P8, P10, P11.
    """
    num_blocks = compute_num_blocks(num_slots, group.block_size) + group.num_speculative_blocks
    num_at_once = count_held_at_most(config, group, num_slots)
    return count_lacking(pool, num_blocks, num_at_once, hit, holding, num_copies)
