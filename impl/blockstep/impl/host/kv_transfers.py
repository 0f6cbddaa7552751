"""Transfers: the offers of a store, the loads under way, and the blocks held for them (P17 to P19).

Machine code admits requests with what a store loads; what a store and a worker say is taken here:

    | local hit | loaded | computed in this step |
                         ^ start of the row, if the load finishes within the step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from blockstep.impl.array_plans import ArrayPlan
from blockstep.impl.host import state as c
from blockstep.impl.host.blocks import free_deferred, free_list, touch_list
from blockstep.impl.host.grammar_bitmask import Masks
from blockstep.impl.host.lives import drop_blocks, preempt_one, publish_computed
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.state import Int64s, reserve_deferred
from blockstep.spec import vocabulary as v


@dataclass(eq=False)
class Transfers:
    """The offers of a store, the loads under way, and the blocks that a transfer holds."""

    config: v.Config
    requests: Requests
    masks: Masks
    last_frames: Mapping[v.RequestId, v.FrameId]
    """The last frame in flight with a row of each finished request, if there is one."""
    offers: dict[v.RequestId, v.KVOffer] = field(default_factory=dict)
    """The offers for unfinished requests; without one, the store neither loads nor stores KV."""
    loads: dict[v.FrameId, tuple[v.KVLoad, ...]] = field(default_factory=dict)
    """For frames in flight, the loads that finish before their rows run, in order."""
    held: dict[v.RequestId, v.HeldBlocks] = field(default_factory=dict)
    """The blocks of finished requests that a transfer still uses."""

    def __post_init__(self) -> None:
        groups = self.requests.state.groups
        self._is_whole = bool((groups[:, c.KIND] == c.IS_FULL).all())
        """Whether in all groups later tokens read every token."""

    # What a store says

    def take_offer(self, offer: v.KVOffer) -> None:
        """Set the store's offer for a request; ignored if the request is not unfinished."""
        slot = self.requests.slot_of.get(offer.request_id)
        if slot is None:
            return
        if offer == v.KVOffer(offer.request_id):
            self.offers.pop(offer.request_id, None)
        else:
            self.offers[offer.request_id] = offer
        row = self.requests.state.requests[slot]
        row[c.OFFERED] = c.NONE if offer.num_tokens is None else offer.num_tokens
        if self.requests.requests[slot].skip_reading_prefix_cache:  # it does not ask
            row[c.OFFERED] = 0
        row[c.IS_OFFER_ASYNC] = offer.is_async
        row[c.MAY_KEEP] = row[c.MAY_KEEP] & ~c.IS_SENT | c.IS_SENT * offer.delays_free

    def clear_offers(self) -> None:
        """Forget all offers."""
        for name in [*self.offers]:
            self.take_offer(v.KVOffer(name))

    # A plan

    def add_to(self, plan: ArrayPlan) -> None:
        """Add the loads of a step to its plan, and what of its preempted requests is saved."""
        s = self.requests.state
        if s.scalars[c.NUM_SAVES]:
            rows = s.loads[: s.scalars[c.NUM_SAVES], :3].tolist()
            plan.kv_saves = tuple([self._make_save(*row) for row in rows])
        if not s.scalars[c.NUM_LOADS]:
            return
        loads = [self._make_load(*row) for row in s.loads[: s.scalars[c.NUM_LOADS]].tolist()]
        plan.kv_loads = tuple(loads)
        at_once = tuple([load for load in loads if not load.is_async])
        if at_once:
            self.loads[plan.frame_id] = at_once

    def _make_load(self, slot: int, num_hit: int, num_external: int, is_async: int) -> v.KVLoad:
        tables = self._list_loaded(slot, num_hit + num_external)
        name = self.requests.requests[slot].request_id
        return v.KVLoad(name, tables, num_hit, num_external, bool(is_async))

    def _make_save(self, slot: int, batch_row: int, num_tokens: int) -> v.KVSave:
        pairs = zip(self.requests.state.block_tables, self.config.block_sizes, strict=True)
        tables = [tuple(table[batch_row, : num_tokens // size].tolist()) for table, size in pairs]
        return v.KVSave(self.requests.requests[slot].request_id, tuple(tables), num_tokens)

    def begin_anew(self, slot: int) -> tuple[Int64s, int]:
        """Free the blocks of a request after an empty load; return what `restore` needs.

        Its next admission looks for hits again.
        """
        s = self.requests.state
        kept = s.holdings[slot].copy(), int(s.scalars[c.NUM_DEFERRED])
        drop_blocks(s, slot)
        return kept

    def restore(self, slot: int, kept: tuple[Int64s, int]) -> None:
        """Hold these blocks again, as the request could not be admitted."""
        s = self.requests.state
        s.holdings[slot], num_deferred = kept
        if num_deferred == s.scalars[c.NUM_DEFERRED]:
            for group, table in enumerate(s.block_tables):
                left, held = s.holdings[slot, group, [c.LEFT, c.HELD]].tolist()
                touch_list(s, np.ascontiguousarray(table[s.requests[slot, c.BATCH_ROW], left:held]))
        s.scalars[c.NUM_DEFERRED] = num_deferred
        s.requests[slot, c.STATUS] = c.HAS_LOADED
        s.scalars[c.NUM_RECEIVED] += 1

    def list_received(self) -> list[int]:
        """Return the slots of the skipped queue that have finished their load, in order."""
        statuses, queue = (
            self.requests.state.requests[:, c.STATUS],
            self.requests.list_queue(c.SKIPPED),
        )
        return [slot for slot in queue if statuses[slot] == c.HAS_LOADED]

    # The end of a request

    def hold(self, slot: int) -> bool:
        """Return whether a transfer still uses, and so holds, the blocks of a request that ends."""
        s, name = self.requests.state, self.requests.requests[slot].request_id
        offer = self.offers.pop(name, None)
        is_recving = bool(s.requests[slot, c.STATUS] == c.IS_LOADING)
        is_sending = offer is not None and offer.delays_free
        tables = self.requests.list_tables(slot, c.HELD)
        if not any(tables) or not (is_recving or is_sending):
            return False
        self.held[name] = v.HeldBlocks(name, tables, is_recving, is_sending)
        s.holdings[slot] = 0
        s.scalars[c.NUM_MOVES] += 1
        return True

    # What a worker reports

    def has_news(self, frame_id: v.FrameId, report: v.KVTransfers) -> bool:
        """Return whether `begin_commit` would do anything."""
        has_deferred = bool(self.requests.state.scalars[c.NUM_DEFERRED])
        return report is not v.NO_TRANSFERS or frame_id in self.loads or has_deferred

    def begin_commit(
        self, frame_id: v.FrameId, report: v.KVTransfers
    ) -> tuple[list[v.RequestId], list[int]]:
        """Take what comes before the rows of a frame: blocks that waited for it become free, and
        those that could not be loaded are uncomputed. Returns what `take_invalid` returns."""
        free_deferred(self.requests.state, frame_id)
        return self.take_invalid(report, frame_id)

    def take_invalid(
        self, report: v.KVTransfers, frame_id: v.FrameId | None = None
    ) -> tuple[list[v.RequestId], list[int]]:
        """Uncompute the tokens of blocks that could not be loaded; return the requests that fail,
        and those that were preempted.

        With `frame_id`, that frame is being committed: the blocks that it has loaded are published.
        """
        s, preempted = self.requests.state, list[int]()
        invalid = frozenset(report.invalid_block_ids) - {v.NULL_BLOCK}
        failed = self._take_invalid_of_parked(invalid) if invalid else []
        for load in () if frame_id is None else self.loads.get(frame_id, ()):
            slot = self.requests.slot_of.get(load.request_id)
            if slot is None:
                continue
            row, valid = s.requests[slot], self._find_valid_of(load, invalid)
            is_by_this = row[c.UNSETTLED] - 1 == frame_id
            awaits_rows = row[c.STATUS] != c.IS_RUNNING and row[c.LAST_SAMPLE] >= frame_id
            if valid is None:
                if is_by_this:
                    row[c.UNSETTLED] = 0
                    publish_computed(s, slot)
            elif is_by_this or awaits_rows:
                self._drop_rows(slot)
                if self.config.kv_load_failure_policy is v.KVLoadFailurePolicy.FAIL:
                    failed.append(load.request_id)
                elif self._recompute(slot, valid):
                    preempted.append(slot)
        return failed, preempted

    def take_finished(self, report: v.KVTransfers) -> None:
        """Take loads and stores that have finished; ids of other requests are ignored."""
        s = self.requests.state
        for name in report.finished_recving:
            slot = self.requests.slot_of.get(name)
            if slot is None:
                self._release(name, is_recving=True)
            elif s.requests[slot, c.STATUS] == c.IS_LOADING:
                s.requests[slot, c.STATUS] = c.HAS_LOADED
                s.scalars[c.NUM_RECEIVED] += 1
        for name in report.finished_sending:
            self._release(name, is_recving=False)

    def _take_invalid_of_parked(self, invalid: frozenset[v.BlockId]) -> list[v.RequestId]:
        """Uncompute the tokens of invalid blocks of requests that wait for a load; return the
        requests that fail."""
        s, failed = self.requests.state, []
        for slot in (*self.requests.list_queue(c.SKIPPED), *self.requests.list_queue(c.WAITING)):
            row = s.requests[slot]
            if row[c.STATUS] not in (c.IS_LOADING, c.HAS_LOADED):
                continue
            firsts = s.holdings[slot, :, c.PUBLISHED].tolist()
            # Spare blocks, for states of drafts, are behind the loaded ones.
            valid = self._find_valid(
                self._list_loaded(slot, int(row[c.NUM_COMPUTED])), firsts, invalid
            )
            if valid is None:
                continue
            if self.config.kv_load_failure_policy is v.KVLoadFailurePolicy.FAIL:
                failed.append(self.requests.requests[slot].request_id)
            else:
                row[c.NUM_COMPUTED] = min(row[c.NUM_COMPUTED], valid)
        return failed

    def _find_valid_of(self, load: v.KVLoad, invalid: frozenset[v.BlockId]) -> int | None:
        """Return the leading tokens of a frame's load that are valid; None if all are."""
        firsts = [load.num_computed_tokens // size for size in self.config.block_sizes]
        return self._find_valid(load.block_ids, firsts, invalid) if invalid else None

    def _find_valid(
        self, tables: v.BlockTables, firsts: Sequence[int], invalid: frozenset[v.BlockId]
    ) -> int | None:
        """Return the leading tokens of a load that can be kept; None if all can.

        It is 0 if windows have freed blocks that a shorter prefix would read. `tables` end with the
        last loaded blocks, `firsts` are the indices of the first ones.
        """
        broken = [
            index * size
            for table, first, size in zip(tables, firsts, self.config.block_sizes, strict=True)
            for index, block in enumerate(table[first:], first)
            if block in invalid
        ]
        return (min(broken) if self._is_whole else 0) if broken else None

    def _drop_rows(self, slot: int) -> None:
        """Discard the rows in flight of a request after a failed load, which starts it again."""
        s = self.requests.state
        s.scalars[c.NUM_BORN] += 1
        s.requests[slot, c.BIRTH], s.requests[slot, c.LAST_SAMPLE] = s.scalars[c.NUM_BORN], c.NONE
        s.requests[slot, c.NUM_PROMISED] = s.requests[slot, c.NUM_IN_DOUBT] = 0
        for cut in self.masks.verifiable.values():
            cut.pop(self.requests.requests[slot].request_id, None)

    def _recompute(self, slot: int, valid: int) -> bool:
        """Uncompute the tokens after a failed load (P19); return whether the request is preempted.

        No plan reports it as preempted: the worker learns it when the request is resumed.
        """
        s = self.requests.state
        if not s.requests[slot, c.UNSETTLED]:
            return False  # it was preempted since
        s.requests[slot, c.UNSETTLED] = 0
        if not self._is_whole:
            preempt_one(s, slot)
            return True
        request = self.requests.requests[slot]
        s.requests[slot, c.NUM_COMPUTED], s.requests[slot, c.NUM_DRAFTS] = valid, 0
        s.requests[slot, c.IS_PREFILL] = 1
        s.requests[slot, c.NEXT_ITEM] = self.requests.find_item(request, valid)
        publish_computed(s, slot)
        return False

    def _release(self, name: v.RequestId, *, is_recving: bool) -> None:
        """End the load or the store of a finished request's blocks; they are free once it has no
        other, and no frame in flight accesses them."""
        held = self.held.get(name)
        if held is None:
            return
        held = replace(held, is_recving=False) if is_recving else replace(held, is_sending=False)
        if held.is_recving or held.is_sending:
            self.held[name] = held
            return
        del self.held[name]
        s, last = self.requests.state, self.last_frames.get(name, c.NONE)
        if not s.scalars[c.HAS_FENCES] or last <= s.scalars[c.LAST_ANSWERED]:
            for table in held.block_tables:
                free_list(s, np.array(table, np.int32))
            return
        blocks = [block for table in held.block_tables for block in table if block != v.NULL_BLOCK]
        s = self.requests.state = reserve_deferred(s, len(blocks))
        first = int(s.scalars[c.NUM_DEFERRED])
        for at, block in enumerate(blocks, first):
            s.copies[at] = last, block, at == first
        s.scalars[c.NUM_DEFERRED] = first + len(blocks)

    # What is under way

    def can_reset(self) -> bool:
        """Return whether no load is under way and no transfer holds blocks (P17)."""
        return not self.held and not self._has_status(c.IS_LOADING)

    def snapshot(self) -> v.TransfersSnapshot:
        """Return its canonical state."""
        requests, s = self.requests, self.requests.state
        names = sorted(requests.slot_of)
        rows = {name: s.requests[requests.slot_of[name]] for name in names}
        deferred: list[v.DeferredFree] = []
        for frame_id, block, is_first in s.copies[: s.scalars[c.NUM_DEFERRED]].tolist():
            before = () if is_first else deferred.pop().block_ids
            deferred.append(v.DeferredFree(frame_id, (*before, block)))
        return v.TransfersSnapshot(
            offers=tuple([offer for _, offer in sorted(self.offers.items())]),
            received=tuple([name for name in names if rows[name][c.STATUS] == c.HAS_LOADED]),
            unsettled=tuple([name for name in names if rows[name][c.UNSETTLED]]),
            held=tuple([held for _, held in sorted(self.held.items())]),
            deferred_frees=tuple(deferred),
        )

    def _has_status(self, status: int) -> bool:
        slots = [*self.requests.slot_of.values()]
        return bool((self.requests.state.requests[slots, c.STATUS] == status).any())

    def _list_loaded(self, slot: int, num_tokens: int) -> v.BlockTables:
        """Return the block tables up to the last block of the first `num_tokens` tokens."""
        tables = self.requests.list_tables(slot, c.HELD)
        return tuple(
            [
                table[: -(-num_tokens // size)]
                for table, size in zip(tables, self.config.block_sizes, strict=True)
            ]
        )
