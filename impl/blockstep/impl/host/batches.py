"""The running phase for many rows at once: the same decisions as `running`, through numpy.

Nothing is short for most rows of most steps, so they are planned together; where the blocks run
out, the row that needs one makes room as in `running`, and the rest goes on together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.host.running import RunningPhase
from blockstep.impl.host.step import Batch, Step

_NO_ROWS: Final = np.empty(0, np.int64)
_NO_BLOCKS: Final = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class RunningView:
    """Who runs, as arrays; built anew only when somebody else runs."""

    key: bytes
    """The slots of `Core.running`, and so what this was built of."""
    num_born: int
    """Requests that there had ever been: a slot may have changed hands."""
    slots: NDArray[np.int64]
    """[running]"""
    births: NDArray[np.int64]
    """[running]; see `RequestTable.births`."""
    request_ids: NDArray[np.object_]
    """[running]"""


class BatchedRunningPhase(RunningPhase):
    """Schedules running requests in batches, from `vector_at` of them on."""

    def _schedule_batches(self, step: Step) -> None:
        position = 0
        while position < len(self.running) and step.budget > 0:
            slots = self._view_running().slots
            batch, places = self._plan_batch(slots[position:] if position else slots, step.budget)
            asking, needed = self._blocks_needed_each(batch)
            free = self.pool.num_free
            if int(needed.sum()) <= free:
                self._commit_batch(batch, asking, needed, step)
                return
            # The first that is short makes room. What it asks for was counted before anybody gave
            # way, as for a single row; those after it are looked at again.
            first = int(np.searchsorted(np.cumsum(needed), free, side="right"))
            short = int(asking[first])
            place = position + (short if places is None else int(places[short]))
            self._commit_batch(_slice(batch, 0, short), asking[:first], needed[:first], step)
            row, due = _slice(batch, short, short + 1), needed[first : first + 1]
            position = self._make_room(int(row.slots[0]), int(due[0]), place, step)
            if position < 0:
                return
            self._commit_batch(row, np.zeros(1, np.int64), due, step)
            position += 1

    def _view_running(self) -> RunningView:
        key, view = self.running.tobytes(), self._running_view
        if view is None or view.key != key or view.num_born != self.table.num_born:
            slots = np.frombuffer(key, np.int64)
            columns = self.table.columns
            view = RunningView(
                key,
                self.table.num_born,
                slots,
                columns.births.take(slots),
                columns.request_ids.take(slots),
            )
            self._running_view = view
        return view

    def _plan_batch(
        self, slots: NDArray[np.int64], budget: int
    ) -> tuple[Batch, NDArray[np.int64] | None]:
        """The rows of `slots` that run, and where each stands among them; None: all of them run."""
        columns = self.table.columns
        computed, known = columns.num_computed.take(slots), columns.num_known.take(slots)
        scheduled = self._tokens_to_run_each(slots, computed, known)
        places = None
        if int(scheduled.sum()) > budget:
            before = np.cumsum(scheduled) - scheduled
            scheduled = np.minimum(scheduled, np.maximum(budget - before, 0)).astype(np.int32)
        if np.count_nonzero(scheduled) < len(slots):
            places = scheduled.nonzero()[0]
            slots, scheduled = slots[places], scheduled[places]
            computed, known = computed[places], known[places]
        return Batch(slots, scheduled, computed, known, _NO_ROWS, _NO_BLOCKS, {}), places

    def _blocks_needed_each(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """`_blocks_needed`: the rows that need some, and how many each."""
        ends = batch.num_computed + batch.num_scheduled
        if self.num_lookahead_tokens:
            ends = np.minimum(ends + self.num_lookahead_tokens, self.max_model_len)
        held = self.table.columns.num_held_blocks.take(batch.slots)
        asking = (ends > held * self.block_size).nonzero()[0]
        return asking, -(-ends[asking] // self.block_size) - held[asking]

    def _tokens_to_run_each(
        self, slots: NDArray[np.int64], computed: NDArray[np.int32], known: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """`_tokens_to_run` of each, but for the budget; 0 where it has nothing to run."""
        gap = known - computed
        columns = self.table.columns
        if self.config.num_speculative_tokens:
            spec = self.table.spec_token_ids
            gap += np.fromiter((len(spec[slot]) for slot in slots.tolist()), np.int32, len(slots))
        if self.async_scheduling:
            promised = columns.num_output_placeholders.take(slots)
            gap += promised
            ends = columns.end_by_max_tokens.take(slots)
            gap[(promised > 0) & (computed + 2 - promised >= ends)] = 0
        most = np.minimum(self.max_model_len - 1 - computed, self.max_tokens_per_row)
        found: NDArray[np.int32] = np.maximum(np.minimum(gap, most), 0)
        return found

    def _commit_batch(
        self, batch: Batch, asking: NDArray[np.int64], needed: NDArray[np.int32], step: Step
    ) -> None:
        """Take the blocks, publish what fills, and put the rows into the plan."""
        if not len(batch.slots):
            return
        if len(asking):
            self._take_blocks_each(batch, asking, needed)
        if self.config.enable_prefix_caching:
            self._publish_each(batch)
        if self.config.num_speculative_tokens:
            self._take_drafts_each(batch)
        step.batches.append(batch)
        step.budget -= int(batch.num_scheduled.sum())

    def _take_blocks_each(
        self, batch: Batch, asking: NDArray[np.int64], needed: NDArray[np.int32]
    ) -> None:
        batch.block_ids = self.pool.take_many(int(needed.sum()))
        batch.block_rows = asking
        if len(batch.block_ids) > len(asking):
            batch.block_rows = np.repeat(asking, needed)
        slots = batch.slots[batch.block_rows]
        tables = self.table.block_tables
        for slot, block in zip(slots.tolist(), batch.block_ids.tolist(), strict=True):
            tables[slot].append(block)
        self.table.columns.num_held_blocks[batch.slots[asking]] += needed

    def _publish_each(self, batch: Batch) -> None:
        """`_publish` for the rows that fill a block."""
        written = np.minimum(batch.num_computed + batch.num_scheduled, batch.num_known)
        settled = self.table.columns.num_cached_blocks.take(batch.slots)
        filling = (written >= (settled + 1) * self.block_size).nonzero()[0]
        if len(filling):
            full = written[filling] // self.block_size
            self._publish_rows(batch.slots[filling], settled[filling], full)

    def _take_drafts_each(self, batch: Batch) -> None:
        """`_take_drafts` for the rows that have some."""
        spec, drafts = self.table.spec_token_ids, batch.drafts
        for row, slot in enumerate(batch.slots.tolist()):
            if spec[slot]:
                taken = self._take_drafts(slot, int(batch.num_scheduled[row]))
                if taken:
                    drafts[row] = taken


def _slice(batch: Batch, start: int, end: int) -> Batch:
    """Some rows of a batch that has taken nothing yet."""
    return Batch(
        batch.slots[start:end],
        batch.num_scheduled[start:end],
        batch.num_computed[start:end],
        batch.num_known[start:end],
        _NO_ROWS,
        _NO_BLOCKS,
        {},
    )
