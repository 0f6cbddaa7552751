"""Seeded bugs in forks, copy on write, the watermark and the order of the free queue.

The defects in the block manager's listings on these topics are reproduced here. The others are
mistakes that suggest themselves, and wrong repairs.
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
    f"the block manager: {where}, breaks its rule"
    for where in ("Fork", "The COW Mechanism", "Append Path", "The Watermark")
)
LEFT = "policy: how many free blocks an admission leaves"
ORDER = "policy: which free block is taken next"


# Sharing.


@PAGE.exhibit("a branch shares its parent's whole block table", FORK, "P5 P1", part=PART)
class WholeTableIsShared(Defect):
    """Blocks that are not computed yet become the next blocks of two requests."""

    def branch(self, holdings: Any, children: Any, num_tokens: int) -> None:
        super().branch(holdings, children, num_tokens)
        for holding, child in zip(holdings, children, strict=True):
            more = holding.blocks[len(child.blocks) :]
            self.pool.touch(more)
            child.blocks += more


@PAGE.exhibit(
    "a branch shares all computed blocks of its parent, even if their tokens differ", FORK, "P5 P3"
)
class SharedBehindTheDifference(Defect):
    """It attends to tokens of its parent that are not its own."""

    def _share(self, parent: int, child: int) -> None:
        most = min(self.table.num_computed[parent], self.table.num_known[child] - 1)
        find = self.groups.find_branch_point
        self.groups.find_branch_point = lambda holdings, _most: find(holdings, most)
        super()._share(parent, child)
        del self.groups.find_branch_point


@PAGE.exhibit(
    "a branch continues within a block that is in the prefix cache", FORK, "P5 P2 P3", part=PART
)
class FindableBlockIsWrittenAgain(Defect):
    """The block is written again and no longer holds the tokens of its key."""

    def find_branch_point(self, holdings: Any, most: int) -> int:
        settled = [holding.num_cached for holding in holdings]
        for holding in holdings:
            holding.num_cached = 0
        found: int = super().find_branch_point(holdings, most)
        for holding, count in zip(holdings, settled, strict=True):
            holding.num_cached = count
        return found


@GROUPS.exhibit(
    "a branch starts after blocks that its parent's sliding window has freed", FORK, "P5", part=PART
)
class BranchBehindTheWindow(Defect):
    """The window of the branch includes blocks that were freed."""

    def find_branch_point(self, holdings: Any, most: int) -> int:
        left = [holding.num_left for holding in holdings]
        for holding in holdings:
            holding.num_left = 0
        found: int = super().find_branch_point(holdings, most)
        for holding, count in zip(holdings, left, strict=True):
            holding.num_left = count
        return found


@PAGE.exhibit("a branch inherits the drafts of its parent", "by the rule of P24", "P5 P24")
class BranchHasItsParentsDrafts(Defect):
    """They were proposed for another token sequence."""

    def _share(self, parent: int, child: int) -> None:
        super()._share(parent, child)
        self.table.spec_token_ids[child] = self.table.spec_token_ids[parent]


@PAGE.exhibit("a branch uses its parent's block keys", "by the rule of P3", "P3 P6")
class BranchHasItsParentsNames(Defect):
    """Blocks after the common prefix are published under the keys of the parent's tokens."""

    def _share(self, parent: int, child: int) -> None:
        super()._share(parent, child)
        own, other = self.table.lineages[child], self.table.lineages[parent]
        if self.config.enable_prefix_caching:
            own._digests = [*other.name_blocks()]


@PAGE.exhibit(
    "a request that finishes frees blocks that others hold",
    "the block manager: offload_to_cpu, breaks its rule",
    "P1 P2",
)
class EndFreesWhatOthersHold(Defect):
    """Reference counts are ignored, so blocks of a branch are given to the next request."""

    def _finish(self, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            for block in filter(None, holding.blocks):
                self.pool.ref_counts[block] = 1
        super()._finish(slot)


# Copy on write.


@PAGE.exhibit("a request writes to a block that it shares", APPEND, "P2 P8", part=PART)
class WrittenInPlace(Defect):
    """The function that copies is there, but it is never called."""

    def _find_shared(self, _group: Any, _holding: Any, _num_computed: int) -> None:
        return None


@PAGE.exhibit(
    "only a request that is already running gets a copy on write",
    APPEND,
    "P2 P8",
    wrong_fix_of="written-in-place",
)
class FirstRowWritesInPlace(Defect):
    """The first row of a branch, too, writes to a block that its parent holds."""

    def _take(self, groups: Any, slot: int, extent: Any, step: Any) -> Any:
        if self.table.statuses[slot] is Status.RUNNING:
            return super()._take(groups, slot, extent, step)
        return groups.take(self.table.holdings[slot], extent)


@GROUPS.exhibit(
    "copy on write copies only the block of the first KV group",
    APPEND,
    "P2 P8",
    part=PART,
    wrong_fix_of="written-in-place",
)
class FirstGroupAloneIsCopied(Defect):
    """Two requests write to one block of a sliding-window group."""

    def _find_shared(self, group: Any, holding: Any, num_computed: int) -> Any:
        return None if group.number else super()._find_shared(group, holding, num_computed)


@PAGE.exhibit("the free block for a copy is not counted", COW, "P1 P2 P8 P10")
class CopyTakesWhatIsNotThere(Defect):
    """If the pool is empty, the step fails halfway or takes blocks that others hold."""

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> int:
        if needed - self._count_copies(slot) <= self.pool.num_free:
            return position
        return int(super()._make_room(slot, needed, position, step))


@PAGE.exhibit(
    "the free block for a copy is counted for running requests, but not at admission",
    COW,
    "P1 P2 P8 P10",
    wrong_fix_of="copy-takes-what-is-not-there",
)
class FirstCopyIsNotCounted(Defect):
    """The first row of a branch takes a block that was not counted."""

    def _count_copies(self, slot: int) -> int:
        is_running = self.table.statuses[slot] is Status.RUNNING
        return int(super()._count_copies(slot)) if is_running else 0


@PAGE.exhibit(
    "source and destination of a copy are swapped", "by the rule of P8", "P8 P2 P4", part=PART
)
class CopyGoesTheOtherWay(Defect):
    """A new block without content overwrites one that two requests read."""

    def take_own(self, holdings: Any, num_computed: int, extent: Any) -> Any:
        copies, taken = super().take_own(holdings, num_computed, extent)
        return tuple(BlockCopy(it.destination, it.source) for it in copies), taken


@PAGE.exhibit(
    "a plan lists no copies",
    "the block manager: execute_pending_copies, breaks its rule",
    "P8 P4",
)
class CopyIsNotMade(Defect):
    """The plan has the new block in its table, but not the copy that fills it."""

    def _issue_plan(self, step: Any) -> Any:
        return replace(super()._issue_plan(step), block_copies=())


@PAGE.exhibit("the copy for a withdrawn row stays in the plan", "by the rule of P7", "P8 P26 P2")
class CopyOutlivesItsRow(Defect):
    """The copy's destination may belong to another request in the same step."""

    def _unschedule(self, victim: int, step: Any) -> None:
        copies = step.copies.get(victim)
        super()._unschedule(victim, step)
        if copies:
            step.copies[victim] = copies


@PAGE.exhibit(
    "a changed block table is sent as if blocks were appended", "by the rule of P26", "P26"
)
class RemappingIsNotTold(Defect):
    """The worker appends the whole table to the one that it has."""

    def _issue_plan(self, step: Any) -> Any:
        return replace(super()._issue_plan(step), remapped_req_ids=())


# The watermark and the order of the free queue.


@PAGE.exhibit("admissions ignore the watermark", WATERMARK, "P10", invisible=LEFT)
class WatermarkIgnored(Defect):
    """The text subtracts the watermark from the free blocks, but the listing does not."""

    def _count_kept_free(self) -> int:
        return 0


@PAGE.exhibit("running requests keep the watermark, too", WATERMARK, "P15 P10")
class RunningLeaveTheWatermark(Defect):
    """Requests are preempted although there are free blocks, which were kept to avoid this."""

    def _blocks_needed(self, slot: int, num_scheduled: int) -> int:
        needed = int(super()._blocks_needed(slot, num_scheduled))
        return needed + self.config.watermark_blocks if needed else 0


@PAGE.exhibit(
    "the watermark is compared with the free blocks before the admission",
    "by the rule of P10",
    "P10 P15",
    invisible=LEFT,
    wrong_fix_of="watermark-ignored",
)
class WatermarkBeforeTheAdmission(Defect):
    """The last admission takes all free blocks."""

    def _count_kept_free(self) -> int:
        kept = int(super()._count_kept_free())
        return 0 if self.pool.num_free >= kept else kept


@PAGE.exhibit(
    "a LIFO free list reuses the head of a freed table first",
    "the block manager: Deallocation Path, breaks its rule",
    "P16",
    part="pool_type",
    invisible=ORDER,
)
class HeadOnTopOfTheStack(Defect):
    """The block that is most likely to be hit again is reused first."""

    def free(self, table: Any) -> None:
        super().free([*reversed(table)] if self.is_lifo else table)
