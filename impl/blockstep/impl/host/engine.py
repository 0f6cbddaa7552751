"""HostEngine: the scheduler as machine code, in arrays and with the interface of every engine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar, Final

import numpy as np

from blockstep.impl import rejections as r
from blockstep.impl.array_engine import ArrayEngine
from blockstep.impl.array_plans import ArrayOutputs, ArrayPlan, SlotNames
from blockstep.impl.capabilities import HOST
from blockstep.impl.host import state as c
from blockstep.impl.host.agent_turns import AgentTurns
from blockstep.impl.host.blocks import forget_log, withdraw_all
from blockstep.impl.host.commits import Commits
from blockstep.impl.host.encoder_inputs import EncoderInputs
from blockstep.impl.host.forks import Forks
from blockstep.impl.host.frames import Frame
from blockstep.impl.host.grammar_bitmask import Masks
from blockstep.impl.host.jit import SLOW_BECAUSE, warn_if_slow
from blockstep.impl.host.keys import Keys
from blockstep.impl.host.kv_transfers import Transfers
from blockstep.impl.host.lives import end, find_giver, preempt_one, take_back
from blockstep.impl.host.plans import Plans
from blockstep.impl.host.requests import Requests
from blockstep.impl.host.results import BY_EOS, BY_LENGTH, BY_REPETITION, BY_STOP_TOKEN
from blockstep.impl.host.sessions import Sessions
from blockstep.impl.host.state import Int32s, Int64s
from blockstep.impl.host.view import View
from blockstep.spec import vocabulary as v

_ENDS: Final[dict[int, tuple[v.FinishReason, int | None]]] = {
    BY_EOS: (v.FinishReason.STOP, None),
    BY_STOP_TOKEN: (v.FinishReason.STOP, None),
    BY_LENGTH: (v.FinishReason.LENGTH, None),
    BY_REPETITION: (v.FinishReason.REPETITION, None),
}
_NO_NAMES: Final = SlotNames(np.empty(0, np.object_), np.empty(0, np.int64))


class HostEngine(ArrayEngine[Frame]):
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

    def __init__(self, config: v.Config) -> None:
        super().__init__(config, HOST)
        warn_if_slow()
        self.requests = Requests(config)
        self.previous_names = _NO_NAMES
        """Requests of the last plan's rows."""
        self.masks = Masks(config, self.requests, self.frames)
        self.sessions = Sessions(config, self.requests, self.masks)
        self.encodings = EncoderInputs(config, self.requests) if config.encoder_cache_size else None
        """The encoder outputs that requests need; None if the config models no encoder."""
        self.turns = AgentTurns(self.requests) if config.has_pins else None
        """The blocks that turns of jobs keep; None if the config has no pins."""
        ended, common = self._last_frame_of_ended, (config, self.requests, self.masks)
        self.transfers = Transfers(*common, ended) if config.kv_connector else None
        """The transfers with a store; None without one."""
        self.forks = Forks(*common, self.frames, ended) if config.enable_forks else None
        """None without forks."""
        self._keys = Keys(self.requests)
        parts = {
            "encoder": None if self.encodings is None else self.encodings.cache.snapshot,
            "transfers": None if self.transfers is None else self.transfers.snapshot,
            "pins": None if self.turns is None else self.turns.pins.snapshot,
        }
        shown = (self.masks, self.sessions, self.transfers, parts)
        self._view = View(self, self.requests, self._keys, *shown)
        managers = (self.encodings, self.turns, self.transfers, self.forks)
        self._plans = Plans(config, self.requests, self.masks, *managers)
        calls = (self._end_turn, self._close, self._note_ends)
        self._commits = Commits(*calls, self.requests, self.masks, self.encodings, self.transfers)

    def snapshot(self) -> v.Snapshot:
        """Return the whole state in canonical form. O(blocks and tokens); not part of a step."""
        return self._view.take(self.previous_names.tolist())

    def stats(self) -> v.Stats:
        """Return the counters since the start (P21)."""
        return self._view.stats()

    def capabilities(self) -> frozenset[str]:
        """Return what the engine implements, as the values of conformance's `Capability`."""
        return HOST

    # a step

    def apply(self, event: v.Event) -> v.Observation:
        """Apply one event. Never raises; a rejected event changes nothing."""
        if type(event) is v.Commit:
            outputs = self._commit_in_order(event)
            if outputs is not None:
                return outputs
        return super().apply(event)

    def _commit_in_order(self, event: v.Commit) -> v.Outputs | v.Rejected | None:
        """Commit a frame whose rows are answered in their order with known tokens, which machine
        code checks; None if the event is not like that, or may be invalid in any state."""
        frame_id = event.frame_id
        if type(frame_id) is not int or next(iter(self.frames), None) != frame_id:
            return None
        if event.transfers is not v.NO_TRANSFERS or frame_id in self.masks.verifiable:
            return None
        answer = self.frames[frame_id].read_answer(event.sampled)
        if answer is None:
            return None
        tokens, flat, lengths = answer
        outputs = self._take(frame_id, flat, lengths, v.NO_TRANSFERS)
        if isinstance(outputs, v.Rejected):
            return outputs
        outputs.kv_events = self.take_events()
        if outputs.counts is None and len(outputs) == len(flat) == len(tokens):
            return outputs.build_outputs(tokens)
        return outputs.build_outputs()

    def _schedule(self) -> v.Plan | v.Rejected:
        plan = self.schedule_arrays()
        return plan if isinstance(plan, v.Rejected) else plan.build_plan()

    def schedule_arrays(self) -> ArrayPlan | v.Rejected:
        """Make a plan without an object per row; rejected like the event `Schedule`."""
        if len(self.frames) >= self.config.max_frames_in_flight:
            problem = r.schedule_problem(self.config, len(self.frames))
            assert problem is not None, "the pipeline is full"
            return problem
        is_open = self.pause_state is not v.PauseState.PAUSED_ALL
        self._reserve()
        frame_id = self.next_frame_id
        plan, frame = self._plans.make(
            frame_id,
            self._previous_id,
            next(iter(self.frames), frame_id),
            self.config.max_num_batched_tokens if is_open else 0,
            self.pause_state is v.PauseState.UNPAUSED,
            tuple(self.finished_req_ids),
        )
        if len(frame.names):
            self.frames[frame_id] = frame
        self.finished_req_ids.clear()
        self.previous_names, self._previous_id = frame.names, frame_id
        self.next_frame_id = frame_id + 1
        return plan

    def commit_arrays(
        self,
        frame_id: v.FrameId,
        token_ids: Int32s,
        counts: Int32s | None = None,
        transfers: v.KVTransfers = v.NO_TRANSFERS,
    ) -> ArrayOutputs | v.Rejected:
        """Commit a frame without an object per row; rejected like the event `Commit`.

        Args:
            frame_id: id of the plan.
            token_ids: [tokens] int32, row after row in the order of the plan; rows that do not
                sample have none.
            counts: [rows] int32, tokens of each row; None: one for each row that samples, so that
                no drafts are accepted.
            transfers: the worker's report about transfers.
        """
        if next(iter(self.frames), None) != frame_id:
            problem = r.frame_problem(frame_id, self.frames)
            assert problem is not None, "it is not the oldest frame"
            return problem
        tokens = np.ascontiguousarray(token_ids, np.int32)
        lengths = None if counts is None else np.ascontiguousarray(counts, np.int32)
        return self._take(frame_id, tokens, lengths, transfers)

    def _get_rows(self, frame: Frame) -> Mapping[v.RequestId, v.TokenIds | None]:
        return frame.build_rows()

    def _take_answer(
        self, frame_id: v.FrameId, tokens: list[v.TokenIds], transfers: v.KVTransfers
    ) -> v.Outputs | v.Rejected:
        flat = np.array([*chain.from_iterable(tokens)], np.int32)
        outputs = self._take(frame_id, flat, np.array([*map(len, tokens)], np.int32), transfers)
        if isinstance(outputs, v.Rejected):
            return outputs
        outputs.kv_events = self.take_events()
        return outputs.build_outputs()

    def _take(
        self, frame_id: v.FrameId, token_ids: Int32s, counts: Int32s | None, report: v.KVTransfers
    ) -> ArrayOutputs | v.Rejected:
        """Commit the oldest frame."""
        self._reserve()
        outputs = self._commits.take(frame_id, self.frames[frame_id], token_ids, counts, report)
        if isinstance(outputs, v.Rejected):
            return outputs
        if self.transfers is not None and report is not v.NO_TRANSFERS:
            self._forget_names(self._commits.preempted)
            outputs.failed = self._end_failed(self._commits.failed)
            self.transfers.take_finished(report)
        return outputs

    def _reserve(self) -> None:
        """Make room for what one event may log, and for the blocks that it may free later."""
        if self.config.enable_kv_cache_events:
            self.requests.state = c.reserve_log(self.requests.state)
        if self.config.kv_connector and self.config.max_frames_in_flight > 1:
            self.requests.state = c.reserve_deferred(self.requests.state)

    def _take_report(self, transfers: v.KVTransfers) -> v.Outputs:
        if self.transfers is None:
            return v.Outputs()
        self._reserve()
        failed, preempted = self.transfers.take_invalid(transfers)
        assert not preempted, "loads of a frame fail with its commit"
        rows = self._end_failed(failed)
        self.transfers.take_finished(transfers)
        return v.Outputs(rows, self.take_events())

    def _forget_names(self, preempted: list[int]) -> None:
        """Let requests not count as rows of the last plan: they were preempted between plans, as
        their loads have failed."""
        for slot in preempted:
            rows = (self.previous_names.slots != slot).nonzero()[0].astype(np.int32)
            self.previous_names = self.previous_names.take(rows)

    def _end_failed(self, failed: list[v.RequestId]) -> tuple[v.OutputRow, ...]:
        """Finish with an error the requests that fail by their load."""
        rows: list[v.OutputRow] = []
        for name in failed:
            slot = self.requests.slot_of[name]
            num_cached = max(self._get_cached_tokens(slot), 0)
            self._end(slot)
            self._forget(slot)
            rows.append(v.OutputRow(name, (), v.FinishReason.ERROR, num_cached_tokens=num_cached))
        return tuple(rows)

    def _end_turn(self, slot: int) -> None:
        """End a request that a commit finishes; its blocks may be pinned."""
        if self.turns is not None:
            self.turns.end_turn(slot)
        self._end(slot)

    def _note_ends(
        self, frame: Frame, results: Int32s, num_ended: int, outputs: ArrayOutputs
    ) -> None:
        """Record the requests that this commit has finished."""
        places = self.requests.state.scratch[:num_ended].copy()
        rows, verdicts = places.tolist(), results[3].take(places).tolist()
        outputs.ended = {row: _ENDS[verdict] for row, verdict in zip(rows, verdicts, strict=True)}
        if BY_STOP_TOKEN in verdicts:
            lasts = (results[1].cumsum() - 1).tolist()
            for row, verdict in zip(rows, verdicts, strict=True):
                if verdict == BY_STOP_TOKEN:
                    outputs.ended[row] = v.FinishReason.STOP, int(outputs.token_ids[lasts[row]])
        slots = frame.owners[0].take(results[0].take(places))
        if self.sessions.updates:
            stop = self.sessions.stop
            slots = np.array([slot for slot in slots.tolist() if not stop(slot)], np.int64)
        self._forget_all(slots)

    def _close(self, frame_id: v.FrameId) -> None:
        super()._close(frame_id)
        self.masks.verifiable.pop(frame_id, None)
        if self.transfers is not None:
            self.transfers.loads.pop(frame_id, None)

    def _take_kv_events(self) -> tuple[v.KVEvent, ...]:
        return self.take_events()

    def take_events(self) -> tuple[v.KVEvent, ...]:
        """Return the KV events since the last call; none if the config has no KV events.

        Contents stay in memory until their events are taken: call it after `commit_arrays`. The
        outputs of the event v.Commit have them already.
        """
        if not self.requests.state.scalars[c.NUM_LOGGED]:
            return ()
        events = self._keys.list_events()
        forget_log(self.requests.state)
        return events

    def _find_update_problem(self, whole: v.Request, update: v.Request) -> v.Rejected | None:
        """Return why a session with one input more is rejected, or None."""
        problem = r.submit_problem(self.config, whole, self._count_most_blocks(whole), False, False)
        return problem or self._find_other_size(update)

    def _find_other_size(self, _request: v.Request) -> v.Rejected | None:
        """Return why an item is rejected, or None: its identifier is in use with another size."""
        if self.encodings is None or not _request.items:
            return None
        chunks = [chunk for chunks in self.sessions.updates.values() for chunk in chunks]
        return self.encodings.find_other_size(_request, chunks)

    def _take_message(self, event: v.Message) -> None:
        match event:
            case v.EncoderReset() | v.EncoderOffer():
                if self.encodings is not None:
                    self.encodings.take(event)
            case v.Clock() | v.PinEstimate():
                if self.turns is not None:
                    self.turns.take(event)
            case _:
                if self.transfers is not None:
                    self.transfers.take_offer(event)

    def _get_cached_tokens(self, slot: int) -> int:
        return int(self.requests.state.requests[slot, c.NUM_CACHED_TOKENS])

    def _get_last_frame(self, slot: int) -> v.FrameId:
        return int(self.requests.state.requests[slot, c.LAST_FRAME])

    # events between steps

    @property
    def _register(self) -> Requests:
        return self.requests

    def _submit(self, request: v.Request) -> v.Ack | v.Rejected:
        if self.transfers is not None and request.request_id in self.transfers.held:
            return r.held_by_transfer(request.request_id)
        answer = super()._submit(request)
        if isinstance(answer, v.Ack):
            self.masks.add(request)
            self.sessions.add(request)
            if self.turns is not None:
                self.turns.begin_turn(self.requests.slot_of[request.request_id])
        return answer

    def _update(self, update: v.Request) -> v.Ack | v.Aborted | v.Rejected:
        answer = self.sessions.update(update, self._find_update_problem)
        if isinstance(answer, v.Aborted):
            slot = self.requests.slot_of[update.request_id]
            self._end(slot)
            self._forget(slot)
        return answer

    def _fork(self, event: v.Fork) -> v.Ack | v.Rejected:
        return super()._fork(event) if self.forks is None else self.forks.fork(event)

    def _forget(self, slot: int) -> v.RequestId:
        return self._forget_all(np.array([slot]))[0]

    def _forget_all(self, slots: Int64s) -> list[v.RequestId]:
        """Remove requests that have ended; the next plan lists them as finished."""
        if self.encodings is not None or self.turns is not None:
            for request in map(self.requests.requests.__getitem__, slots.tolist()):
                if self.encodings is not None:
                    self.encodings.cache.drop(request)
                if self.turns is not None:
                    self.turns.pins.end_turn(request.job_id)
        names = self.requests.remove_all(slots)
        self.finished_req_ids |= dict.fromkeys(names)
        if self.frames:
            lasts = self.requests.state.requests[slots, c.LAST_FRAME].tolist()
            for name, last in zip(names, lasts, strict=True):
                if last in self.frames:
                    self._last_frame_of_ended[name] = last
        offers = {} if self.transfers is None else self.transfers.offers
        kept: dict[v.RequestId, Any]
        for kept in (offers, self.masks.matchers, self.sessions.updates):
            for name in names if kept else ():
                kept.pop(name, None)
        return names

    def _get_verified(self, frame_id: v.FrameId) -> Mapping[v.RequestId, v.TokenIds | None]:
        rows = super()._get_verified(frame_id)
        return {**rows, **self.masks.verifiable.get(frame_id, {})}

    def _are_among(self, drafts: v.TokenIds, accepted: v.TokenIds) -> bool:
        return accepted == drafts[: len(accepted)] or v.DRAFT_PLACEHOLDER in drafts

    def _make_mask(self, event: v.GrammarBitmask) -> v.GrammarOutput | v.Rejected:
        return self.masks.make_mask(event)

    def _take_drafts(self, event: v.Drafts) -> v.DraftsTaken:
        s, taken = self.requests.state, []
        for row in event.drafts:
            slot = self.requests.slot_of.get(row.request_id)
            if slot is None or not _may_draft(s.requests[slot].tolist()):
                continue
            drafts = self.masks.cut(row)
            s.requests[slot, c.NUM_DRAFTS] = len(drafts)
            s.drafts[s.requests[slot, c.BATCH_ROW], : len(drafts)] = drafts
            taken.append(row.request_id)
        return v.DraftsTaken(tuple(taken))

    def _set_grammar_ready(self, slot: int) -> None:
        self.requests.state.requests[slot, c.GRAMMAR_READY] = 1

    def _count_most_blocks(self, request: v.Request) -> int:
        slots, beside = r.most_slots(self.config, request), r.count_beside(request)
        return c.count_most_blocks(self.requests.state.groups, slots, beside)

    def _end(self, slot: int) -> None:
        if self.transfers is not None:
            self.requests.state = c.reserve_deferred(self.requests.state)
            self.transfers.hold(slot)
        end(self.requests.state, slot)

    def _reset_both(self, event: v.Reset) -> bool:
        if self.transfers is None or not self.transfers.can_reset():
            return self.transfers is None and super()._reset_both(event)
        if not self._reset(event.reset_running_requests):
            return False
        if event.reset_connector:
            self.transfers.clear_offers()
        return True

    def _reset(self, reset_running_requests: bool) -> bool:
        self._reserve()
        s = self.requests.state
        if reset_running_requests:
            if self.encodings is not None:
                self.encodings.drop_running()
            for slot in s.lines[: s.scalars[c.NUM_RUNNING], c.RUNNING][::-1].tolist():
                preempt_one(s, slot)
            while (giver := find_giver(s, c.NONE)) != c.NONE:
                take_back(s, giver)
            self.previous_names = _NO_NAMES
        elif s.scalars[c.NUM_FREE] < self.config.num_usable_blocks and not (
            self.turns is not None and self.turns.hold_all()
        ):
            return False
        if self.turns is not None:
            self.turns.end_pins([*self.turns.pins.pins])
        withdraw_all(s)
        return True


def _may_draft(row: list[int]) -> bool:
    """Whether drafts would continue its known tokens: all but the last are computed (P24)."""
    return (
        row[c.STATUS] == c.IS_RUNNING
        and not row[c.IS_PREFILL]
        and row[c.NUM_COMPUTED] == row[c.NUM_KNOWN] - 1
    )
