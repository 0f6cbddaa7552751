"""Seeded bugs in KV groups: block tables, windows, chunks and hits that are valid in all groups.

Their episodes have several KV groups, but recurrent ones only on the page `STATES`; all other
seeded bugs have one group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import NULL_BLOCK

PAGE = Page(takes_groups=True)
STATES = Page(takes_groups=True, takes_states=True)
"""Seeded bugs in recurrent groups; their episodes have such groups as well."""
PART = "groups_type"


class GroupByGroup(Defect):
    """Hits are touched and blocks allocated one group after the other."""

    def adopt(self, holdings: Any, hits: Any) -> None:
        self._hits = hits.tables if hits.shared() else None
        if self._hits is None:
            super().adopt(holdings, hits)

    def take(self, holdings: Any, extent: Any) -> Any:
        hits, self._hits = getattr(self, "_hits", None), None
        if hits is None:
            return super().take(holdings, extent)
        tables: list[Any] = [()] * len(holdings)
        for index in self._in_turn(range(len(holdings))):
            holding, table = holdings[index], hits[index]
            self.pool.touch([block for block in table if block != NULL_BLOCK])
            holding.blocks += table
            holding.num_cached, holding.num_left = len(table), table.count(NULL_BLOCK)
            tables[index] = self.groups[index].extend(holding, extent, self.pool)
        return tuple(tables)

    def _in_turn(self, indices: Any) -> Any:
        return indices


@PAGE.exhibit(
    "a group takes new blocks before the hits of the next group are touched",
    "#33775, #44409; ascend #12139",
    "P2 P1 P8 P16",
    part=PART,
)
class GroupEatsAHit(GroupByGroup):
    """A new block may be a hit of the next group; then both groups use it."""


@PAGE.exhibit(
    "the groups allocate in reverse order",
    "#33775",
    "P2 P1 P8 P16",
    part=PART,
    wrong_fix_of="group-eats-a-hit",
)
class LastGroupFirst(GroupByGroup):
    """Now the first groups lose their hits."""

    def _in_turn(self, indices: Any) -> Any:
        return reversed(indices)


@PAGE.exhibit(
    "full attention allocates first, the other groups one by one",
    "#33775",
    "P2 P1 P8 P16",
    part=PART,
    wrong_fix_of="group-eats-a-hit",
)
class FullAttentionFirst(GroupByGroup):
    """If there are two window groups, one still takes a hit of the other."""

    def _in_turn(self, indices: Any) -> Any:
        return sorted(indices, key=lambda index: not self.groups[index].is_whole)


@PAGE.exhibit(
    "the admission check charges a sliding window for the whole prompt",
    "#39734, #40946",
    "P15 P11",
    part=PART,
)
class WindowChargedWhole(Defect):
    """A prompt that could run in chunks is never admitted."""

    def count_for_gate(self, hits: Any, num_known: int) -> int:
        needed: int = self.pool.count_free(hits.shared())
        for group, shared in zip(self.groups, hits.tables, strict=True):
            needed += group.count_blocks(num_known) - len(shared)
        return needed


@PAGE.exhibit(
    "the admission check charges nothing for a sliding window",
    "#39734",
    "P8",
    part=PART,
    wrong_fix_of="window-charged-whole",
    invisible="efficiency: there are more preemptions, but all requests finish",
)
class WindowNotCharged(Defect):
    """Blocks for the window and for the tokens of a step are missing when they are needed."""

    def count_for_gate(self, hits: Any, num_known: int) -> int:
        needed = 0
        for group, shared in zip(self.groups, hits.tables, strict=True):
            if group.is_whole:
                free = self.pool.count_free(shared)
                needed += group.count_blocks(num_known) - len(shared) + free
        return needed


@PAGE.exhibit(
    "a sliding window is charged without the tokens of a step",
    "#39734, #40946",
    "P11 P10 P8",
    part=PART,
    wrong_fix_of="window-charged-whole",
)
class WindowWithoutItsStep(Defect):
    """A request is accepted although the blocks of its largest step exceed the pool."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            group.reach = 1


@PAGE.exhibit(
    "freed blocks of a sliding window count as held",
    "#39734, #50169",
    "P26 P8 P2 P1",
    part=PART,
    wrong_fix_of="window-charged-whole",
)
class NullsCountAsHeld(Defect):
    """The check caps a window's blocks, but also counts the null blocks of its table as held."""

    def count_missing(self, holdings: Any, extent: Any) -> int:
        missing = 0
        for group, holding in zip(self.groups, holdings, strict=True):
            num_slots = extent.num_slots
            due = min(group.count_blocks(num_slots), group.count_held(num_slots))
            missing += max(due - len(holding.blocks), 0)
        return missing

    def take(self, holdings: Any, extent: Any) -> Any:
        tables = []
        for group, holding in zip(self.groups, holdings, strict=True):
            missing = min(group.count_missing(holding, extent), self.pool.num_free)
            tables.append(tuple(self.pool.take(missing)))
            holding.blocks += tables[-1]
        return tuple(tables)

    def publish(self, holdings: Any, lineage: Any, num_computed: int, num_written: int) -> None:
        pairs = zip(self.groups, holdings, strict=True)
        num_slots = min(group.block_size * len(holding.blocks) for group, holding in pairs)
        super().publish(holdings, lineage, num_computed, min(num_written, num_slots))


@PAGE.exhibit(
    "a request is accepted if each KV group alone fits the pool",
    "#52520, #39734; local-inference-lab #394",
    "P11 P10",
    part=PART,
)
class EachGroupFitsAlone(Defect):
    """The accepted request waits for blocks that the pool does not have, and blocks the queue."""

    def count_most(self, num_slots: int) -> int:
        return max(int(group.count_held(num_slots)) for group in self.groups)


@PAGE.exhibit(
    "only the first KV group decides whether a request is accepted",
    "#52520",
    "P11 P10",
    part=PART,
    wrong_fix_of="each-group-fits-alone",
)
class FirstGroupDecides(Defect):
    """This is right only if the first group needs the most blocks."""

    def count_most(self, num_slots: int) -> int:
        return len(self.groups) * int(self.groups[0].count_held(num_slots))


@PAGE.exhibit(
    "the hit drop for the draft head is applied once per KV group",
    "#32802; vLLM 0.19.1",
    "P5",
    part=PART,
    invisible="efficiency: blocks are computed again",
)
class HitCutByTurns(Defect):
    """The hit loses one block for each group with an EAGLE head, instead of one for all."""

    def find_hits(self, lineage: Any, num_known: int) -> Any:
        hits = super().find_hits(lineage, num_known)
        for _ in self.groups[1:] if self.num_dropped else ():
            hits = super().find_hits(lineage, hits.num_tokens + 1)
        return hits


@PAGE.exhibit(
    "a hit of full attention is taken as valid for all KV groups",
    "rule P5; #44409",
    "P5 P3 P4",
    part=PART,
)
class HitOfFullAttention(Defect):
    """Blocks that a sliding window still reads are missing and replaced by null blocks."""

    def _shorten(self, _group: Any, _lineage: Any, length: int) -> int:
        return length

    def _collect(self, lineage: Any, length: int) -> Any:
        tables = []
        for group in self.groups:
            first, end = group.first_block(length), length // group.block_size
            found = [self._find(group, lineage, index) for index in range(first, end)]
            tables.append((NULL_BLOCK,) * first + tuple(block or NULL_BLOCK for block in found))
        return type(self.no_hits)(length, tuple(tables))


@PAGE.exhibit(
    "a sliding window advances as if all drafts in flight were accepted",
    "vLLM 0.19.1, found here",
    "P14 P3 P5 P2",
    part=PART,
)
class DoubtForgotten(Defect):
    """If they are rejected, the request reads blocks that it has freed."""

    def leave(self, holdings: Any, num_computed: int, _in_doubt: int, free: Any = None) -> None:
        super().leave(holdings, num_computed, 0, free)


@PAGE.exhibit(
    "null blocks are freed with the table",
    "rule P1: the null block is never free",
    "P1",
    part=PART,
    invisible_if_hidden="books: the ref count of the null block is not used",
)
class NullsFreed(Defect):
    """The ref count of the null block becomes negative."""

    def free(self, holdings: Any) -> None:
        for holding in holdings:
            self.pool.free(holding.blocks)
            holding.clear()


@PAGE.exhibit(
    "block keys do not contain the KV group",
    "vLLM 0.19.1 make_block_hash_with_group_id, rule",
    "P6 P3 P5",
    part=PART,
)
class GroupLeftOutOfKeys(Defect):
    """A group hits blocks of another group, whose KV is of other layers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            group.number = 0


@PAGE.exhibit(
    "a block is freed while a part of it is still read",
    "vLLM 0.19.1, found here",
    "P3 P5",
    part=PART,
)
class HalfABlockLeft(Defect):
    """A window begins within a block, and so may a chunk of chunked-local attention."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            group.first_block = partial(_first_block_rounded_up, group)


def _first_block_rounded_up(group: Any, num_computed: int) -> int:
    first_read = num_computed - group.count_read(num_computed)
    return int(-(-first_read // group.block_size))


# Recurrent states.


@STATES.exhibit(
    "a chunk is cut to a multiple of the state block, even to zero tokens",
    "#40707, #45414, #51603",
    "P10 P15",
    part=PART,
)
class ChunkCutToNothing(Defect):
    """The request never progresses if a budget or threshold is smaller than the block."""

    def align(self, num_computed: int, num_scheduled: int, num_prompt: int, num_known: int) -> int:
        end = num_computed + num_scheduled
        is_prompt = num_computed < max(num_prompt, num_known - 1)
        if self._aligned_sizes and is_prompt and end < self._floor(num_known - self.num_dropped):
            return max(int(self._floor(end)) - num_computed, 0)
        return int(super().align(num_computed, num_scheduled, num_prompt, num_known))


@STATES.exhibit(
    "a chunk that would be cut to zero tokens runs to the next block boundary",
    "#51582, #47771",
    "P9 P15",
    part=PART,
    wrong_fix_of="chunk-cut-to-nothing",
)
class ChunkRunOn(Defect):
    """The request progresses, but exceeds the token budget of the step."""

    def align(self, num_computed: int, num_scheduled: int, num_prompt: int, num_known: int) -> int:
        end = num_computed + num_scheduled
        is_prompt = num_computed < max(num_prompt, num_known - 1)
        if self._aligned_sizes and is_prompt and end < self._floor(num_known - self.num_dropped):
            following = int(self._floor(num_computed)) + int(self.unit)
            return max(int(self._floor(end)), following) - num_computed
        return int(super().align(num_computed, num_scheduled, num_prompt, num_known))


@STATES.exhibit(
    "an admission is charged one state block, but also takes those for drafts",
    "#46892; ascend #11129",
    "P8 P1 P2 P12",
    part=PART,
)
class StatesChargedOnce(Defect):
    """The blocks for the draft states are missing, or belong to another request."""

    def count_to_admit(self, hits: Any, extent: Any, num_beside: int) -> int:
        needed = int(super().count_to_admit(hits, extent, num_beside))
        return needed - int(sum(group.num_spare for group in self.groups if group.is_aligned))


@STATES.exhibit(
    "an admission is charged one state block per block of tokens",
    "#46892",
    "P15 P11 P10",
    part=PART,
    wrong_fix_of="states-charged-once",
)
class StatesChargedByTokens(Defect):
    """A chunk writes one state however long it is, so requests that would fit have to wait."""

    def count_to_admit(self, hits: Any, extent: Any, num_beside: int) -> int:
        needed = int(super().count_to_admit(hits, extent, num_beside))
        for group, shared in self._list_aligned(hits):
            needed += max(group.count_blocks(extent.num_tokens) - len(shared) - 1, group.num_spare)
            needed -= group.num_spare
        return needed

    def count_for_gate(self, hits: Any, num_known: int) -> int:
        needed = int(super().count_for_gate(hits, num_known))
        for group, shared in self._list_aligned(hits):
            whole = group.count_blocks(num_known) - len(shared) + self.pool.count_free(shared)
            needed += max(whole - group.count_held(num_known), 0)
        return needed

    def _list_aligned(self, hits: Any) -> Any:
        pairs = zip(self.groups, hits.tables, strict=True)
        return [(group, shared) for group, shared in pairs if group.is_aligned]


@STATES.exhibit(
    "a recurrent state is hit in the step that computes it",
    "#56525; vLLM 0.19.1, rule",
    "P4 P5",
    part=PART,
)
class StateHitWithinItsStep(Defect):
    """Rows of one step run in parallel, so the state is not written yet."""

    def publish(self, holdings: Any, lineage: Any, num_computed: int, num_written: int) -> None:
        super().publish(holdings, lineage, num_computed, num_written)
        self.new_states.clear()
