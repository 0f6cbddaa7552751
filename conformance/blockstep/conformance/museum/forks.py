"""Forks: what branches share, who gets a copy and when, and what admissions leave to others.

The listings of the block manager on copy-on-write, forks and its watermark are here: each does to
ours what it does itself. Beside them are mistakes that suggest themselves, and repairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page
from blockstep.spec.vocabulary import BlockCopy, Status

PAGE = Page(takes="forks")
GROUPS = Page(takes_groups=True, takes="forks")
PART = "groups_type"
FORK, COW, APPEND, WATERMARK = (
    f"the block manager: {where}, by the rule that it breaks"
    for where in ("Fork", "The COW Mechanism", "Append Path", "The Watermark")
)
LEFT = "policy: how many blocks an admission leaves"
ORDER = "policy: which free block is taken next"


# What is shared.


@PAGE.exhibit("a branch is no holder of what it shares", "by the rule of P1", "P1 P2", part=PART)
class BranchHoldsNothing(Defect):
    """Its parent ends, and others take what it reads."""

    def branch(self, holdings: Any, children: Any, num_tokens: int) -> None:
        self.pool.touch = lambda _blocks: None
        super().branch(holdings, children, num_tokens)
        del self.pool.touch


@PAGE.exhibit("a branch has its parent's whole table", FORK, "P5 P1", part=PART)
class WholeTableIsShared(Defect):
    """Blocks that nobody has computed yet are the next ones of two requests."""

    def branch(self, holdings: Any, children: Any, num_tokens: int) -> None:
        super().branch(holdings, children, num_tokens)
        for holding, child in zip(holdings, children, strict=True):
            more = holding.blocks[len(child.blocks) :]
            self.pool.touch(more)
            child.blocks += more


@PAGE.exhibit("a branch goes on where its parent stands, whatever it has said", FORK, "P5 P3")
class SharedBehindTheDifference(Defect):
    """It attends to what another one has said."""

    def _share(self, parent: int, child: int) -> None:
        most = min(self.table.num_computed[parent], self.table.num_known[child] - 1)
        find = self.groups.find_branch_point
        self.groups.find_branch_point = lambda holdings, _most: find(holdings, most)
        super()._share(parent, child)
        del self.groups.find_branch_point


@PAGE.exhibit("a branch shares all that it knows", "by the rule of P5", "P5 P10 P12")
class BranchHasNothingToRun(Defect):
    """No token is left to sample from: it is never admitted, nor is anybody behind it."""

    def _share(self, parent: int, child: int) -> None:
        table, find = self.table, self.groups.find_branch_point
        mine, others = table.lineages[child].tokens, table.lineages[parent].tokens
        is_whole = table.num_computed[parent] >= len(mine) and mine == others[: len(mine)]
        more = int(is_whole)
        self.groups.find_branch_point = lambda holdings, most: find(holdings, most + more)
        super()._share(parent, child)
        del self.groups.find_branch_point


@PAGE.exhibit("a branch goes on within a block that others can find", FORK, "P5 P2 P3", part=PART)
class FindableBlockIsWrittenAgain(Defect):
    """What its key says is not in it any more."""

    def find_branch_point(self, holdings: Any, most: int) -> int:
        settled = [holding.num_cached for holding in holdings]
        for holding in holdings:
            holding.num_cached = 0
        found: int = super().find_branch_point(holdings, most)
        for holding, count in zip(holdings, settled, strict=True):
            holding.num_cached = count
        return found


@GROUPS.exhibit("a branch goes on behind blocks that a window has let go", FORK, "P5", part=PART)
class BranchBehindTheWindow(Defect):
    """What it attends to has been given back."""

    def find_branch_point(self, holdings: Any, most: int) -> int:
        left = [holding.num_left for holding in holdings]
        for holding in holdings:
            holding.num_left = 0
        found: int = super().find_branch_point(holdings, most)
        for holding, count in zip(holdings, left, strict=True):
            holding.num_left = count
        return found


@PAGE.exhibit("a parent is forked while a frame in flight has a row of it", FORK, "P18 P5")
class ParentInFlightIsForked(Defect):
    """What it is to have computed counts, and the token that it is to get does not."""

    def _has_row(self, _request_id: str) -> bool:
        return False


@PAGE.exhibit("a branch has the drafts of its parent", "by the rule of P24", "P5 P24")
class BranchHasItsParentsDrafts(Defect):
    """They were proposed for another text."""

    def _share(self, parent: int, child: int) -> None:
        super()._share(parent, child)
        self.table.spec_token_ids[child] = self.table.spec_token_ids[parent]


@PAGE.exhibit("a branch's blocks are named as its parent's are", "by the rule of P3", "P3 P6")
class BranchHasItsParentsNames(Defect):
    """Behind what both have in common its blocks are found by what another one has said."""

    def _share(self, parent: int, child: int) -> None:
        super()._share(parent, child)
        own, other = self.table.lineages[child], self.table.lineages[parent]
        if self.config.enable_prefix_caching:
            own._digests = [*other.name_blocks()]


@PAGE.exhibit(
    "full blocks are shared before they are named",
    "by the rule of P3",
    "P3 P4 P5 P7",
    invisible_if_hidden="efficiency: they are named later, or written again with the same",
)
class SharedBeforeItIsNamed(Defect):
    """Each who holds such a block names it once it runs, also before another one writes to it."""

    def _share(self, parent: int, child: int) -> None:
        self._publish = lambda *_: None
        super()._share(parent, child)
        del self._publish


@PAGE.exhibit(
    "a branch waits behind everybody",
    "by the rule of P16",
    "P16",
    invisible="policy: who is admitted first",
)
class BranchWaitsBehindAll(Defect):
    """It holds blocks meanwhile."""

    def _fork(self, event: Any) -> Any:
        self.waiting.prepend = lambda slots: [self.waiting.append(slot) for slot in slots]
        answer = super()._fork(event)
        del self.waiting.prepend
        return answer


@PAGE.exhibit("the first row of a branch is without its outputs", "by the rule of P26", "P26")
class BranchComesWithoutItsOutputs(Defect):
    """Its worker has never seen them."""

    def _new_row(self, slot: int, num_scheduled: int) -> Any:
        return replace(super()._new_row(slot, num_scheduled), output_token_ids=())


@PAGE.exhibit("a branch gives its blocks up for nobody", "by the rule of P10", "P10 P15")
class BranchesNeverGiveWay(Defect):
    """It waits for blocks that somebody lacks who waits for it."""

    def _may_give(self, slot: int) -> bool:
        is_branch = self.table.statuses[slot] is Status.WAITING
        return not is_branch and bool(super()._may_give(slot))


@PAGE.exhibit(
    "who ends frees what others hold",
    "the block manager: offload_to_cpu, by the rule that it breaks",
    "P1 P2",
)
class EndFreesWhatOthersHold(Defect):
    """Reference counts are not looked at, and a branch's blocks are given to the next."""

    def _finish(self, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            for block in filter(None, holding.blocks):
                self.pool.ref_counts[block] = 1
        super()._finish(slot)


# Who gets a copy.


@PAGE.exhibit("whoever shares a block writes in it", APPEND, "P2 P8", part=PART)
class WrittenInPlace(Defect):
    """The copy is written, and called by nobody."""

    def _find_shared(self, _group: Any, _holding: Any, _num_computed: int) -> None:
        return None


@PAGE.exhibit("only who runs already gets a copy", APPEND, "P2 P8", wrong_fix_of="written-in-place")
class FirstRowWritesInPlace(Defect):
    """A branch writes with its first row in what its parent holds, too."""

    def _take(self, groups: Any, slot: int, extent: Any, step: Any) -> Any:
        if self.table.statuses[slot] is Status.RUNNING:
            return super()._take(groups, slot, extent, step)
        return groups.take(self.table.holdings[slot], extent)


@GROUPS.exhibit(
    "only the first group's block is copied",
    APPEND,
    "P2 P8",
    part=PART,
    wrong_fix_of="written-in-place",
)
class FirstGroupAloneIsCopied(Defect):
    """A window's block is written in by two."""

    def _find_shared(self, group: Any, holding: Any, num_computed: int) -> Any:
        return None if group.number else super()._find_shared(group, holding, num_computed)


@PAGE.exhibit("nobody asks whether there is a block for the copy", COW, "P1 P2 P8 P10")
class CopyTakesWhatIsNotThere(Defect):
    """With an empty pool the step fails in its middle, or takes what others hold."""

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> int:
        if needed - self._count_copies(slot) <= self.pool.num_free:
            return position
        return int(super()._make_room(slot, needed, position, step))


@PAGE.exhibit(
    "a copy is counted for who runs, and for no admission",
    COW,
    "P1 P2 P8 P10",
    wrong_fix_of="copy-takes-what-is-not-there",
)
class FirstCopyIsNotCounted(Defect):
    """Likewise, with the first row of a branch."""

    def _count_copies(self, slot: int) -> int:
        is_running = self.table.statuses[slot] is Status.RUNNING
        return int(super()._count_copies(slot)) if is_running else 0


@PAGE.exhibit("who has copied a block still counts as its holder", COW, "P1", part=PART)
class CopiedBlockIsKept(Defect):
    """It is never free again."""

    def take_own(self, holdings: Any, num_computed: int, extent: Any) -> Any:
        self.pool.free = lambda _table: None
        copies = super().take_own(holdings, num_computed, extent)
        del self.pool.free
        return copies


@PAGE.exhibit("a copy goes the other way", "by the rule of P8", "P8 P2 P4", part=PART)
class CopyGoesTheOtherWay(Defect):
    """What nobody has written lies over what two read."""

    def take_own(self, holdings: Any, num_computed: int, extent: Any) -> Any:
        copies, taken = super().take_own(holdings, num_computed, extent)
        return tuple(BlockCopy(it.destination, it.source) for it in copies), taken


@PAGE.exhibit(
    "no copy is made",
    "the block manager: execute_pending_copies, by the rule that it breaks",
    "P8 P4",
)
class CopyIsNotMade(Defect):
    """The plan names the new block, and not what belongs in it."""

    def _issue_plan(self, step: Any) -> Any:
        return replace(super()._issue_plan(step), block_copies=())


@PAGE.exhibit("a copy for a victim's row is made", "by the rule of P7", "P8 P26 P2")
class CopyOutlivesItsRow(Defect):
    """Its block is another one's by then, in the same step."""

    def _unschedule(self, victim: int, step: Any) -> None:
        copies = step.copies.get(victim)
        super()._unschedule(victim, step)
        if copies:
            step.copies[victim] = copies


@PAGE.exhibit("who runs with a copy is told its new blocks alone", "by the rule of P26", "P26")
class TableKeepsTheSource(Defect):
    """Its worker writes in the block that was to be spared."""

    def _issue_plan(self, step: Any) -> Any:
        added = {self.table.requests[slot].request_id: row[1] for slot, row in step.rows.items()}
        plan = super()._issue_plan(step)
        rows = [
            replace(row, new_block_ids=added[row.request_id])
            if row.request_id in plan.remapped_req_ids
            else row
            for row in plan.cached
        ]
        return replace(plan, cached=tuple(rows), remapped_req_ids=())


@PAGE.exhibit("a table that has changed is told as more of the same", "by the rule of P26", "P26")
class RemappingIsNotTold(Defect):
    """The whole table goes behind the one that the worker has."""

    def _issue_plan(self, step: Any) -> Any:
        return replace(super()._issue_plan(step), remapped_req_ids=())


# What admissions leave, and which block is next.


@PAGE.exhibit("the watermark is left out of the check", WATERMARK, "P10", invisible=LEFT)
class WatermarkIgnored(Defect):
    """The text subtracts it, and the listing does not."""

    def _count_kept_free(self) -> int:
        return 0


@PAGE.exhibit("the watermark is left whoever runs", WATERMARK, "P10 P15 P11")
class WatermarkInAnEmptyEngine(Defect):
    """Who needs more than the rest waits alone, and for ever."""

    def _count_kept_free(self) -> int:
        return int(self.config.watermark_blocks)


@PAGE.exhibit("who runs leaves the watermark as well", WATERMARK, "P15 P10")
class RunningLeaveTheWatermark(Defect):
    """Somebody is preempted beside free blocks, which were kept for that."""

    def _blocks_needed(self, slot: int, num_scheduled: int) -> int:
        needed = int(super()._blocks_needed(slot, num_scheduled))
        return needed + self.config.watermark_blocks if needed else 0


@PAGE.exhibit(
    "the watermark is of what was free before the admission",
    "by the rule of P10",
    "P10 P15",
    invisible=LEFT,
    wrong_fix_of="watermark-ignored",
)
class WatermarkBeforeTheAdmission(Defect):
    """The last who is admitted takes all of it."""

    def _count_kept_free(self) -> int:
        kept = int(super()._count_kept_free())
        return 0 if self.pool.num_free >= kept else kept


@PAGE.exhibit(
    "a stack has the head of a table on top",
    "the block manager: Deallocation Path, by the rule that it breaks",
    "P16",
    part="pool_type",
    invisible=ORDER,
)
class HeadOnTopOfTheStack(Defect):
    """What is likeliest to be hit again is taken next."""

    def free(self, table: Any) -> None:
        super().free([*reversed(table)] if self.is_lifo else table)


@PAGE.exhibit(
    "what is freed goes to the other end of a stack",
    "by the rule of P16",
    "P16",
    part="pool_type",
    invisible=ORDER,
)
class StackIsAQueue(Defect):
    """The stack is a queue, and nobody has asked for one."""

    def _prepend(self, block: int) -> None:
        queue = [*self.free_queue(), block]
        self._queue[-len(queue) :] = queue
        self._head, self._tail = len(self._queue) - len(queue), len(self._queue)
        for place, each in enumerate(queue, self._head):
            self._place[each] = place
        self.num_free += 1
