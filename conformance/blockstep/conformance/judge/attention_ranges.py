"""Attended: the tokens that a token attends to, by the kind of attention of its KV group.

    |    skipped tokens     |       attended       |        from a token at `position` on
    0                     first                 position

All that the judges know of a kind is here. They do not ask the scheduler, which is under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from blockstep.spec import vocabulary as v


def first_attended(group: v.KVGroup, position: int) -> int:
    """The first position that a token at `position`, or any later one, attends to.

    A recurrent layer continues from the state after the token before.
    """
    match group.kind:
        case v.GroupKind.FULL:
            return 0
        case v.GroupKind.SLIDING_WINDOW:
            return max(position - (group.sliding_window - 1), 0)
        case v.GroupKind.CHUNKED_LOCAL:
            return position - position % group.attention_chunk_size
        case v.GroupKind.RECURRENT:
            return max(position - 1, 0)
        case v.GroupKind.CROSS_ATTENTION:
            return 0  # all embeddings of the encoder are attended
        case _:
            assert_never(group.kind)


def most_attended_before(group: v.KVGroup) -> int | None:
    """The most tokens before a token whose blocks are held; None if all are."""
    match group.kind:
        case v.GroupKind.FULL:
            return None
        case v.GroupKind.SLIDING_WINDOW:
            return group.sliding_window - 1
        case v.GroupKind.CHUNKED_LOCAL:
            return group.attention_chunk_size - 1
        case v.GroupKind.RECURRENT:
            return 1 + 2 * group.num_speculative_blocks
        case v.GroupKind.CROSS_ATTENTION:
            return None
        case _:
            assert_never(group.kind)


def count_unattended(group: v.KVGroup, position: int) -> int:
    """Leading blocks of a table that no token from `position` on attends to."""
    return first_attended(group, position) // group.block_size


def without_given_back(
    planned: Sequence[v.BlockId], shown: Sequence[v.BlockId]
) -> tuple[v.BlockId, ...]:
    """A table from plans, with the null blocks of a state, since no plan shows skipped blocks."""
    if v.NULL_BLOCK not in shown:
        return tuple(planned)
    nulls = {index for index, block in enumerate(shown) if block == v.NULL_BLOCK}
    return tuple([v.NULL_BLOCK if index in nulls else block for index, block in enumerate(planned)])


def is_recurrent(group: v.KVGroup) -> bool:
    """Whether a block holds a state, and not the KV of tokens."""
    return group.kind is v.GroupKind.RECURRENT


def is_across(group: v.KVGroup) -> bool:
    """Whether a table holds the encoder's embeddings of the request's items."""
    return group.kind is v.GroupKind.CROSS_ATTENTION


def count_across(config: v.Config, request: v.Request) -> int:
    """Slots of a request in each cross-attention table: one per embedding."""
    if not config.is_encoder_decoder:
        return 0
    return sum([item.num_embeds for item in request.items])


def slots_of(group: v.KVGroup, num_tokens: int, num_across: int) -> int:
    """Slots that a table of a group must have for `num_tokens`, or for `num_across` embeddings."""
    return num_across if is_across(group) else num_tokens


def is_aligned(config: v.Config) -> bool:
    """Whether chunks of prompts end where states are kept, so that a row may run less than fits."""
    return any(group.mamba_cache_mode is v.MambaCacheMode.ALIGN for group in config.groups)


def blocks_of_drafts(group: v.KVGroup, table: Sequence[v.BlockId]) -> Sequence[v.BlockId]:
    """The last blocks of a table, which hold the states after drafts and move with its end."""
    num_kept = len(table) - group.num_speculative_blocks
    return table[max(num_kept, 0) :]
