"""Seeded bugs in the block pool and the prefix-cache map."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Defect, Page

PAGE = Page()


@PAGE.exhibit(
    "a block table is freed from its head",
    "llm-d-inference-sim #704; prefix caching by example, section 2.2",
    "P16",
    part="pool_type",
    invisible="policy: which free block is evicted first",
)
class ForwardFrees(Defect):
    """The first block of a prompt is evicted first, and with it every hit on the rest."""

    def free(self, table: Any) -> None:
        super().free(tuple(reversed(table)))


@PAGE.exhibit(
    "a touched block stays in the free queue", "TensorRT-LLM #12667", "P1 P2", part="pool_type"
)
class TouchLeavesBlockQueued(Defect):
    """A block in use is allocated again."""

    def _unlink(self, block: int) -> None:
        return None


@PAGE.exhibit(
    "a reused block keeps its old key in the prefix cache",
    "SGLang #27586",
    "P3 P4",
    part="pool_type",
)
class StaleKeyAfterReuse(Defect):
    """A hit returns a block that another request has overwritten."""

    def _evict(self, block: int) -> None:
        return None


@PAGE.exhibit("an aborted request keeps its blocks", "#46283", "P1")
class LeakOnAbort(Defect):
    """Each abort leaks the blocks of its request."""

    def _abort(self, request_ids: Any) -> Any:
        for request_id in request_ids:
            slot = self.table.slot_of.get(request_id)
            if slot is not None:
                for holding in self.table.holdings[slot]:
                    del holding.blocks[:]
        return super()._abort(request_ids)


@PAGE.exhibit("the null block counts as usable", "#52520, #39734", "P11 P10")
class NullBlockCounted(Defect):
    """A request is accepted that never fits the pool."""

    def _most_blocks(self, request: Any) -> Any:
        return super()._most_blocks(request) - 1


@PAGE.exhibit(
    "a reset does not clear the prefix cache",
    "vLLM V1: Reset Prefix Cache",
    "P25",
    part="prefix_type",
)
class ResetKeepsKeys(Defect):
    """KV of the old weights is hit after the weights changed."""

    def clear(self) -> None:
        return None


@PAGE.exhibit("new blocks are taken before hit blocks are touched", "#33775, #44409", "P2 P1 P8")
class TakeBeforeTouch(Defect):
    """A hit at the head of the free queue becomes a new block of the same request as well."""

    def _admit(self, slot: int, hits: Any, needed: int, scheduled: int, step: Any) -> None:
        taken = self.pool.take(needed)
        self.pool.take = lambda _count: taken
        try:
            super()._admit(slot, hits, needed, scheduled, step)
        finally:
            del self.pool.take


@PAGE.exhibit("blocks of rejected drafts are freed twice", "SGLang #12224", "P1 P12")
class TailFreedTwice(Defect):
    """The rollback frees blocks of rejected drafts, and the end of the request frees them again."""

    def _roll_back(self, slot: int, drafts: Any, tokens: Any) -> None:
        super()._roll_back(slot, drafts, tokens)
        used = -(-self.table.num_computed[slot] // self.block_size)
        for holding in self.table.holdings[slot]:
            self.pool.free(holding.blocks[used:])


@PAGE.exhibit(
    "freeing a shared block counts it as free while others hold it",
    "SGLang #35270",
    "P8 P25 P15 P1",
    part="pool_type",
)
class SharedBlocksCountedFree(Defect):
    """The counter of free blocks grows with each holder that frees the block."""

    def free(self, table: Any) -> None:
        shared = sum(self.ref_counts[block] > 1 for block in table)
        super().free(table)
        self.num_free += shared


@PAGE.exhibit(
    "blocks that stay with other holders count as freed by a preemption", "xLLM #55", "P8 P1 P15"
)
class PassedOverBlocksCounted(Defect):
    """Too few requests are preempted, since the victim's shared blocks do not become free."""

    _passed_over = 0

    def _free_blocks(self, slot: int) -> None:
        for holding in self.table.holdings[slot]:
            self._passed_over += sum(self.pool.ref_counts[block] > 1 for block in holding.blocks)
        super()._free_blocks(slot)

    def _make_room(self, slot: int, needed: int, position: int, step: Any) -> int:
        self._passed_over = 0
        while position >= 0 and needed > self.pool.num_free + self._passed_over:
            position = super()._make_room(slot, self.pool.num_free + 1, position, step)
        return position


@PAGE.exhibit(
    "publishing a block evicts the first block of the same request",
    "TensorRT-LLM #17926",
    "P3 P15",
    invisible="efficiency: a later hit is lost",
)
class PublisherEvictsItself(Defect):
    """A full pool makes room for the new entry without protecting the publishing request."""

    def _publish(self, slot: int, num_computed: int, num_scheduled: int) -> None:
        holding = self.table.holdings[slot][0]
        before = holding.num_cached
        super()._publish(slot, num_computed, num_scheduled)
        if before < holding.num_cached and self.pool.num_free == 0:
            self.prefix.withdraw(holding.blocks[0])
