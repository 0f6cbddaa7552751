"""Mamba: groups of recurrent states, the blocks that hold them, and how their tables grow.

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

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Final, TypeAlias

from blockstep.spec.copies import replace
from blockstep.spec.core import admission
from blockstep.spec.core.block_pool import Pool, withdraw_blocks
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Note
from blockstep.spec.core.requests import FrameRow, Hit, RequestState, without_nulls
from blockstep.spec.core.slots import Growth
from blockstep.spec.core.work import Scheduled, Step
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockId,
    BlockTables,
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    Plan,
    RequestId,
)

Table: TypeAlias = tuple[BlockId, ...]


# Tables.


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
    the chunk ends in that block. Rejected drafts may have left more than enough. Source: vLLM
    0.19.1 `MambaManager.get_num_blocks_to_allocate`; upstream #46892; P8.
    """
    num_missing = max(num_blocks - num_held - num_hit, 0)
    if group.mamba_cache_mode is not MambaCacheMode.ALIGN:
        return num_missing
    num_written = 1 if num_held else 1 + group.num_speculative_blocks
    return min(num_missing, num_written + is_loaded)


def take_states(group: KVGroup, growth: Growth, num_held: int, num_hit: int) -> int:
    """Return the blocks that a recurrent group takes from the queue in a step. Source: P8."""
    num_blocks = compute_num_state_blocks(group, growth.num_tokens, growth.num_slots)
    return compute_num_new_states(group, num_blocks, num_held, num_hit, growth.is_pending)


def extend_states(group: KVGroup, growth: Growth, held: Table, found: Table, new: Table) -> Table:
    """Return the table of a recurrent group after a step. Source: P2, P8."""
    num_blocks = compute_num_state_blocks(group, growth.num_tokens, growth.num_slots)
    is_begun = bool(held)
    return get_extended_states(group, held + found, is_begun, num_blocks, new, growth.is_pending)


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


def compute_num_certain(group: KVGroup, num_computed: int, num_unverified: int) -> int:
    """Return the computed tokens that are certain for a group, with `num_unverified` drafts in
    flight.

    A recurrent group subtracts at least its number of states after drafts: a boundary among drafts
    that were accepted just now is published before its block is skipped. Source: vLLM 0.19.1
    `MambaManager.remove_skipped_blocks`; P14.
    """
    if group.kind is GroupKind.RECURRENT:
        num_unverified = max(num_unverified, group.num_speculative_blocks)
    return max(num_computed - num_unverified, 0)


def compute_max_held_states(group: KVGroup, num_all: int, max_reach: int, max_doubt: int) -> int:
    """Return the most blocks that a request holds of a recurrent group, if its tokens fill
    `num_all`.

    Source: vLLM 0.19.1 `MambaSpec.max_memory_usage_bytes`; P8, P11.
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


# The end of a chunk.


def limit_to_states(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
    """Return the tokens of a row up to a boundary of states. Source: P5, P10."""
    get_share = step.state.rules[get_aligned_share]
    return get_share(step.state.config, request, num_computed, num_new)


def get_aligned_share(
    config: Config, request: RequestState, num_computed: int, num_new: int
) -> int:
    """Return the tokens of a row after cutting its prompt at boundaries of states. Source: P5,
    P10."""
    groups = config.groups
    aligned = [g.block_size for g in groups if g.mamba_cache_mode is MambaCacheMode.ALIGN]
    num_prompt, num_known = len(request.request.prompt_token_ids), request.num_known_tokens
    # From there on it decodes, or continues until it does after a resume.
    if not aligned or num_new <= 0 or num_computed >= max(num_prompt, num_known - 1):
        return num_new
    attended = [g.block_size for g in groups if g.kind is not GroupKind.RECURRENT]
    num_behind = max(attended, default=0) if config.drops_last_hit_block else 0
    end, unit = num_computed + num_new, lcm(*config.block_sizes)
    last = max(num_known - num_behind, 0) // unit * unit
    return compute_aligned_end(num_computed, end, last, unit, aligned) - num_computed


def compute_aligned_end(
    num_computed: int, end: int, last: int, unit: int, block_sizes: Sequence[int]
) -> int:
    """Return the end of a chunk that could reach `end`, moved to a boundary at which its recurrent
    state is saved.

    `last` is the last boundary that a later request could hit; such boundaries are `unit` apart. Up
    to there a chunk is whole units. If less than one unit is possible, the chunk is as long as it
    can be, and the next chunks go up to the end of the block: none continues a block of
    `block_sizes` past its end. Source: vLLM 0.19.1 `_mamba_block_aligned_split`; upstream #40707;
    P3, P10.
    """
    block_ends = [-(-num_computed // size) * size for size in block_sizes if num_computed % size]
    if block_ends:
        return min(end, *block_ends)
    if num_computed < last < end:
        return last
    rounded = end // unit * unit
    return rounded if end < last and rounded > num_computed else end


# Blocks to zero.

HAD: Final = Note[Mapping[RequestId, BlockTables]]("had", {})
"""The tables of requests that the step admits, without the blocks that they take."""


def add_zeroed_blocks(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the blocks to be zeroed. Source: upstream #48481; P3."""
    return replace(plan, new_block_ids_to_zero=get_blocks_to_zero(step))


def note_had(step: Step, request: RequestState, after: RequestState, hit: Hit) -> None:
    """Note the tables that an admitted request has before it takes blocks: its own, or its hit.

    Source: vLLM 0.19.1 `take_new_block_ids`; P3.
    """
    del after
    had = request.block_tables if request.num_computed_tokens else hit.block_tables
    HAD.set(step, {**HAD.of(step), request.request_id: had})


def get_blocks_to_zero(step: Step) -> tuple[BlockId, ...]:
    """Return blocks that the step newly takes for attention from a pool with recurrent groups.

    By group, in the order of the rows, without hit blocks and blocks of an asynchronous load: the
    worker and the store are not ordered. Source: vLLM 0.19.1 `take_new_block_ids`; upstream #48481;
    P3, P17.
    """
    groups, rules = step.state.config.groups, step.state.rules
    if not step.state.config.has_states:
        return ()
    taken: list[BlockId] = []
    rows = rules[list_zeroed_rows](step)
    for index, group in enumerate(groups):
        if not rules[is_zeroed](group):
            continue
        for row in rows:
            had = HAD.of(step).get(row.request_id)
            taken += row.new_blocks[index][len(had[index]) if had else 0 :]
    return tuple(taken)


def list_zeroed_rows(step: Step) -> list[Scheduled]:
    """Return the rows whose new blocks are zeroed: those that run in the step. Source: P17, P26."""
    return step.rows


def is_zeroed(group: KVGroup) -> bool:
    """Whether a group's new blocks are zeroed in a pool with recurrent groups: if it holds KV.

    Source: vLLM 0.19.1 `take_new_block_ids`; upstream #48481; P3.
    """
    return group.kind is not GroupKind.RECURRENT


# Hits.


def get_findable_pool(step: Step) -> Pool:
    """Return the pool in which hits are looked for: without states that this very step writes.

    Source: upstream #56525; P4, P15.
    """
    unwritten = get_unwritten_states(step)
    return withdraw_blocks(step.pool, unwritten) if unwritten else step.pool


def get_unwritten_states(step: Step) -> list[BlockId]:
    """Return the state blocks that this very step writes: they are excluded from prefix hits.

    KV of a layer is written before any row reads it, but states are read first. States of frames in
    flight are there, because those frames run before. A request that would hit one takes a shorter
    hit. Source: vLLM 0.19.1 `cached_blocks_this_step`; upstream #56525; P4, P15.
    """
    unwritten: list[BlockId] = []
    for index, group in enumerate(step.state.config.groups):
        if group.kind is not GroupKind.RECURRENT:
            continue
        for row in step.rows:
            table = step.requests[row.request_id].block_tables[index]
            unwritten += without_nulls(table[row.num_computed // group.block_size :])
    return unwritten


def has_states(config: Config) -> bool:
    """Whether there are recurrent groups. Source: architecture D13."""
    return config.has_states


FEATURE: Final = Feature(
    "mamba",
    has_states,
    Hooks(admits=(note_had,), limits=(limit_to_states,), fields=(add_zeroed_blocks,)),
    instead={admission.get_findable_pool: get_findable_pool},
)
