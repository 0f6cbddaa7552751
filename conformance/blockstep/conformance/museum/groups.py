"""Groups: several tables a request, windows and chunks, and one hit that is right for all of them.

These are given configs with several KV groups, as the host is, but for recurrent ones, of which
they know nothing; all other exhibits have one group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import NULL_BLOCK

PAGE = Page(takes_groups=True)
STATES = Page(takes_groups=True, takes_states=True)
"""Of recurrent groups: these are given them as well."""
PART = "groups_type"


class GroupByGroup(Defect):
    """Hits are held, and blocks taken, of one group after the other."""

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
    "a group takes new blocks before the next one holds its hits",
    "#33775, #44409; ascend #12139",
    "P2 P1 P8 P16",
    part=PART,
)
class GroupEatsAHit(GroupByGroup):
    """The block taken may be a hit of the next group, and is then of both."""


@PAGE.exhibit(
    "the groups are served in the other order",
    "#33775",
    "P2 P1 P8 P16",
    part=PART,
    wrong_fix_of="group-eats-a-hit",
)
class LastGroupFirst(GroupByGroup):
    """Now it is the hits of the first ones that are eaten."""

    def _in_turn(self, indices: Any) -> Any:
        return reversed(indices)


@PAGE.exhibit(
    "full attention is served first, and the others one by one",
    "#33775",
    "P2 P1 P8 P16",
    part=PART,
    wrong_fix_of="group-eats-a-hit",
)
class FullAttentionFirst(GroupByGroup):
    """Of two windows one still eats the hits of the other."""

    def _in_turn(self, indices: Any) -> Any:
        return sorted(indices, key=lambda index: not self.groups[index].is_whole)


@PAGE.exhibit("the gate charges a window the whole prompt", "#39734, #40946", "P15 P11", part=PART)
class WindowChargedWhole(Defect):
    """A prompt that could be served in chunks is never let in."""

    def count_for_gate(self, hits: Any, num_known: int) -> int:
        needed: int = self.pool.count_free(hits.shared())
        for group, shared in zip(self.groups, hits.tables, strict=True):
            needed += group.count_blocks(num_known) - len(shared)
        return needed


@PAGE.exhibit(
    "the gate charges a window nothing",
    "#39734",
    "P8",
    part=PART,
    wrong_fix_of="window-charged-whole",
    invisible="efficiency: there are more preemptions, and all requests end",
)
class WindowNotCharged(Defect):
    """What a window and a step touch is not there when it is wanted."""

    def count_for_gate(self, hits: Any, num_known: int) -> int:
        needed = 0
        for group, shared in zip(self.groups, hits.tables, strict=True):
            if group.is_whole:
                free = self.pool.count_free(shared)
                needed += group.count_blocks(num_known) - len(shared) + free
        return needed


@PAGE.exhibit(
    "a window is charged itself, and not the step that moves it",
    "#39734, #40946",
    "P11 P10 P8",
    part=PART,
    wrong_fix_of="window-charged-whole",
)
class WindowWithoutItsStep(Defect):
    """Requests are accepted that the empty pool cannot hold for one step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            group.reach = 1


@PAGE.exhibit(
    "blocks that a window gave back count as held",
    "#39734, #50169",
    "P26 P8 P2 P1",
    part=PART,
    wrong_fix_of="window-charged-whole",
)
class NullsCountAsHeld(Defect):
    """The check caps what a window needs, and takes off places of its table that are null."""

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
    "a request is servable if each group fits alone",
    "#52520, #39734; local-inference-lab #394",
    "P11 P10",
    part=PART,
)
class EachGroupFitsAlone(Defect):
    """It is accepted, waits for blocks that there are not, and all others behind it."""

    def count_most(self, num_slots: int) -> int:
        return max(int(group.count_held(num_slots)) for group in self.groups)


@PAGE.exhibit(
    "only the first group says whether a request is servable",
    "#52520",
    "P11 P10",
    part=PART,
    wrong_fix_of="each-group-fits-alone",
)
class FirstGroupDecides(Defect):
    """Right as long as the first is the largest, and pays for all."""

    def count_most(self, num_slots: int) -> int:
        return len(self.groups) * int(self.groups[0].count_held(num_slots))


@PAGE.exhibit(
    "every kind of attention gives back a block of the hit",
    "#32802; vLLM 0.19.1",
    "P5",
    part=PART,
    invisible="efficiency: blocks are computed again",
)
class HitCutByTurns(Defect):
    """With a draft head a hit is a block shorter for each group, not for all."""

    def find_hits(self, lineage: Any, num_known: int) -> Any:
        hits = super().find_hits(lineage, num_known)
        for _ in self.groups[1:] if self.num_dropped else ():
            hits = super().find_hits(lineage, hits.num_tokens + 1)
        return hits


@PAGE.exhibit(
    "a hit of full attention is one of all groups",
    "rule P5; #44409",
    "P5 P3 P4",
    part=PART,
)
class HitOfFullAttention(Defect):
    """Of what a window still reads some is not there, and is null."""

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
    "a window is cut a token short", "vLLM 0.19.1 get_num_skipped_tokens, rule", "P3 P5", part=PART
)
class WindowCutShort(Defect):
    """The last token in reach may be in a block that was just given back."""

    def leave(self, holdings: Any, num_computed: int, in_doubt: int, free: Any = None) -> None:
        super().leave(holdings, num_computed + 1, in_doubt, free)


@PAGE.exhibit(
    "a window moves on as if all drafts in flight were accepted",
    "vLLM 0.19.1, found here",
    "P14 P3 P5 P2",
    part=PART,
)
class DoubtForgotten(Defect):
    """Rejected, the request goes on further back, and reads what it has given up."""

    def leave(self, holdings: Any, num_computed: int, _in_doubt: int, free: Any = None) -> None:
        super().leave(holdings, num_computed, 0, free)


@PAGE.exhibit(
    "null blocks are freed with the table",
    "rule P1: the null block is never free",
    "P1",
    part=PART,
    invisible_if_hidden="books: nobody asks how often the null block is held",
)
class NullsFreed(Defect):
    """The null block is held less than never."""

    def free(self, holdings: Any) -> None:
        for holding in holdings:
            self.pool.free(holding.blocks)
            holding.clear()


@PAGE.exhibit(
    "groups share their keys",
    "vLLM 0.19.1 make_block_hash_with_group_id, rule",
    "P6 P3 P5",
    part=PART,
)
class GroupLeftOutOfKeys(Defect):
    """A group finds blocks of another, with the same tokens of other layers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            group.number = 0


@PAGE.exhibit(
    "a block that is still read in part is given back",
    "vLLM 0.19.1, found here",
    "P3 P5",
    part=PART,
)
class HalfABlockLeft(Defect):
    """A window begins anywhere in a block, and a chunk does where blocks do not divide it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for group in self.groups:
            group.first_block = partial(_first_block_rounded_up, group)


def _first_block_rounded_up(group: Any, num_computed: int) -> int:
    first_read = num_computed - group.count_read(num_computed)
    return int(-(-first_read // group.block_size))


# States of recurrent layers.


@STATES.exhibit(
    "a chunk is cut to where a block of states ends, be it to nothing",
    "#40707, #45414, #51603",
    "P10 P15",
    part=PART,
)
class ChunkCutToNothing(Defect):
    """A budget or threshold below the block, and the request stands there for ever."""

    def align(self, num_computed: int, num_scheduled: int, num_prompt: int, num_known: int) -> int:
        end = num_computed + num_scheduled
        is_prompt = num_computed < max(num_prompt, num_known - 1)
        if self._aligned_sizes and is_prompt and end < self._floor(num_known - self.num_dropped):
            return max(int(self._floor(end)) - num_computed, 0)
        return int(super().align(num_computed, num_scheduled, num_prompt, num_known))


@STATES.exhibit(
    "a chunk that would be cut to nothing runs to the next end of a block",
    "#51582, #47771",
    "P9 P15",
    part=PART,
    wrong_fix_of="chunk-cut-to-nothing",
)
class ChunkRunOn(Defect):
    """It goes on, and beyond the budget of its step."""

    def align(self, num_computed: int, num_scheduled: int, num_prompt: int, num_known: int) -> int:
        end = num_computed + num_scheduled
        is_prompt = num_computed < max(num_prompt, num_known - 1)
        if self._aligned_sizes and is_prompt and end < self._floor(num_known - self.num_dropped):
            following = int(self._floor(num_computed)) + int(self.unit)
            return max(int(self._floor(end)), following) - num_computed
        return int(super().align(num_computed, num_scheduled, num_prompt, num_known))


@STATES.exhibit(
    "an admission is charged one block for states, and takes those of drafts as well",
    "#46892; ascend #11129",
    "P8 P1 P2 P12",
    part=PART,
)
class StatesChargedOnce(Defect):
    """The blocks for states behind drafts are not there, or somebody else's."""

    def count_to_admit(self, hits: Any, extent: Any, num_beside: int) -> int:
        needed = int(super().count_to_admit(hits, extent, num_beside))
        return needed - int(sum(group.num_spare for group in self.groups if group.is_aligned))


@STATES.exhibit(
    "an admission is charged a state for each block that it passes",
    "#46892",
    "P15 P11 P10",
    part=PART,
    wrong_fix_of="states-charged-once",
)
class StatesChargedByTokens(Defect):
    """A chunk writes one state, however long it is: who would fit has to wait."""

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
    "a state is hit in the step that makes it", "#56525; vLLM 0.19.1, rule", "P4 P5", part=PART
)
class StateHitWithinItsStep(Defect):
    """Rows of one step run side by side: the state is not there yet."""

    def publish(self, holdings: Any, lineage: Any, num_computed: int, num_written: int) -> None:
        super().publish(holdings, lineage, num_computed, num_written)
        self.new_states.clear()
