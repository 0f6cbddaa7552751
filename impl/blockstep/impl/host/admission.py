"""The waiting phase: requests are admitted while there are tokens, running slots and blocks."""

from __future__ import annotations

from dataclasses import replace

from blockstep.impl.host.adapters import AdapterSeats
from blockstep.impl.host.copies import Copies
from blockstep.impl.host.encodings import Encodings
from blockstep.impl.host.groups import GroupHits, GroupMemory
from blockstep.impl.host.kinds import Extent
from blockstep.impl.host.loading import Loading
from blockstep.impl.host.promises import Promises
from blockstep.impl.host.queues import RequestQueue
from blockstep.impl.host.step import Step
from blockstep.impl.host.transfers import Transfers
from blockstep.spec.vocabulary import NULL_BLOCK, BlockId, Policy, Status


class WaitingPhase(Promises, Encodings, Loading, Copies):
    """Admits waiting requests in the order of the policy; the first that does not fit ends the
    phase."""

    def _schedule_waiting(self, step: Step) -> None:
        passed_over: list[int] = []
        if self.config.max_loras:
            step.seats = self._count_seats(step)
        while step.budget > 0 and len(self.running) < self.config.max_num_seqs:
            queue = self._select_queue()
            if queue is None:
                break
            slot = queue.head()
            if self._is_passed_over(slot, step):
                passed_over.append(queue.pop())
                continue
            while not self._try_admit(slot, queue, step):
                if self.running or not self._take_back_one(slot, passed_over):
                    break
            else:
                if self.transfers is not None and self._is_parked(slot):
                    passed_over.append(queue.pop())
                continue
            if self.transfers is not None:
                self._admit_behind(self.transfers, slot, step)
            break
        if passed_over:
            self.skipped_waiting.prepend(passed_over)

    def _admit_behind(self, transfers: Transfers, head: int, step: Step) -> None:
        """Admit requests after their load, even if the head of the queue does not fit (P10).

        Their blocks are loaded, so they can run, and each frees its blocks at its end. One that
        does not fit either stays where it is.
        """
        if not transfers.received:
            return
        loaded = [slot for slot in self.skipped_waiting if self._has_received(slot)]
        for slot in loaded:
            if step.budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                return
            if slot != head and not self._is_passed_over(slot, step):
                self._try_admit(slot, self.skipped_waiting, step)

    def _is_passed_over(self, slot: int, step: Step) -> bool:
        """Return whether the head of a queue cannot be admitted now, and the next request is
        tried."""
        if not self._is_ready(slot) or self._awaits_tokens(slot):
            return True
        if self.transfers is not None and self._has_no_answer(self.transfers, slot):
            return True
        return step.seats is not None and not step.seats.has_seat(self.table.requests[slot].adapter)

    def _count_seats(self, _step: Step) -> AdapterSeats:
        """Return the LoRA slots used by running requests, with or without a row in this step
        (P9)."""
        requests = self.table.requests
        running = (requests[slot].adapter for slot in self.running)
        return AdapterSeats(self.config.max_loras, running)

    def _select_queue(self) -> RequestQueue | None:
        """Return the queue whose head is next; None if both are empty (seed 001, P16)."""
        waiting, skipped = self.waiting, self.skipped_waiting
        if not skipped:
            return waiting if waiting else None
        if not waiting or self.config.policy is not Policy.PRIORITY:
            return skipped
        rank_of = self.table.rank_of
        return waiting if rank_of(waiting.head()) < rank_of(skipped.head()) else skipped

    def _is_ready(self, slot: int) -> bool:
        """Return whether it may be admitted; a request whose grammar is ready becomes WAITING
        here."""
        table = self.table
        if table.statuses[slot] is Status.WAITING_FOR_STREAMING_REQ:
            return False
        if table.statuses[slot] is Status.WAITING_FOR_REMOTE_KVS:
            return self._has_received(slot)
        if table.statuses[slot] is not Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return True
        if not table.grammar_ready[slot]:
            return False
        table.statuses[slot] = Status.WAITING
        return True

    def _try_admit(self, slot: int, queue: RequestQueue, step: Step) -> bool:
        """Admit a request of `queue`, or change nothing at all and return False (P7).

        With a store it may wait for a load instead; then it stays in the queue, and the result is
        True as well.
        """
        if self.table.num_computed[slot]:
            return self._try_go_on(slot, queue, step)
        if self.groups is not None:
            if self._has_received(slot):
                return self._try_begin_anew(self.groups, slot, queue, step)
            return self._try_admit_to_groups(self.groups, slot, queue, step)
        hits = self._find_hits(slot)
        num_hit = len(hits) * self.block_size
        num_scheduled = self._tokens_to_admit(slot, num_hit, step.budget)
        chosen = None
        if self.encoder is not None:
            chosen = self._choose_if_any(slot, num_hit, num_scheduled, step)
            if chosen is not None:
                num_scheduled = chosen.num_tokens
        if num_scheduled <= 0:
            return False
        free = self.pool.num_free - self._count_kept_free()
        free_hits = self.pool.count_free(hits)
        if self.config.scheduler_reserve_full_isl:
            whole = self._blocks_to_admit(self.table.num_known[slot], len(hits))
            if whole + free_hits > free:
                return False
        needed = self._blocks_to_admit(num_hit + num_scheduled, len(hits))
        if needed + free_hits > free:
            return False
        queue.pop()
        self._admit(slot, hits, needed, num_scheduled, step)
        if chosen is not None:
            self._encode_if_any(slot, chosen, step)
        return True

    def _try_admit_to_groups(
        self, groups: GroupMemory, slot: int, queue: RequestQueue, step: Step
    ) -> bool:
        """Admit a request as `_try_admit` does, where there are several groups or a store."""
        hits = self._find_group_hits(groups, slot)
        num_external, is_async = self._find_load(slot, hits.num_tokens)
        if num_external:
            hits = groups.cut_hits(hits, hits.num_tokens + num_external)
        if is_async and self.transfers is not None:
            return self._try_park(groups, self.transfers, slot, hits, num_external, step)
        start = hits.num_tokens + num_external
        num_scheduled = self._tokens_to_admit(slot, start, step.budget)
        chosen = self._choose_if_any(slot, start, num_scheduled, step)
        if chosen is not None:
            num_scheduled = chosen.num_tokens
        num_scheduled = self._align_chunk(groups, slot, start, num_scheduled)
        if num_scheduled <= 0:
            return False
        end = start + num_scheduled
        extent = Extent(end, end, start if num_external else 0)  # there is no lookahead yet
        if not self._fits(groups, slot, hits, extent):
            return False
        queue.remove(slot)
        groups.adopt(self.table.holdings[slot], hits)
        step.taken.append(groups.take(self.table.holdings[slot], extent))
        if num_external:
            self._load_now(slot, hits.num_tokens, num_external, step)
        self._start(slot, hits.num_tokens, num_scheduled, step, num_external)
        self._encode_if_any(slot, chosen, step)
        return True

    def _try_begin_anew(
        self, groups: GroupMemory, slot: int, queue: RequestQueue, step: Step
    ) -> bool:
        """Admit a request whose load brought no block: free its blocks and look for hits again.

        If it does not fit, its blocks are held again: new blocks are taken from the other end of
        the free queue, so these are still in it.
        """
        table, holdings, fence = self.table, self.table.holdings[slot], self._find_fence(slot)
        kept, request_id = (
            [replace(h, blocks=[*h.blocks]) for h in holdings],
            table.requests[slot].request_id,
        )
        self._take_back(slot)
        status = table.statuses[slot]
        if self._try_admit_to_groups(groups, slot, queue, step):
            return True
        if fence is not None and self.transfers is not None:
            self.transfers.deferred_frees.pop()
        for holding in kept if fence is None else ():
            self.pool.touch([block for block in holding.blocks if block != NULL_BLOCK])
        table.holdings[slot] = tuple(kept)
        table.statuses[slot] = Status.WAITING_FOR_REMOTE_KVS
        if self.transfers is not None:
            self.transfers.park(request_id, status)
            self.transfers.received.add(request_id)
        return False

    def _try_go_on(self, slot: int, queue: RequestQueue, step: Step) -> bool:
        """Admit a request that has blocks: a session, a branch, or one whose load has finished.

        It continues after its computed tokens.
        """
        table, groups, holdings = self.table, self.groups, self.table.holdings[slot]
        computed, num_known = table.num_computed[slot], table.num_known[slot]
        num_scheduled = self._tokens_to_admit(slot, computed, step.budget)
        chosen = self._choose_if_any(slot, computed, num_scheduled, step)
        if chosen is not None:
            num_scheduled = chosen.num_tokens
        if groups is not None:
            num_scheduled = self._align_chunk(groups, slot, computed, num_scheduled)
        if num_scheduled <= 0:
            return False
        free, fence = self.pool.num_free - self._count_kept_free(), self._find_fence(slot)
        if groups is not None and fence is None:
            free += groups.count_leaving(holdings, computed)
        if self.config.scheduler_reserve_full_isl:
            if groups is None:
                whole = self._count_lacking(slot, num_known)
            else:
                whole = groups.count_to_end(holdings, computed, num_known)
            if whole > free:
                return False
        lacking = self._count_lacking(slot, computed + num_scheduled)
        if lacking + self._count_copies(slot) > free:
            return False
        queue.remove(slot)
        if self.transfers is not None and self._is_parked(slot):
            self._return(slot)
        if groups is not None:
            groups.leave(holdings, computed, 0, self._free_behind(fence))
            end = computed + num_scheduled
            step.taken.append(self._take(groups, slot, Extent(end, end), step))
        else:
            holdings[0].blocks += self.pool.take(lacking)
        self._begin(slot, num_scheduled, step)
        self._encode_if_any(slot, chosen, step)
        return True

    def _count_lacking(self, slot: int, num_tokens: int) -> int:
        """Return the number of blocks that its tables lack for `num_tokens` tokens."""
        end = min(num_tokens, self.max_model_len)
        if self.groups is not None:
            return self.groups.count_missing(self.table.holdings[slot], Extent(end, end))
        return max(-(-end // self.block_size) - len(self.table.holdings[slot][0].blocks), 0)

    def _find_group_hits(self, groups: GroupMemory, slot: int) -> GroupHits:
        if not self._asks_cache(slot):
            return groups.no_hits
        return groups.find_hits(self.table.lineages[slot], self.table.num_known[slot])

    def _find_hits(self, slot: int) -> list[BlockId]:
        """Return the longest cached prefix, leaving at least one token to compute (upstream
        #30320).

        A hidden-state head needs the last hit block recomputed (seed 001,
        "find_longest_cache_hit").
        """
        if not self._asks_cache(slot):
            return []
        limit = (self.table.num_known[slot] - 1) // self.block_size
        hits = self.prefix.hits(self.table.lineages[slot], limit)
        if self.config.drops_last_hit_block and hits:
            hits.pop()
        return hits

    def _tokens_to_admit(self, slot: int, num_hit: int, budget: int) -> int:
        """Return the tokens of its first row; 0 if it has to wait for a larger budget."""
        wanted = min(self.table.num_known[slot] - num_hit, self.max_tokens_per_row)
        if wanted > budget and not self.config.enable_chunked_prefill:
            return 0
        return min(wanted, budget)

    def _blocks_to_admit(self, num_tokens: int, num_hits: int) -> int:
        """Return the new blocks besides the hits for `num_tokens`; there is no lookahead yet
        (P8)."""
        total = -(-min(num_tokens, self.max_model_len) // self.block_size)
        return max(total - num_hits, 0)

    def _admit(
        self, slot: int, hits: list[BlockId], needed: int, num_scheduled: int, step: Step
    ) -> None:
        table = self.table
        # Hits are held before new blocks are taken: the head of the queue could be a hit
        # (upstream #33775).
        self.pool.touch(hits)
        (holding,) = table.holdings[slot]  # hits are those of one group
        holding.blocks += hits
        holding.num_cached = len(hits)
        holding.blocks += self.pool.take(needed)
        self._start(slot, len(hits) * self.block_size, num_scheduled, step)

    def _start(
        self, slot: int, num_hit: int, num_scheduled: int, step: Step, num_external: int = 0
    ) -> None:
        """Start a request that has its blocks: its hits and loaded tokens count as computed."""
        table, start = self.table, num_hit + num_external
        table.num_computed[slot] = start
        if table.num_cached_tokens[slot] < 0:
            table.num_cached_tokens[slot] = start
        self._count_hits(slot, num_hit, num_external)
        self._begin(slot, num_scheduled, step)

    def _begin(self, slot: int, num_scheduled: int, step: Step) -> None:
        """Add a row after its computed tokens, and move the request to the running ones."""
        table = self.table
        self._publish(slot, table.num_computed[slot], num_scheduled)
        resumed = table.statuses[slot] is Status.PREEMPTED
        table.statuses[slot] = Status.RUNNING
        self.running.append(slot)
        step.admitted.append((slot, num_scheduled, resumed))
        if step.seats is not None:
            step.seats.take(table.requests[slot].adapter)
        step.budget -= num_scheduled
