"""The running phase: each running request gets its next tokens, and blocks for their KV."""

from __future__ import annotations

from typing import Final

from blockstep.impl.host.copies import Copies
from blockstep.impl.host.encodings import Encodings
from blockstep.impl.host.groups import GroupMemory
from blockstep.impl.host.kinds import Extent
from blockstep.impl.host.promises import Promises
from blockstep.impl.host.saves import Saves
from blockstep.impl.host.step import Step
from blockstep.spec.vocabulary import BlockTables, Policy, TokenIds

_NOTHING: Final[tuple[()]] = ()


class RunningPhase(Promises, Encodings, Copies, Saves):
    """Schedules the running requests in order; preempts when blocks run out (seed 001)."""

    def _schedule_running(self, step: Step) -> None:
        # Where a minimum is written out below, the call costs more than all else in its line.
        table, pool, running, groups = self.table, self.pool, self.running, self.groups
        has_encoder, chosen = self.encoder is not None, None
        position = 0
        while position < len(running) and step.budget > 0:
            slot = running[position]
            num_scheduled = self._tokens_to_run(slot, step.budget)
            if has_encoder:
                computed = table.num_computed[slot]
                chosen = self._choose_if_any(slot, computed, num_scheduled, step)
                if chosen is not None:
                    if num_scheduled > 0 and chosen.num_tokens == 0:
                        self._give_way(slot)
                    num_scheduled = chosen.num_tokens
            if groups is not None:
                computed = table.num_computed[slot]
                num_scheduled = self._align_chunk(groups, slot, computed, num_scheduled)
            if num_scheduled <= 0:
                position += 1
                continue
            if groups is not None:
                self._leave_blocks(groups, slot)
            needed = self._blocks_needed(slot, num_scheduled)
            if needed > pool.num_free:
                position = self._make_room(slot, needed, position, step)
                if position < 0:
                    return
            taken: BlockTables = _NOTHING
            if needed and groups is None:
                taken = self._take_blocks(slot, needed)
            elif needed and groups is not None:
                taken = self._take(groups, slot, self._extent(slot, num_scheduled), step)
            self._publish(slot, table.num_computed[slot], num_scheduled)
            drafts: TokenIds = _NOTHING
            if table.spec_token_ids[slot]:
                drafts = self._take_drafts(slot, num_scheduled)
            step.rows[slot] = (num_scheduled, taken, drafts)
            if chosen is not None:
                self._encode_if_any(slot, chosen, step)
            step.budget -= num_scheduled
            position += 1

    def _take_blocks(self, slot: int, needed: int) -> BlockTables:
        """Append blocks to the request's table, if the config has one group."""
        taken = self.pool.take(needed)
        self.table.holdings[slot][0].blocks += taken
        return (tuple(taken),)

    def _leave_blocks(self, groups: GroupMemory, slot: int) -> None:
        """Free the blocks that no later token reads, even if all drafts in flight are rejected.

        Then the next step starts before these drafts, and its window must still be held (P1).
        """
        in_doubt = self._count_drafts_in_flight(slot)
        free = self._free_behind(self._find_fence(slot))
        groups.leave(self.table.holdings[slot], self.table.num_computed[slot], in_doubt, free)

    def _tokens_to_run(self, slot: int, budget: int) -> int:
        """Return the tokens of a running request in this step, drafts included; none if not
        positive.

            computed | ... known, placeholders | drafts |   one slot below max_model_len stays free
                     <------- gap ---------------------->   for the token to be sampled
        """
        table = self.table
        computed = table.num_computed[slot]
        gap = table.num_known[slot] + len(table.spec_token_ids[slot]) - computed
        promised = table.num_output_placeholders[slot]
        if promised:
            if self._is_past_max_tokens(slot):
                return 0
            gap += promised
        room = self.max_model_len - 1 - computed
        if gap == 1 and room > 0:
            return 1  # a plain decode: no cap can be smaller
        return min(gap, self.max_tokens_per_row, budget, room)

    def _blocks_needed(self, slot: int, num_scheduled: int) -> int:
        """Return the new blocks of all groups for the scheduled tokens and the lookahead (P8)."""
        if self.groups is not None:
            extent = self._extent(slot, num_scheduled)
            holdings, computed = self.table.holdings[slot], self.table.num_computed[slot]
            missing = self.groups.count_missing(holdings, extent)
            return missing + self.groups.count_copies(holdings, computed)
        table = self.table
        end = table.num_computed[slot] + num_scheduled + self.num_lookahead_tokens
        if end > self.max_model_len:
            end = self.max_model_len
        needed = -(-end // self.block_size) - len(table.holdings[slot][0].blocks)
        return needed if needed > 0 else 0

    def _extent(self, slot: int, num_scheduled: int) -> Extent:
        """Return the tokens that its tables must hold, where there are several groups."""
        num_tokens = self.table.num_computed[slot] + num_scheduled
        return Extent(num_tokens, min(num_tokens + self.num_lookahead_tokens, self.max_model_len))

    def _make_room(self, slot: int, needed: int, position: int, step: Step) -> int:
        """Preempt until `needed` blocks are free for `slot`, which is at `position` of `running`.

        Returns the new position of `slot`; -1 ends the phase: it was itself preempted, or the next
        blocks become free only when a frame is committed. A block needs no copy once no other
        request holds it.
        """
        num_copies = self._count_copies(slot)
        while needed > self.pool.num_free:
            if len(self.running) > 1 or not self._take_back_one(slot):
                at = self._select_victim()
                if self._gains_nothing(self.running[at]):
                    step.awaits_answer = True
                    return -1
                victim = self.running.pop(at)
                if at < position:
                    position -= 1
                self._unschedule(victim, step)
                if self.config.swap_min_tokens:
                    self._save(victim, step)
                self._preempt(victim)
                step.preempted_req_ids.append(self.table.requests[victim].request_id)
                if victim == slot:
                    return -1
            needed -= num_copies
            num_copies = self._count_copies(slot)
            needed += num_copies
        return position

    def _gains_nothing(self, victim: int) -> bool:
        """Return whether the victim's blocks, or those of a request that would give up its blocks
        first, are not free at once, as they wait for the commit of a frame (P17)."""
        has_store = self.transfers is not None
        givers = self._list_idle() if has_store and len(self.running) == 1 else []
        return any(self._find_fence(slot) is not None for slot in (*givers[:1], victim))

    def _select_victim(self) -> int:
        """Return the position in `running` of the request to preempt (P16).

        FCFS: the last. Continuum: the last of those whose job has no pinned blocks, if there is
        one. Priority: the one that would wait longest, in the order of the queues; with any other
        choice among equals, two requests may preempt each other for ever (P10).
        """
        rank_of, running, last = self.table.rank_of, self.running, len(self.running) - 1
        if self.pins is not None:
            return next((at for at in range(last, -1, -1) if not self._is_warm(running[at])), last)
        if self.config.policy is not Policy.PRIORITY:
            return last
        return max(range(len(running)), key=lambda position: rank_of(running[position]))

    def _unschedule(self, victim: int, step: Step) -> None:
        """Remove the victim's row, if it has one in this step: its tokens return to the budget."""
        row = step.rows.pop(victim, None)
        step.copies.pop(victim, None)
        if row is not None:
            step.budget += row[0]
            if self.encoder is not None:
                self._undo_encoding(self.encoder, victim, step)

    def _take_drafts(self, slot: int, num_scheduled: int) -> TokenIds:
        """Return the drafts among the scheduled tokens; drafts that did not fit are discarded
        (P24)."""
        table = self.table
        spec = table.spec_token_ids[slot]
        table.spec_token_ids[slot] = ()
        before_drafts = table.num_known[slot] + table.num_output_placeholders[slot]
        num_drafts = num_scheduled + table.num_computed[slot] - before_drafts
        return spec[:num_drafts] if num_drafts > 0 else ()
