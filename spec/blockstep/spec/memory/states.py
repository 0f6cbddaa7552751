"""States: the blocks of a recurrent group, and how its table grows.

    |  left  | last | skipped |  running  | behind drafts |        a chunk, `align`
    |  null  | read |  null   |  written  | one for each  |
    |  left  | last |      written        | behind drafts |        a chunk, `all`

The key of a block is that of its end, and the block holds the state there; the last block with
known tokens holds the state after the last computed token. A row reads the state after the token
before it, and writes the state after its last known token into the block of that token; the state
after its n-th draft goes n blocks further. A step that is planned later runs later, so a state that
a frame in flight writes is there for the next.
"""

from __future__ import annotations

from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, GroupKind, KVGroup, MambaCacheMode


def compute_num_state_blocks(group: KVGroup, num_tokens: int, num_slots: int) -> int:
    """Return the table length after a step that ends at `num_tokens`, with lookahead at
    `num_slots`.

    A proposer has no states, so its lookahead needs none; but only `align` counts blocks without
    it. Source: vLLM 0.19.1 `MambaManager.allocate_new_blocks`; P8.
    """
    is_aligned = group.mamba_cache_mode is MambaCacheMode.ALIGN
    num_ahead = num_tokens if is_aligned else num_slots
    return -(-num_ahead // group.block_size) + group.num_speculative_blocks


def compute_num_new_states(
    group: KVGroup, num_blocks: int, num_held: int, num_hit: int, is_loaded: bool = False
) -> int:
    """Return the blocks to take for a table of `num_blocks`, of which `num_held` or `num_hit` are
    there.

    With `align` a chunk writes one state, however long it is, and those after drafts, whose blocks
    are taken at the start; a state that a store loads (`is_loaded`) has a block of its own, unless
    the chunk ends in that block. Upstream counts one block for two (#46892), and fails if
    rejected drafts have left more than enough. Source: vLLM 0.19.1
    `MambaManager.get_num_blocks_to_allocate`; P8.
    """
    num_missing = max(num_blocks - num_held - num_hit, 0)
    if group.mamba_cache_mode is not MambaCacheMode.ALIGN:
        return num_missing
    num_written = 1 if num_held else 1 + group.num_speculative_blocks
    return min(num_missing, num_written + is_loaded)


def get_extended_states(
    group: KVGroup,
    table: tuple[BlockId, ...],
    is_running: bool,
    num_blocks: int,
    new_blocks: tuple[BlockId, ...],
    is_loaded: bool = False,
) -> tuple[BlockId, ...]:
    """Return a table extended to `num_blocks`; `is_running`: it ends in blocks for drafts.

    With `align`, blocks for drafts that are now before the block to be written are moved after it,
    and null blocks fill the gap. If a store loads the state that the table ends in (`is_loaded`),
    the first new block is for that state, before the gap. Source: vLLM 0.19.1
    `MambaManager.allocate_new_blocks`; P2, P8.
    """
    if group.mamba_cache_mode is not MambaCacheMode.ALIGN or not new_blocks:
        return table + new_blocks
    if is_loaded:
        table, new_blocks = table + new_blocks[:1], new_blocks[1:]
    num_kept = len(table) - group.num_speculative_blocks * is_running
    gap = num_blocks - 1 - group.num_speculative_blocks - num_kept
    of_drafts = table[num_kept:]
    moved = (NULL_BLOCK,) * gap + of_drafts[gap:] + of_drafts[:gap]
    return table[:num_kept] + moved + new_blocks


def compute_num_certain(group: KVGroup, num_computed: int, num_in_doubt: int) -> int:
    """Return the computed tokens that are certain for a group, with `num_in_doubt` drafts in
    flight.

    A recurrent group subtracts at least its number of states after drafts: a boundary among drafts
    that were accepted just now is published before its block is skipped. Source: vLLM 0.19.1
    `MambaManager.remove_skipped_blocks`; P14.
    """
    if group.kind is GroupKind.RECURRENT:
        num_in_doubt = max(num_in_doubt, group.num_speculative_blocks)
    return max(num_computed - num_in_doubt, 0)


def compute_max_held_states(group: KVGroup, num_all: int, max_reach: int, max_doubt: int) -> int:
    """Return the most blocks that a request holds of a recurrent group, if its tokens fill
    `num_all`.

    Source: vLLM 0.19.1 `MambaSpec.max_memory_usage_bytes`, which forgets that a step with drafts
    may touch one block more; P8, P11.
    """
    size, num_speculative = group.block_size, group.num_speculative_blocks
    num_behind = 1 + max(num_speculative, max_doubt)
    match group.mamba_cache_mode:
        case MambaCacheMode.NONE:
            num_touched = num_all
        case MambaCacheMode.ALL:
            num_touched = -(-(size - 1 + num_behind + max_reach - max_doubt) // size)
        case MambaCacheMode.ALIGN:
            num_touched = -(-(size - 1 + num_behind + 1 + num_speculative) // size)
    return min(num_all, num_touched) + num_speculative
