"""Arrivals: what a worker reports of transfers, in any state of the requests (P18)."""

from __future__ import annotations

from blockstep.impl.host.sessions import Sessions
from blockstep.impl.host.table import Holding
from blockstep.impl.host.transfers import Transfers, find_valid
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    BlockTables,
    FinishReason,
    FrameId,
    KVLoad,
    KVLoadFailurePolicy,
    KVTransfers,
    OutputRow,
    Outputs,
    RequestId,
    Status,
)


class Arrivals(Sessions):
    """Takes reports: invalid blocks before the rows of a frame, all else behind them."""

    def _take_report(self, report: KVTransfers) -> Outputs:
        """A report without an answer to a plan."""
        if self.transfers is None:
            return Outputs()
        failed = self._take_invalid(self.transfers, report)
        rows = self._end_failed(failed)
        self._take_finished(self.transfers, report)
        return Outputs(tuple(rows), self._tell())

    def _take_invalid(
        self, transfers: Transfers, report: KVTransfers, frame_id: FrameId | None = None
    ) -> list[RequestId]:
        """What could not be loaded is not computed; who ends by that.

        Of the frame that is answered, if any, what has come is there for others from now on.
        """
        invalid = frozenset(report.invalid_block_ids) - {NULL_BLOCK}
        failed = self._take_invalid_of_parked(invalid) if invalid else []
        for load in () if frame_id is None else transfers.loads.get(frame_id, ()):
            slot = self.table.slot_of.get(load.request_id)
            if slot is None:
                continue
            valid = self._find_valid_of(load, invalid)
            is_by_this = transfers.unsettled.get(load.request_id) == frame_id
            if valid is None:
                if is_by_this:
                    del transfers.unsettled[load.request_id]
                    self._publish(slot, self.table.num_computed[slot], 0)
            elif is_by_this or self._awaits_rows(slot):
                self._drop_rows_behind(slot)
                if self.config.kv_load_failure_policy is KVLoadFailurePolicy.FAIL:
                    failed.append(load.request_id)
                else:
                    self._recompute(transfers, slot, valid)
        return failed

    def _take_invalid_of_parked(self, invalid: frozenset[int]) -> list[RequestId]:
        """The same of loads that come later; all of it is computed behind the hit if it must."""
        table, failed = self.table, []
        for slot in (*self.skipped_waiting, *self.waiting):
            if table.statuses[slot] is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            firsts = [holding.num_cached for holding in table.holdings[slot]]
            valid = self._find_valid(table.block_tables(slot), firsts, invalid)
            if valid is None:
                continue
            if self.config.kv_load_failure_policy is KVLoadFailurePolicy.FAIL:
                failed.append(table.requests[slot].request_id)
            else:
                table.num_computed[slot] = min(table.num_computed[slot], valid)
        return failed

    def _find_valid_of(self, load: KVLoad, invalid: frozenset[int]) -> int | None:
        """Leading tokens of a load of a frame that are there; None if all are."""
        if not invalid:
            return None
        firsts = [load.num_computed_tokens // size for size in self.config.block_sizes]
        return self._find_valid(load.block_ids, firsts, invalid)

    def _find_valid(
        self, block_tables: BlockTables, firsts: list[int], invalid: frozenset[int]
    ) -> int | None:
        """Leading tokens that can be kept of a load; None if all can.

        None of them where windows have left what a shorter prefix would read.
        """
        valid = find_valid(block_tables, firsts, self.config.block_sizes, invalid)
        is_whole = self.groups is None or self.groups.is_whole
        return valid if valid is None or is_whole else 0

    def _awaits_rows(self, slot: int) -> bool:
        """Whether one that was preempted since has not begun anew, for a row in flight samples: it
        stands on the load, in this frame or behind it."""
        request_id = self.table.requests[slot].request_id
        return self.table.statuses[slot] is not Status.RUNNING and any(
            frame.get(request_id) is not None for frame in self.frames.values()
        )

    def _recompute(self, transfers: Transfers, slot: int, valid: int) -> None:
        """Some of a load is not there: whatever was made of it counts for nothing (P19)."""
        table = self.table
        table.num_output_placeholders[slot] = 0
        if transfers.unsettled.pop(table.requests[slot].request_id, None) is None:
            return  # it was preempted since
        if self.groups is not None and not self.groups.is_whole:
            request_id = table.requests[slot].request_id
            self.running.remove(slot)
            self._preempt(slot)
            # No plan names it as preempted: the worker is told when it begins anew.
            in_plan = [name for name in self.prev_scheduled_req_ids if name != request_id]
            self.prev_scheduled_req_ids = in_plan
        else:
            table.num_computed[slot] = valid
            table.spec_token_ids[slot] = ()
            table.is_prefill_chunk[slot] = True
            self._publish(slot, valid, 0)

    def _end_failed(self, failed: list[RequestId]) -> list[OutputRow]:
        """End by an error those who fail by a load. No row delivers to them, so nothing has ended
        them before, and nobody is parked for one load and awaits another."""
        rows: list[OutputRow] = []
        for request_id in failed:
            slot = self.table.slot_of[request_id]
            num_cached = max(self.table.num_cached_tokens[slot], 0)
            self._finish(slot)
            row = OutputRow(request_id, (), FinishReason.ERROR, num_cached_tokens=num_cached)
            rows.append(row)
        return rows

    def _take_finished(self, transfers: Transfers, report: KVTransfers) -> None:
        """Loads and stores that have come to their end; what is said of anybody else is nothing."""
        table = self.table
        for request_id in report.finished_recving:
            slot = table.slot_of.get(request_id)
            if slot is None:
                self._let_go(request_id, transfers.release(request_id, is_recving=True))
            elif table.statuses[slot] is Status.WAITING_FOR_REMOTE_KVS:
                transfers.received.add(request_id)
        for request_id in report.finished_sending:
            self._let_go(request_id, transfers.release(request_id, is_recving=False))

    def _let_go(self, request_id: RequestId, block_tables: BlockTables) -> None:
        """Free what an ended request held, once no frame in flight names it."""
        assert self.groups is not None, "a store has groups of blocks, if only one"
        holdings = [Holding(list(table)) for table in block_tables]
        fence = self._get_fence(self.last_frame_of_ended.get(request_id, -1))
        if fence is None:
            self.groups.free(holdings)
        else:
            self._free_behind(fence)(self.groups.clear(holdings))
