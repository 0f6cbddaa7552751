"""The pool and the prefix map: blocks are freed, taken and found."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.museum.exhibit import Methods, Page, in_pool, in_prefix_map

PAGE = Page()


@PAGE.exhibit(
    "a table is freed from its head", "llm-d-inference-sim #704; seed 003 section 2.2", "P16"
)
def forward_frees(clean: Any) -> Methods:
    """The head of a prompt is evicted first, and with it every hit on the rest."""

    def free(self: Any, table: Any) -> None:
        clean.pool_type.free(self, tuple(reversed(table)))

    return in_pool(clean, free=free)


@PAGE.exhibit("a touched block stays in the free queue", "TensorRT-LLM #12667", "P1", "P2")
def touch_leaves_block_queued(clean: Any) -> Methods:
    """A block in use is handed out again."""

    def _unlink(self: Any, block: int) -> None:
        return None

    return in_pool(clean, _unlink=_unlink)


@PAGE.exhibit("a reused block keeps its old key", "SGLang #27586", "P3", "P4")
def stale_key_after_reuse(clean: Any) -> Methods:
    """A hit finds what somebody else has written since."""

    def _evict(self: Any, block: int) -> None:
        return None

    return in_pool(clean, _evict=_evict)


@PAGE.exhibit("the newest of equal blocks is hit", "seed 003 section 2.3", "P16", "P15")
def newest_duplicate_hit(clean: Any) -> Methods:
    """Not wrong in itself; but the order of eviction is no longer the documented one."""

    def _choose(self: Any, blocks: Any) -> int:
        return int(blocks[-1])

    return in_prefix_map(clean, _choose=_choose)


@PAGE.exhibit("an aborted request keeps its blocks", "#46283", "P1")
def leak_on_abort(clean: Any) -> Methods:
    """The pool shrinks with every client that gives up."""

    def _abort(self: Any, request_ids: Any) -> Any:
        for request_id in request_ids:
            slot = self.table.slot_of.get(request_id)
            if slot is not None:
                for holding in self.table.holdings[slot]:
                    del holding.blocks[:]
        return clean._abort(self, request_ids)

    return {"_abort": _abort}


@PAGE.exhibit("the null block is counted as usable", "#52520, #39734", "P11", "P10")
def null_block_counted(clean: Any) -> Methods:
    """A request is taken in that can never be served."""

    def _most_blocks(self: Any, request: Any) -> int:
        blocks: int = clean._most_blocks(self, request)
        return blocks - 1

    return {"_most_blocks": _most_blocks}


@PAGE.exhibit("a reset leaves the cache as it is", "seed 001 Reset Prefix Cache", "P25")
def reset_keeps_keys(clean: Any) -> Methods:
    """Old weights answer for new ones."""

    def clear(self: Any) -> None:
        return None

    return in_prefix_map(clean, clear=clear)


@PAGE.exhibit("new blocks are taken before the hits are held", "#33775, #44409", "P2", "P1", "P8")
def take_before_touch(clean: Any) -> Methods:
    """The head of the free queue may be a hit: it becomes a new block of the same request too."""

    def _admit(self: Any, slot: int, hits: Any, needed: int, scheduled: int, step: Any) -> None:
        taken = self.pool.take(needed)
        self.pool.take = lambda _count: taken
        try:
            clean._admit(self, slot, hits, needed, scheduled, step)
        finally:
            del self.pool.take

    return {"_admit": _admit}


@PAGE.exhibit("a rejected tail is freed twice", "SGLang #12224", "P1", "P12")
def tail_freed_twice(clean: Any) -> Methods:
    """Rollback frees what it infers to be unused, and the end of the request frees it again."""

    def _roll_back(self: Any, slot: int, drafts: Any, tokens: Any) -> None:
        clean._roll_back(self, slot, drafts, tokens)
        used = -(-self.table.num_computed[slot] // self.block_size)
        for holding in self.table.holdings[slot]:
            self.pool.free(holding.blocks[used:])

    return {"_roll_back": _roll_back}


@PAGE.exhibit(
    "shared blocks count as freed with each holder", "SGLang #35270", "P8", "P25", "P15", "P1"
)
def shared_blocks_counted_free(clean: Any) -> Methods:
    """The count of free blocks grows when one of several holders lets go."""

    def free(self: Any, table: Any) -> None:
        shared = sum(self.ref_counts[block] > 1 for block in table)
        clean.pool_type.free(self, table)
        self.num_free += shared

    return in_pool(clean, free=free)


@PAGE.exhibit("blocks that eviction passes over count as evicted", "xLLM #55", "P8", "P1", "P15")
def passed_over_blocks_counted(clean: Any) -> Methods:
    """A victim's shared blocks stay where they are, and too few others are freed."""

    def _free_blocks(self: Any, slot: int) -> None:
        shared = [
            block
            for holding in self.table.holdings[slot]
            for block in holding.blocks
            if self.pool.ref_counts[block] > 1
        ]
        self._passed_over = getattr(self, "_passed_over", 0) + len(shared)
        clean._free_blocks(self, slot)

    def _make_room(self: Any, slot: int, needed: int, position: int, step: Any) -> int:
        self._passed_over = 0
        while position >= 0 and needed > self.pool.num_free + self._passed_over:
            position = clean._make_room(self, slot, self.pool.num_free + 1, position, step)
        return position

    return {"_free_blocks": _free_blocks, "_make_room": _make_room}


@PAGE.exhibit(
    "publishing a block evicts the publisher's first one", "TensorRT-LLM #17926", "P3", "P15"
)
def publisher_evicts_itself(clean: Any) -> Methods:
    """Room for the new entry is made in a full pool, and nothing says who must be spared."""

    def _publish(self: Any, slot: int, num_computed: int, num_scheduled: int) -> None:
        holding = self.table.holdings[slot][0]
        before = holding.num_cached
        clean._publish(self, slot, num_computed, num_scheduled)
        if before < holding.num_cached and self.pool.num_free == 0:
            self.prefix.withdraw(holding.blocks[0])

    return {"_publish": _publish}
