"""Issuing: what a step has decided becomes a plan in arrays, and its rows a frame in flight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blockstep.impl.arrays import ArrayPlan
from blockstep.impl.host.admission import WaitingPhase
from blockstep.impl.host.batches import BatchedRunningPhase
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.step import Batch, Step
from blockstep.spec.vocabulary import FrameId


class Issuing(BatchedRunningPhase, WaitingPhase):
    """Turns a step with batches into an `ArrayPlan` (P26)."""

    def _issue_arrays(self, step: Step) -> ArrayPlan:
        """Count the scheduled tokens as computed, and tell what changed since the plan before."""
        frame_id = self.next_frame_id
        rows = self._join_rows(step)
        columns = self.table.columns
        slots, num_running = rows.slots, len(rows.slots) - len(step.admitted)
        is_same = columns.last_frame.take(slots[:num_running]) == self.prev_frame_id
        missed = () if np.count_nonzero(is_same) == num_running else (~is_same).nonzero()[0]
        names = self._names_of(slots)
        plan = ArrayPlan(
            frame_id,
            slots,
            names,
            rows.num_computed,
            rows.num_scheduled,
            rows.num_known - columns.num_prompt.take(slots),
            self._advance_each(rows, frame_id),
            rows.block_rows,
            rows.block_ids,
            rows.drafts,
            {int(row): self.table.all_token_ids(int(slots[row])) for row in missed},
            {},
            [],
            tuple(sorted(self.finished_req_ids)),
            tuple(sorted(step.preempted_req_ids)),
        )
        for row, (slot, _, resumed) in enumerate(step.admitted, num_running):
            if resumed:
                plan.resumed_rows.append(row)
                plan.all_token_ids[row] = self.table.all_token_ids(slot)
            else:
                plan.new_rows[row] = self.table.requests[slot]
        if self.async_scheduling:
            self._promise_each(plan)
        self._close_plan(frame_id, self._open_frame(plan, names))
        return plan

    def _close_plan(self, frame_id: FrameId, frame: Frame) -> None:
        self.next_frame_id = frame_id + 1
        self.prev_frame_id = frame_id
        self.prev_scheduled_req_ids = frame
        if len(frame):
            self.frames[frame_id] = frame
        self.finished_req_ids.clear()

    def _open_frame(self, plan: ArrayPlan, names: NDArray[np.object_]) -> Frame:
        view = self._running_view
        if view is not None and plan.slots is view.slots:
            births = view.births
        else:
            births = self.table.columns.births.take(plan.slots)
        return Frame(plan.slots, births, names, plan.samples, plan.draft_token_ids)

    def _names_of(self, slots: NDArray[np.int64]) -> NDArray[np.object_]:
        view = self._running_view
        if view is not None and slots is view.slots:
            return view.request_ids
        return self.table.columns.request_ids.take(slots)

    def _advance_each(self, rows: Batch, frame_id: FrameId) -> NDArray[np.bool_] | None:
        """`_advance` for all rows: who samples; None: all of them."""
        columns, slots = self.table.columns, rows.slots
        computed = rows.num_computed + rows.num_scheduled
        samples = computed >= rows.num_known
        columns.num_computed[slots] = computed
        columns.is_prefill_chunk[slots] = ~samples
        columns.last_frame[slots] = frame_id
        return None if np.count_nonzero(samples) == len(slots) else samples

    def _promise_each(self, plan: ArrayPlan) -> None:
        """`_promise_outputs` for a plan in arrays."""
        slots = plan.slots if plan.samples is None else plan.slots[plan.samples]
        self.table.columns.num_output_placeholders[slots] += 1
        for row, drafts in plan.draft_token_ids.items():
            if plan.samples is None or plan.samples[row]:
                self.table.num_output_placeholders[int(plan.slots[row])] += len(drafts)
        if self.draft_placeholders:
            for slot in slots.tolist():
                self.table.spec_token_ids[slot] = self.draft_placeholders
            self._drop_unused_placeholders(plan.frame_id)

    # the rows of all phases, side by side

    def _join_rows(self, step: Step) -> Batch:
        """All rows in order of scheduling; `num_known` counts promised tokens as well."""
        parts = list(step.batches)
        if step.admitted:
            parts.append(self._gather_admitted(step))
        joined = parts[0] if len(parts) == 1 else _concatenate(parts)
        if self.async_scheduling:
            promised = self.table.columns.num_output_placeholders.take(joined.slots)
            joined.num_known = joined.num_known + promised
        return joined

    def _gather_admitted(self, step: Step) -> Batch:
        """The admitted rows; all blocks of each are new to the worker."""
        slots = np.array([slot for slot, _, _ in step.admitted], np.int64)
        tables = [self.table.block_tables[slot] for slot, _, _ in step.admitted]
        return Batch(
            slots,
            np.array([count for _, count, _ in step.admitted], np.int32),
            self.table.columns.num_computed.take(slots),
            self.table.columns.num_known.take(slots),
            np.repeat(np.arange(len(tables)), [len(held) for held in tables]),
            np.concatenate([np.array(held, np.int32) for held in tables]),
            {},
        )


def _concatenate(parts: list[Batch]) -> Batch:
    starts = [0, *np.cumsum([len(part.slots) for part in parts]).tolist()]
    return Batch(
        np.concatenate([part.slots for part in parts]),
        np.concatenate([part.num_scheduled for part in parts]),
        np.concatenate([part.num_computed for part in parts]),
        np.concatenate([part.num_known for part in parts]),
        np.concatenate([part.block_rows + s for part, s in zip(parts, starts, strict=False)]),
        np.concatenate([part.block_ids for part in parts]),
        {
            row + start: drafts
            for part, start in zip(parts, starts, strict=False)
            for row, drafts in part.drafts.items()
        },
    )
