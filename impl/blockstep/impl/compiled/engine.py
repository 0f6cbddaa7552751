"""CompiledEngine: the scheduler as machine code, with the same interface as the host engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np

from blockstep.impl.arrays import ArrayOutputs, ArrayPlan, SlotNames
from blockstep.impl.capabilities import COMPILED
from blockstep.impl.compiled.blocks import withdraw_all
from blockstep.impl.compiled.frames import Frame, RowDrafts
from blockstep.impl.compiled.jit import SLOW_BECAUSE, warn_if_slow
from blockstep.impl.compiled.lives import end, get_tokens, preempt_all
from blockstep.impl.compiled.planning import plan_step
from blockstep.impl.compiled.requests import Requests
from blockstep.impl.compiled.results import (
    BY_EOS,
    BY_LENGTH,
    BY_REPETITION,
    BY_STOP_TOKEN,
    FITS,
    LACKS_MARKS,
    commit_step,
)
from blockstep.impl.compiled.state import (
    GRAMMAR_READY,
    IS_PREFILL,
    IS_RUNNING,
    LAST_FRAME,
    NUM_COMPUTED,
    NUM_DRAFTS,
    NUM_FREE,
    NUM_KNOWN,
    SEAT,
    STATUS,
    TIMES_PREEMPTED,
    TOLD_COMPUTED,
    TOLD_DRAFTS,
    TOLD_OUTPUTS,
    TOLD_SAMPLES,
    TOLD_SCHEDULED,
    Int32s,
)
from blockstep.impl.compiled.view import View
from blockstep.impl.doors import Doors
from blockstep.impl.refusals import bad_result, frame_problem, schedule_problem
from blockstep.spec.vocabulary import (
    Config,
    Drafts,
    DraftsTaken,
    FinishReason,
    FrameId,
    Outputs,
    PauseState,
    Plan,
    Rejected,
    RequestId,
    Snapshot,
    Stats,
    TokenIds,
)

_REASONS: Final = {
    BY_EOS: FinishReason.STOP,
    BY_STOP_TOKEN: FinishReason.STOP,
    BY_LENGTH: FinishReason.LENGTH,
    BY_REPETITION: FinishReason.REPETITION,
}
_NO_COUNTS: Final = np.empty(0, np.int32)
_NO_MARKS: Final = np.empty(0, np.uint8)
_NO_NAMES: Final = SlotNames(np.empty(0, np.object_), np.empty(0, np.int64))


class CompiledEngine(Doors[Frame]):
    """The scheduler and its paged KV memory on one CPU core, compiled by numba.

    Without numba the same functions run as plain Python: the same decisions, slowly, with a
    warning.

    Args:
        config: the constants of the run.

    Raises:
        ConfigError: `list_config_problems` finds a problem in the config.
    """

    slow_because: ClassVar[str] = SLOW_BECAUSE
    """Reason why its times are meaningless here; empty if they are meaningful."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, COMPILED)
        warn_if_slow()
        self.requests = Requests(config)
        self.previous_names = _NO_NAMES
        """Requests of the last plan's rows."""
        self._view = View(self, self.requests)

    def snapshot(self) -> Snapshot:
        """Return the whole state in canonical form. O(blocks and tokens); not part of a step."""
        return self._view.take(self.previous_names.tolist())

    def stats(self) -> Stats:
        """Return the counters since the start (P21)."""
        return self._view.stats()

    def capabilities(self) -> frozenset[str]:
        """Return what the engine implements, as the values of conformance's `Capability`."""
        return COMPILED

    # a step

    def _schedule(self) -> Plan | Rejected:
        plan = self.schedule_arrays()
        return plan if isinstance(plan, Rejected) else plan.build_plan()

    def schedule_arrays(self) -> ArrayPlan | Rejected:
        """Make a plan without an object per row; rejected like the event `Schedule`."""
        if len(self.frames) >= self.config.max_frames_in_flight:
            problem = schedule_problem(self.config, len(self.frames))
            assert problem is not None, "the pipeline is full"
            return problem
        is_open = self.pause_state is not PauseState.PAUSED_ALL
        (
            who, told, ids, num_blocks, num_samples, num_running, num_missed, num_preempted,
        ) = plan_step(
            self.requests.state,
            self.next_frame_id,
            self._previous_id,
            next(iter(self.frames), self.next_frame_id),
            self.config.max_num_batched_tokens if is_open else 0,
            self.pause_state is PauseState.UNPAUSED,
        )  # fmt: skip
        for kept in (who, told, ids):  # the frame keeps them, and machine code trusts them
            kept.flags.writeable = False
        slots, num_rows = who[0], who.shape[1]
        names = SlotNames(self.requests.lend_names(), slots)
        frame_id = self.next_frame_id
        plan = ArrayPlan(
            frame_id,
            slots,
            names,
            told[TOLD_COMPUTED],
            told[TOLD_SCHEDULED],
            told[TOLD_OUTPUTS],
            None if num_samples == num_rows else told[TOLD_SAMPLES] != 0,
            ids[:num_blocks],
            ids[num_blocks : 2 * num_blocks],
            RowDrafts(told[TOLD_DRAFTS], ids) if len(ids) > 2 * num_blocks else {},
            {},
            {},
            [],
            tuple(sorted(self.finished_req_ids)) if self.finished_req_ids else (),
            (),
        )
        if num_preempted or num_missed or num_running < num_rows:
            self._tell_changes(plan, num_running, num_missed, num_preempted)
        if num_rows:
            self.frames[frame_id] = Frame(who, names, told, ids)
        self.finished_req_ids.clear()
        self.previous_names, self._previous_id, self.next_frame_id = names, frame_id, frame_id + 1
        return plan

    def _tell_changes(
        self, plan: ArrayPlan, num_running: int, num_missed: int, num_preempted: int
    ) -> None:
        """Add new, resumed and preempted requests to a plan, and tokens that the worker may
        lack."""
        scratch = self.requests.state.scratch
        if num_preempted:
            names = self.requests.names[scratch[:num_preempted]].tolist()
            plan.preempted_req_ids = tuple(sorted(names))
        for row in scratch[num_preempted : num_preempted + num_missed].tolist():
            plan.all_token_ids[row] = self._get_tokens(int(plan.slots[row]))
        for row, slot in enumerate(plan.slots[num_running:].tolist(), num_running):
            if self.requests.state.requests[slot, TIMES_PREEMPTED]:
                plan.resumed_rows.append(row)
                plan.all_token_ids[row] = self._get_tokens(slot)
            else:
                plan.new_rows[row] = self.requests.requests[slot]

    def commit_arrays(
        self, frame_id: FrameId, token_ids: Int32s, counts: Int32s | None = None
    ) -> ArrayOutputs | Rejected:
        """Commit a frame without an object per row; rejected like the event `Commit`.

        Args:
            frame_id: id of the plan.
            token_ids: [tokens] int32, row after row in the order of the plan; rows that do not
                sample have none.
            counts: [rows] int32, tokens of each row; None: one for each row that samples, so that
                no drafts are accepted.
        """
        if next(iter(self.frames), None) != frame_id:
            problem = frame_problem(frame_id, self.frames)
            assert problem is not None, "it is not the oldest frame"
            return problem
        tokens = np.ascontiguousarray(token_ids, np.int32)
        lengths = None if counts is None else np.ascontiguousarray(counts, np.int32)
        return self._take(frame_id, tokens, lengths)

    def _get_rows(self, frame: Frame) -> Mapping[RequestId, TokenIds | None]:
        return frame.build_rows()

    def _take_answer(self, frame_id: FrameId, tokens: list[TokenIds]) -> Outputs | Rejected:
        flat = np.array([token for row in tokens for token in row], np.int32)
        outputs = self._take(frame_id, flat, np.array([*map(len, tokens)], np.int32))
        return outputs if isinstance(outputs, Rejected) else outputs.build_outputs()

    def _take(
        self, frame_id: FrameId, token_ids: Int32s, counts: Int32s | None
    ) -> ArrayOutputs | Rejected:
        """Commit the oldest frame."""
        frame = self.frames[frame_id]
        self.requests.reserve_nodes(len(token_ids), frame.who.shape[1])
        marks, is_marked = _NO_MARKS, False
        while True:
            code, detail, told, kept, num_rows, num_ended = commit_step(
                self.requests.state, frame.who, frame.planned, frame.ids, token_ids,
                _NO_COUNTS if counts is None else counts, counts is not None, marks, is_marked,
            )  # fmt: skip
            if code != LACKS_MARKS:
                break
            marks = self.requests.mark(frame.who, frame.planned[TOLD_SAMPLES], token_ids, counts)
            is_marked = True
        if code != FITS:
            return bad_result(frame_id, frame.describe(code, detail, token_ids))
        names = frame.names
        if num_rows < told.shape[1]:
            told = told[:, :num_rows]
            names = names.take(told[0])
        outputs = ArrayOutputs(
            names,
            kept,
            None if len(kept) == num_rows else told[1],
            told[2],
            {},
        )
        if num_ended:
            self._note_ends(frame, told, num_ended, outputs)
        self._close(frame_id)
        return outputs

    def _note_ends(self, frame: Frame, told: Int32s, num_ended: int, outputs: ArrayOutputs) -> None:
        """Record the requests that this commit has finished."""
        for row in self.requests.state.scratch[:num_ended].tolist():
            at, _, _, verdict = told[:, row].tolist()
            stop = None
            if verdict == BY_STOP_TOKEN:
                stop = int(outputs.token_ids[told[1, : row + 1].sum() - 1])
            outputs.ended[row] = (_REASONS[verdict], stop)
            self._forget(int(frame.who[0, at]))

    def _get_last_frame(self, slot: int) -> FrameId:
        return int(self.requests.state.requests[slot, LAST_FRAME])

    # events between steps

    @property
    def _register(self) -> Requests:
        return self.requests

    def _take_drafts(self, event: Drafts) -> DraftsTaken:
        s, taken = self.requests.state, []
        for row in event.drafts:
            slot = self.requests.slot_of.get(row.request_id)
            if slot is None or not _may_draft(s.requests[slot].tolist()):
                continue
            s.requests[slot, NUM_DRAFTS] = len(row.token_ids)
            s.drafts[s.requests[slot, SEAT], : len(row.token_ids)] = row.token_ids
            taken.append(row.request_id)
        return DraftsTaken(tuple(taken))

    def _set_grammar_ready(self, slot: int) -> None:
        self.requests.state.requests[slot, GRAMMAR_READY] = 1

    def _end(self, slot: int) -> None:
        end(self.requests.state, slot)

    def _reset(self, reset_running_requests: bool) -> bool:
        s = self.requests.state
        if reset_running_requests:
            preempt_all(s)
            self.previous_names = _NO_NAMES
        elif s.scalars[NUM_FREE] < self.config.num_usable_blocks:
            return False
        withdraw_all(s)
        return True

    def _get_tokens(self, slot: int) -> TokenIds:
        """Return prompt and verified output tokens of a request."""
        return tuple(get_tokens(self.requests.state, slot).tolist())


def _may_draft(row: list[int]) -> bool:
    """Whether drafts would continue its known tokens: all but the last are computed (P24)."""
    return (
        row[STATUS] == IS_RUNNING
        and not row[IS_PREFILL]
        and row[NUM_COMPUTED] == row[NUM_KNOWN] - 1
    )
