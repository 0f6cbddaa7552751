"""Loading: a store loads the KV of a request, in the step that admits it or over several steps."""

from __future__ import annotations

from blockstep.impl.host.core import Core
from blockstep.impl.host.groups import GroupHits, GroupMemory
from blockstep.impl.host.kinds import Extent
from blockstep.impl.host.step import Step
from blockstep.impl.host.transfers import Transfers
from blockstep.spec.vocabulary import KVLoad, Status


class Loading(Core):
    """Loads into the blocks of an admitted request; parks one whose load takes longer than a step.

    | local hit | loaded | computed in this step |
                         ^ start of the row, if the load finishes within the step
    """

    def _is_parked(self, slot: int) -> bool:
        return self.table.statuses[slot] is Status.WAITING_FOR_REMOTE_KVS

    def _has_no_answer(self, transfers: Transfers, slot: int) -> bool:
        """Return whether the store would be asked about a request, and does not know yet."""
        return not self.table.num_computed[slot] and transfers.has_no_answer(
            self.table.requests[slot]
        )

    def _find_load(self, slot: int, num_hit: int) -> tuple[int, bool]:
        """Return the tokens that a store loads after a hit, and whether the load takes several
        steps."""
        if self.transfers is None:
            return 0, False
        table = self.table
        return self.transfers.find_load(table.requests[slot], num_hit, table.num_known[slot])

    def _fits(self, groups: GroupMemory, slot: int, hits: GroupHits, extent: Extent) -> bool:
        """Return whether there are blocks for a request after its hits, and for all of it if
        required."""
        num_beside = self.table.holdings[slot][0].num_beside
        free = self.pool.num_free - self._count_kept_free()
        if self.config.scheduler_reserve_full_isl:
            whole = groups.count_for_gate(hits, self.table.num_known[slot])
            if whole + groups.count_across(num_beside) > free:
                return False
        needed = groups.count_to_admit(hits, extent, num_beside)
        return needed + self.pool.count_free(hits.shared()) <= free

    def _try_park(
        self,
        groups: GroupMemory,
        transfers: Transfers,
        slot: int,
        hits: GroupHits,
        num_external: int,
        step: Step,
    ) -> bool:
        """Hold the hits and take the blocks to load into; the request stays in its queue."""
        table, start = self.table, hits.num_tokens + num_external
        extent = Extent(start, start, start)
        if not self._fits(groups, slot, hits, extent):
            return False
        groups.adopt(table.holdings[slot], hits)
        groups.take(table.holdings[slot], extent)
        self._count_hits(slot, hits.num_tokens, num_external)
        table.num_computed[slot] = start
        transfers.park(table.requests[slot].request_id, table.statuses[slot])
        table.statuses[slot] = Status.WAITING_FOR_REMOTE_KVS
        step.loads.append(self._make_load(slot, hits.num_tokens, num_external, is_async=True))
        return True

    def _load_now(self, slot: int, num_hit: int, num_external: int, step: Step) -> None:
        """Load in this step; until its frame is committed no other request may hit the blocks
        (P19)."""
        if self.transfers is not None:
            request_id = self.table.requests[slot].request_id
            self.transfers.unsettled[request_id] = self.next_frame_id
            step.loads.append(self._make_load(slot, num_hit, num_external, is_async=False))

    def _return(self, slot: int) -> None:
        """Unpark a request that is admitted: publish its loaded blocks."""
        table = self.table
        self._unpark(slot)
        self._publish(slot, table.num_computed[slot], 0)
        if table.num_cached_tokens[slot] < 0:
            table.num_cached_tokens[slot] = table.num_computed[slot]

    def _make_load(self, slot: int, num_hit: int, num_external: int, is_async: bool) -> KVLoad:
        tables = zip(self.table.holdings[slot], self.config.block_sizes, strict=True)
        end = num_hit + num_external
        return KVLoad(
            self.table.requests[slot].request_id,
            tuple([tuple(holding.blocks[: -(-end // size)]) for holding, size in tables]),
            num_hit,
            num_external,
            is_async,
        )

    def _count_hits(self, slot: int, num_hit: int, num_external: int) -> None:
        """Count the queries and hits of the caches for a request that was given blocks (P21)."""
        request, num_known = self.table.requests[slot], self.table.num_known[slot]
        if self._asks_cache(slot):
            self.prefix_cache_queries += num_known
            self.prefix_cache_hits += num_hit
        if self.transfers is not None:
            self.transfers.count(request, num_known - num_hit, num_external)

    def _asks_cache(self, slot: int) -> bool:
        skips = self.table.requests[slot].skip_reading_prefix_cache
        return self.config.enable_prefix_caching and not skips
