"""Groups: several tables a request, windows and chunks, and one hit that is right for all of them.

These are given configs with several KV groups, as the host is, but for recurrent ones, of which
they know nothing; all other exhibits have one group.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import NULL_BLOCK

PAGE = Page(takes_groups=True)
PART = "groups_type"


class _GroupByGroup(Defect):
    """Hits are held, and blocks taken, of one group after the other."""

    def adopt(self, _holdings: Any, hits: Any) -> None:
        self._hits = hits.tables

    def take(self, holdings: Any, num_slots: int) -> Any:
        hits, self._hits = getattr(self, "_hits", None), None
        if hits is None:  # a running request has no hits
            return super().take(holdings, num_slots)
        tables = [()] * len(holdings)
        for index in self._in_turn(range(len(holdings))):
            holding, table = holdings[index], hits[index]
            self.pool.touch([block for block in table if block != NULL_BLOCK])
            holding.blocks += table
            holding.num_cached, holding.num_left = len(table), table.count(NULL_BLOCK)
            missing = self.groups[index].count_blocks(num_slots) - len(table)
            tables[index] = tuple(self.pool.take(max(missing, 0)))
            holding.blocks += tables[index]
        return tuple(tables)

    def _in_turn(self, indices: Any) -> Any:
        return indices


@PAGE.exhibit(
    "a group takes new blocks before the next one holds its hits",
    "#33775, #44409; ascend #12139",
    "P2 P1 P8 P16",
    part=PART,
)
class GroupEatsAHit(_GroupByGroup):
    """The block taken may be a hit of the next group, and is then of both."""


@PAGE.exhibit(
    "the groups are served in the other order",
    "#33775",
    "P2 P1 P8 P16",
    part=PART,
    wrong_fix_of="group-eats-a-hit",
)
class LastGroupFirst(_GroupByGroup):
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
class FullAttentionFirst(_GroupByGroup):
    """Of two windows one still eats the hits of the other."""

    def _in_turn(self, indices: Any) -> Any:
        return sorted(indices, key=lambda index: not self.groups[index].is_whole)


@PAGE.exhibit("the gate charges a window the whole prompt", "#39734, #40946", "P15 P11", part=PART)
class WindowChargedWhole(Defect):
    """A prompt that could be served in chunks is never let in."""

    def count_for_gate(self, hits: Any, num_known: int) -> int:
        num_slots = min(num_known, self.max_model_len)
        needed: int = self.pool.count_free(hits.shared())
        for group, shared in zip(self.groups, hits.tables, strict=True):
            needed += group.count_blocks(num_slots) - len(shared)
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
        needed, num_slots = 0, min(num_known, self.max_model_len)
        for group, shared in zip(self.groups, hits.tables, strict=True):
            if group.is_whole:
                free = self.pool.count_free(shared)
                needed += group.count_blocks(num_slots) - len(shared) + free
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

    def count_missing(self, holdings: Any, num_slots: int) -> int:
        missing = 0
        for group, holding in zip(self.groups, holdings, strict=True):
            due = min(group.count_blocks(num_slots), group.count_held(num_slots))
            missing += max(due - len(holding.blocks), 0)
        return missing


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
        for _ in self.groups[1:] if self.drops_last else ():
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

    def leave(self, holdings: Any, num_computed: int) -> None:
        super().leave(holdings, num_computed + 1)


@PAGE.exhibit(
    "a window moves on as if all drafts in flight were accepted",
    "vLLM 0.19.1, found here",
    "P14 P3",
)
class DoubtForgotten(Defect):
    """Rejected, the request goes on further back, and reads what it has given up."""

    def _first_in_doubt(self, slot: int) -> int:
        return int(self.table.num_computed[slot])


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
            holding.num_left = 0
        super().free(holdings)


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


class _RoundedUp:
    """A group that leaves every block of which it does not read all."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def first_block(self, num_computed: int) -> int:
        return int(-(-self._group.first_read(num_computed) // self._group.block_size))


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
        self.groups: Any = tuple(map(_RoundedUp, self.groups))
