"""Arrivals: what a worker reports about transfers, for requests in any status (P18)."""

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
    """Takes reports: invalid blocks before the rows of a frame, all else after them."""

    def _take_report(self, report: KVTransfers) -> Outputs:
        """Take a report that comes without a commit."""
        if self.transfers is None:
            return Outputs()
        failed = self._take_invalid(self.transfers, report)
        rows = self._end_failed(failed)
        self._take_finished(self.transfers, report)
        return Outputs(tuple(rows), self._tell())

    def _take_invalid(
        self, transfers: Transfers, report: KVTransfers, frame_id: FrameId | None = None
    ) -> list[RequestId]:
        """Uncompute the tokens of blocks that could not be loaded; return the requests that fail.

        With `frame_id`, that frame is being committed: the blocks that it has loaded are published.
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
        """Uncompute the tokens of invalid blocks of requests that wait for a load.

        Returns the requests that fail.
        """
        table, failed = self.table, []
        for slot in (*self.skipped_waiting, *self.waiting):
            if table.statuses[slot] is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            firsts = [holding.num_cached for holding in table.holdings[slot]]
            # Spare blocks, for states of drafts, are behind the loaded ones.
            loaded = tuple(
                blocks[: -(-table.num_computed[slot] // size)]
                for blocks, size in zip(
                    table.block_tables(slot), self.config.block_sizes, strict=True
                )
            )
            valid = self._find_valid(loaded, firsts, invalid)
            if valid is None:
                continue
            if self.config.kv_load_failure_policy is KVLoadFailurePolicy.FAIL:
                failed.append(table.requests[slot].request_id)
            else:
                table.num_computed[slot] = min(table.num_computed[slot], valid)
        return failed

    def _find_valid_of(self, load: KVLoad, invalid: frozenset[int]) -> int | None:
        """Return the leading tokens of a frame's load that are valid; None if all are."""
        if not invalid:
            return None
        firsts = [load.num_computed_tokens // size for size in self.config.block_sizes]
        return self._find_valid(load.block_ids, firsts, invalid)

    def _find_valid(
        self, block_tables: BlockTables, firsts: list[int], invalid: frozenset[int]
    ) -> int | None:
        """Return the leading tokens of a load that can be kept; None if all can.

        Returns 0 if windows have freed blocks that a shorter prefix would read.
        """
        valid = find_valid(block_tables, firsts, self.config.block_sizes, invalid)
        is_whole = self.groups is None or self.groups.is_whole
        return valid if valid is None or is_whole else 0

    def _awaits_rows(self, slot: int) -> bool:
        """Return whether a request that was preempted since has a row in flight that samples.

        Then it was not admitted again, and that row's tokens depend on the load.
        """
        request_id = self.table.requests[slot].request_id
        return self.table.statuses[slot] is not Status.RUNNING and any(
            frame.get(request_id) is not None for frame in self.frames.values()
        )

    def _recompute(self, transfers: Transfers, slot: int, valid: int) -> None:
        """Uncompute the tokens after a failed load, and discard the outputs of their rows (P19)."""
        table = self.table
        table.num_output_placeholders[slot] = 0
        if transfers.unsettled.pop(table.requests[slot].request_id, None) is None:
            return  # it was preempted since
        if self.groups is not None and not self.groups.is_whole:
            request_id = table.requests[slot].request_id
            self.running.remove(slot)
            self._preempt(slot)
            # No plan reports it as preempted: the worker learns it when the request is resumed.
            in_plan = [name for name in self.prev_scheduled_req_ids if name != request_id]
            self.prev_scheduled_req_ids = in_plan
        else:
            table.num_computed[slot] = valid
            table.spec_token_ids[slot] = ()
            table.is_prefill_chunk[slot] = True
            self._publish(slot, valid, 0)

    def _end_failed(self, failed: list[RequestId]) -> list[OutputRow]:
        """Finish with an error the requests that fail by their load.

        No row of the frame delivers to them, so they are unfinished; and a request that
        waits for a load has no other.
        """
        rows: list[OutputRow] = []
        for request_id in failed:
            slot = self.table.slot_of[request_id]
            num_cached = max(self.table.num_cached_tokens[slot], 0)
            self._finish(slot)
            row = OutputRow(request_id, (), FinishReason.ERROR, num_cached_tokens=num_cached)
            rows.append(row)
        return rows

    def _take_finished(self, transfers: Transfers, report: KVTransfers) -> None:
        """Take loads and stores that have finished; ids of other requests are ignored."""
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
        """Free blocks that a finished request held, once no frame in flight accesses them."""
        assert self.groups is not None, "a store has groups of blocks, if only one"
        holdings = [Holding(list(table)) for table in block_tables]
        fence = self._get_fence(self.last_frame_of_ended.get(request_id, -1))
        if fence is None:
            self.groups.free(holdings)
        else:
            self._free_behind(fence)(self.groups.clear(holdings))
