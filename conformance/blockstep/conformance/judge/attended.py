"""Attended: which tokens a token attends to, by the kind of attention of its KV-cache group.

    | not attended any more |       attended       |        from a token at `position` on
    0                     first                 position

All that the judges know of a kind stands here. They ask nobody else: what a scheduler thinks of it
is what they judge.
"""

from __future__ import annotations

from typing import assert_never

from blockstep.spec.vocabulary import GroupKind, KVGroup


def first_attended(group: KVGroup, position: int) -> int:
    """The first position that a token at `position`, or any behind it, attends to."""
    match group.kind:
        case GroupKind.FULL:
            return 0
        case GroupKind.SLIDING_WINDOW:
            return max(position - (group.sliding_window - 1), 0)
        case GroupKind.CHUNKED_LOCAL:
            return position - position % group.attention_chunk_size
        case _:
            assert_never(group.kind)


def count_unattended(group: KVGroup, position: int) -> int:
    """Leading blocks of a table that no token from `position` on attends to."""
    return first_attended(group, position) // group.block_size
