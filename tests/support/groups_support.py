"""KV groups, and which token attends to which: by the words of each kind, without arithmetic."""

from __future__ import annotations

from blockstep.spec.vocabulary import GroupKind, KVGroup, MambaCacheMode

FULL, WINDOW, CHUNK = GroupKind.FULL, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL
RECURRENT = GroupKind.RECURRENT
NONE, ALL, ALIGN = MambaCacheMode.NONE, MambaCacheMode.ALL, MambaCacheMode.ALIGN


def full(block_size: int) -> KVGroup:
    return KVGroup(FULL, block_size)


def window(block_size: int, num_tokens: int) -> KVGroup:
    return KVGroup(WINDOW, block_size, sliding_window=num_tokens)


def chunks(block_size: int, num_tokens: int) -> KVGroup:
    return KVGroup(CHUNK, block_size, attention_chunk_size=num_tokens)


def recurrent(block_size: int, mode: MambaCacheMode = ALIGN, num_speculative: int = 0) -> KVGroup:
    return KVGroup(
        RECURRENT, block_size, mamba_cache_mode=mode, num_speculative_blocks=num_speculative
    )


def attends(group: KVGroup, reader: int, position: int) -> bool:
    """Whether the token at `reader` attends to the one at `position`."""
    if position > reader:
        return False
    if group.kind is WINDOW:
        return reader - position < group.sliding_window
    if group.kind is CHUNK:
        size = group.attention_chunk_size
        return reader // size == position // size
    return True
