"""Groups: KV groups of several kinds of attention, each with a table of its own.

`kinds` is what the kind of a group decides; `hits` is what is a hit in all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import prefix_cache, slots
from blockstep.spec.core.block_pool import Pool, give_up_blocks
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import (
    Frame,
    FrameRow,
    Holding,
    RequestState,
    list_rows_in_flight,
    without_nulls,
)
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Scheduled, Step
from blockstep.spec.features import common_prefix, full_isl
from blockstep.spec.features.groups import hits, kinds
from blockstep.spec.features.groups.invariants import INVARIANTS
from blockstep.spec.features.groups.kinds import KINDS, compute_num_skipped_blocks
from blockstep.spec.features.mamba import compute_num_certain
from blockstep.spec.vocabulary import NULL_BLOCK, Config, FrameId, KVGroup, RequestId

IN_DOUBT: Final = Part("num_unverified", 0)
"""The computed tokens of a row in flight that may have to be computed again."""


# Rows in flight.


def note_doubt(step: Step, row: Scheduled, frame_row: FrameRow) -> FrameRow:
    """Return a row of a frame with the number of its unverified tokens. Source: P14."""
    return IN_DOUBT.put(frame_row, step.state.rules[get_num_in_doubt](row))


def get_num_in_doubt(row: Scheduled) -> int:
    """Return the tokens of a row that may have to be computed again: its drafts.

    The window before them is kept. Source: P14.
    """
    return len(row.drafts)


def count_unverified(frames: Sequence[Frame], request_id: RequestId) -> int:
    """Return a request's computed tokens that frames in flight may roll back. Source: P14."""
    return sum([IN_DOUBT.of(row) for row in list_rows_in_flight(frames, request_id)])


# Skipped blocks.


def process_skipping(step: Step, pool: Pool, request: RequestState) -> tuple[Pool, RequestState]:
    """Return pool and request without the blocks to which no later token of it attends.

    Source: vLLM 0.19.1 `remove_skipped_blocks`; P8, P14.
    """
    # no-mutate clause: where nothing is computed, nothing is skipped
    if request.num_computed_tokens == 0:
        return pool, request
    config, rules, name = step.state.config, step.state.rules, request.request_id
    num_unverified = rules[count_unverified](step.state.frames, name)
    return skip_slots(config, pool, request, num_unverified, rules, step.get_fence(name))


def skip_slots(
    config: Config,
    pool: Pool,
    request: RequestState,
    num_unverified: int,
    rules: Rules,
    fence: FrameId | None = None,
) -> tuple[Pool, RequestState]:
    """Free the skipped blocks of a running request, to which no later token attends.

    This happens before the request asks for slots, and whether or not it gets them: those blocks
    are of no use to it. A null block takes the place of each, so that no other one moves; the last
    is queued first. `num_unverified` computed tokens are drafts in flight: if they are rejected,
    the request rolls back to the first of them, and reads the window before it. Frame `fence`, if
    given, still reads the blocks: they are free after its commit. Source: vLLM 0.19.1
    `remove_skipped_blocks`; P1, P8, P14."""
    holdings = [*request.holdings]
    num_left = 0
    for index, group in enumerate(config.groups):
        table = holdings[index].block_table
        num_certain = rules[compute_num_certain](group, request.num_computed_tokens, num_unverified)
        num_skipped = rules[count_skipped_blocks](group, holdings[index], num_certain)
        left = without_nulls(table[:num_skipped])
        if left:
            num_left += len(left)
            pool = give_up_blocks(pool, (left,), rules, fence)
            after = (NULL_BLOCK,) * num_skipped + table[num_skipped:]
            holdings[index] = Holding(after, holdings[index].num_cached_blocks)
    return pool, replace(request, holdings=tuple(holdings)) if num_left else request


def count_skipped_blocks(group: KVGroup, holding: Holding, num_certain: int) -> int:
    """Return the blocks of a table that are skipped and freed: the first ones. Source: P8."""
    return min(compute_num_skipped_blocks(group, num_certain), len(holding.block_table))


# Plans.


def get_num_common_prefix_blocks(step: Step) -> tuple[int, ...]:
    """Return, per group, the leading blocks that all running requests share, where the attention to
    them is computed once. Source: vLLM 0.19.1 `get_num_common_prefix_blocks`; P26.
    """
    groups, counts = step.state.config.groups, common_prefix.get_num_common_prefix_blocks(step)
    pairs = zip(groups, counts, strict=True)
    return tuple([num if KINDS[group.kind].has_common_prefix else 0 for group, num in pairs])


def has_groups(config: Config) -> bool:
    """Whether there are KV groups. Source: architecture D13."""
    return bool(config.groups)


FEATURE: Final = Feature(
    "groups",
    has_groups,
    Hooks(skips=(process_skipping,), rows=(note_doubt,)),
    instead={
        slots.get_num_slots_of: kinds.get_num_slots_of,
        slots.count_held_at_most: kinds.count_held_at_most,
        slots.count_taken: kinds.count_taken,
        slots.get_extended_table: kinds.get_extended_table,
        full_isl.count_reserved_blocks: kinds.count_reserved_blocks,
        prefix_cache.find_hit: hits.get_joint_hit,
        common_prefix.get_num_common_prefix_blocks: get_num_common_prefix_blocks,
    },
    invariants=INVARIANTS,
)
