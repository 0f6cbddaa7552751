"""Planning: one Schedule, from the token budget to the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Final

from blockstep.impl.encoder import EncoderCache
from blockstep.impl.host.admission import WaitingPhase
from blockstep.impl.host.groups import GroupMemory
from blockstep.impl.host.masks import Masks
from blockstep.impl.host.running import RunningPhase
from blockstep.impl.host.step import RunningRow, Step
from blockstep.impl.host.turns import Turns
from blockstep.impl.refusals import schedule_problem
from blockstep.spec.vocabulary import (
    BlockId,
    CachedRow,
    NewRow,
    PauseState,
    Plan,
    Rejected,
    RequestId,
    TokenIds,
)

_NOBODY: Final[tuple[()]] = ()
_NO_MASKS: Final = (False, False)


class Planning(RunningPhase, WaitingPhase, Masks, Turns):
    """Runs both phases, and plans what changed since the previous plan (P26)."""

    def _schedule(self) -> Plan | Rejected:
        problem = schedule_problem(self.config, len(self.frames))
        if problem is not None:
            return problem
        if self.groups is not None:
            self.groups.begin_step()
        if self.pins is not None:
            self._begin_with_pins(self.pins)
        step = Step(self._step_budget(), self.config.encoder_compute_budget)
        self._schedule_running(step)
        if self.config.admission_high_blocks:
            self.is_closed = self._is_closed_behind(step)
        may_admit = not (step.preempted_req_ids or step.awaits_answer or self.is_closed)
        if may_admit and self.pause_state is PauseState.UNPAUSED:
            self._schedule_waiting(step)
        return self._issue_plan(step)

    def _step_budget(self) -> int:
        if self.pause_state is PauseState.PAUSED_ALL:
            return 0
        return self.config.max_num_batched_tokens

    def _issue_plan(self, step: Step) -> Plan:
        """Build the plan of a step, and put its rows in flight as a frame."""
        frame_id = self.next_frame_id
        frame: dict[RequestId, TokenIds | None] = {}
        new: list[NewRow] = []
        cached: list[CachedRow] = []
        requests = self.table.requests
        for slot, row in step.rows.items():
            told = self._running_row(slot, row)
            if slot in step.copies:
                told = replace(told, new_block_ids=self.table.block_tables(slot))
            cached.append(told)
            samples = self._advance(slot, row[0], frame_id)
            frame[told.request_id] = row[2] if samples else None
        for slot, num_scheduled, resumed in step.admitted:
            if resumed:
                cached.append(self._resumed_row(slot, num_scheduled))
            else:
                new.append(self._new_row(slot, num_scheduled))
            samples = self._advance(slot, num_scheduled, frame_id)
            frame[requests[slot].request_id] = () if samples else None
        self.next_frame_id = frame_id + 1
        self.prev_frame_id = frame_id
        self.prev_scheduled_req_ids = list(frame)
        is_masked, is_behind = self._tell_masks(frame) if self.matchers else _NO_MASKS
        if self.async_scheduling:
            self._promise_outputs(frame_id, frame)
        if frame:
            self.frames[frame_id] = frame
        finished = tuple(sorted(self.finished_req_ids))
        self.finished_req_ids.clear()
        preempted = tuple(sorted(step.preempted_req_ids))
        common = self._count_common_prefix()
        zeroed = () if self.groups is None else self._list_to_zero(self.groups, step)
        plan = Plan(
            frame_id,
            tuple(new),
            tuple(cached),
            finished,
            preempted,
            _NOBODY,
            _NOBODY,
            common,
            zeroed,
        )
        if is_masked:
            plan = replace(
                plan,
                has_structured_output_requests=True,
                pending_structured_output_tokens=is_behind,
            )
        if step.copies:
            remapped = [requests[slot].request_id for slot in step.copies if slot in step.rows]
            plan = replace(
                plan,
                remapped_req_ids=tuple(sorted(remapped)),
                block_copies=tuple(chain.from_iterable(step.copies.values())),
            )
        if step.loads and self.transfers is not None:
            self.transfers.open_frame(frame_id, step.loads)
            plan = replace(plan, kv_loads=tuple(step.loads))
        if step.saves:
            plan = replace(plan, kv_saves=tuple(step.saves))
        return plan if self.encoder is None else self._tell_encoder(self.encoder, step, plan)

    def _tell_encoder(self, encoder: EncoderCache, step: Step, plan: Plan) -> Plan:
        """Return the plan with the encoder inputs to compute, load and drop."""
        freed = encoder.announce()  # entries that these rows release are reported in the next plan
        self._release_items(encoder, [*step.rows, *[row[0] for row in step.admitted]])
        return replace(
            plan,
            scheduled_encoder_inputs=self._list_inputs(step),
            external_encoder_inputs=self._list_inputs(step, external=True),
            free_encoder_mm_hashes=freed,
        )

    def _list_to_zero(self, groups: GroupMemory, step: Step) -> tuple[BlockId, ...]:
        """Return the blocks to zero: attention blocks taken by rows that are still in the plan."""
        taken = [row[1] for row in step.rows.values() if row[1]]
        return groups.list_to_zero(taken + step.taken)

    def _count_common_prefix(self) -> tuple[int, ...]:
        """Return, for each group, the leading blocks that all running requests share (P26)."""
        running = self.running
        if not running or not self.config.enable_prefix_caching:
            return self._nothing_common
        holdings, num_running = self.table.holdings[running[0]], len(running)
        if self.groups is None:
            return (self._count_common_blocks(0, holdings[0].blocks, num_running),)
        return tuple(
            [
                self._count_common_blocks(g.number, holdings[g.number].blocks, num_running)
                if g.is_whole
                else 0
                for g in self.groups.groups
            ]
        )

    def _count_common_blocks(self, group: int, blocks: list[BlockId], num_running: int) -> int:
        """Return the leading blocks that all running requests share in a group with full attention.

        Without sessions, branches, pins and a store only running requests hold blocks, each of them
        a block once: a block with as many holders as requests run is in all tables. Blocks taken
        later are not shared, so the count stays until some request starts or stops to hold a cached
        block.
        """
        if num_running == 1:
            return len(blocks)
        may_others_hold = self.transfers is not None or self.config.enable_forks
        if self.sessions or may_others_hold or (self.pins and self.pins.pins):
            tables = [self.table.holdings[slot][group].blocks for slot in self.running]
            places = enumerate(zip(*tables, strict=False))
            differing = (i for i, of_all in places if len({*of_all}) > 1)
            return next(differing, min(map(len, tables)))
        refs = self.pool.ref_counts
        if not blocks or refs[blocks[0]] != num_running:
            return 0
        moment = (num_running, self.pool.num_moves)
        known = self._common.get(group)
        if known is None or known[0] != moment:
            differing = (i for i, block in enumerate(blocks) if refs[block] != num_running)
            known = self._common[group] = (moment, next(differing, len(blocks)))
        return known[1]

    def _advance(self, slot: int, num_scheduled: int, frame_id: int) -> bool:
        """Count the scheduled tokens as computed; return whether the row samples."""
        table = self.table
        computed = table.num_computed[slot] + num_scheduled
        samples = computed >= table.num_known[slot] + table.num_output_placeholders[slot]
        table.num_computed[slot] = computed
        table.is_prefill_chunk[slot] = not samples
        table.last_frame[slot] = frame_id
        return samples

    def _running_row(self, slot: int, row: RunningRow) -> CachedRow:
        table = self.table
        num_scheduled, taken, drafts = row
        return CachedRow(
            table.requests[slot].request_id,
            False,
            taken or self._no_new_blocks,
            None if self._was_in_previous_plan(slot) else table.all_token_ids(slot),
            table.num_computed[slot],
            table.num_known[slot] + table.num_output_placeholders[slot] - table.num_prompt[slot],
            num_scheduled,
            drafts,
        )

    def _resumed_row(self, slot: int, num_scheduled: int) -> CachedRow:
        table = self.table
        return CachedRow(
            table.requests[slot].request_id,
            resumed=True,
            new_block_ids=table.block_tables(slot),
            all_token_ids=table.all_token_ids(slot),
            num_computed_tokens=table.num_computed[slot],
            num_output_tokens=table.num_outputs(slot) + table.num_output_placeholders[slot],
            num_scheduled_tokens=num_scheduled,
        )

    def _new_row(self, slot: int, num_scheduled: int) -> NewRow:
        table = self.table
        return NewRow(
            table.requests[slot],
            block_ids=table.block_tables(slot),
            num_computed_tokens=table.num_computed[slot],
            num_scheduled_tokens=num_scheduled,
            output_token_ids=table.output_token_ids(slot),  # only a branch has outputs
        )

    def _was_in_previous_plan(self, slot: int) -> bool:
        return self.table.last_frame[slot] == self.prev_frame_id
