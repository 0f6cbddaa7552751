"""DeviceEngine: the scheduler whose state and decisions live on the device.

The host checks what comes in, writes it into the device's inbox and ring, launches, and reads what
a launch tells. It knows names; the device knows slots.
"""

from __future__ import annotations

from typing import assert_never

from blockstep.impl.capabilities import DEVICE, list_config_problems
from blockstep.impl.device import layout
from blockstep.impl.device.frames import Frame, read_frame, read_outputs
from blockstep.impl.device.inbox import Inbox
from blockstep.impl.device.launch import Launch, get_numpied
from blockstep.impl.device.view import take_snapshot, take_stats
from blockstep.impl.refusals import (
    answer_problem,
    brought_problem,
    drafts_problem,
    frame_problem,
    grammar_problem,
    most_blocks,
    schedule_problem,
    submit_problem,
    update_problem,
)
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    Clock,
    Commit,
    Config,
    ConfigError,
    Drafts,
    DraftsTaken,
    EncoderOffer,
    EncoderReset,
    Event,
    FrameId,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    KVOffer,
    Observation,
    Outputs,
    PauseState,
    PinEstimate,
    Plan,
    Rejected,
    Request,
    RequestId,
    Reset,
    ResetDone,
    Schedule,
    SetPause,
    Snapshot,
    Stats,
    StreamingUpdate,
    Submit,
    TokenIds,
    TransfersReported,
    event_problem,
)


class DeviceEngine:
    """The scheduler and its paged KV memory as tensors, changed by one kernel per step.

    Args:
        config: the constants of the run.
        launch: how kernels are run; by default their source is run by numpy.

    Raises:
        ConfigError: `list_config_problems` has something against the config.
    """

    def __init__(self, config: Config, launch: Launch | None = None) -> None:
        problems = list_config_problems(config, DEVICE)
        if problems:
            raise ConfigError(problems)
        self.config = config
        self.inbox = Inbox(config, launch or get_numpied())
        self.pause_state = PauseState.UNPAUSED
        self.frames: dict[FrameId, Frame] = {}
        """In flight, oldest first."""
        self.next_frame_id: FrameId = 0
        self.finished_req_ids: set[RequestId] = set()
        self.previous_names: tuple[RequestId, ...] = ()
        """Of the rows of the last plan."""
        self._previous_id: FrameId = layout.NONE
        self._last_frame_of_ended: dict[RequestId, FrameId] = {}
        """Of ended requests that frames in flight name: the last of these frames."""

    def apply(self, event: Event) -> Observation:
        """Take one event. Never raises; what is refused changes nothing."""
        problem = event_problem(event) or brought_problem(event)
        if problem is not None:
            return problem
        match event:
            case Schedule():
                return self._schedule()
            case Commit():
                return self._commit(event)
            case Submit(request=request):
                return self._submit(request)
            case Drafts():
                return self._take_drafts(event)
            case Abort(request_ids=request_ids):
                return self._abort(request_ids)
            case GrammarReady(request_id=request_id):
                return self._set_grammar_ready(request_id)
            case StreamingUpdate(request=request):
                return update_problem(request.request_id, request.request_id in self.inbox.slot_of)
            case SetPause(pause_state=pause_state):
                self.pause_state = pause_state
                return Ack()
            case Reset(reset_running_requests=reset_running_requests):
                return ResetDone(self._reset(reset_running_requests))
            case EncoderReset() | EncoderOffer() | KVOffer() | Clock() | PinEstimate():
                return Ack()  # of an encoder, a store or pins, that this engine has not
            case TransfersReported():
                return Outputs()
            case GrammarFailed() | GrammarBitmask():
                raise AssertionError("refused above")
            case _:
                assert_never(event)

    def snapshot(self) -> Snapshot:
        """The whole state in canonical form. O(blocks and tokens); takes no part in a step."""
        self.inbox.launch("commands_kernel")
        return take_snapshot(self)

    def stats(self) -> Stats:
        """The counters since the start (P21)."""
        self.inbox.launch("commands_kernel")
        return take_stats(self.inbox.state)

    def capabilities(self) -> frozenset[str]:
        """What it implements, as the values of conformance's `Capability`."""
        return DEVICE

    # a step

    def _schedule(self) -> Plan | Rejected:
        problem = schedule_problem(self.config, len(self.frames))
        if problem is not None:
            return problem
        is_open = self.pause_state is not PauseState.PAUSED_ALL
        frame_id, control = self.next_frame_id, self.inbox.state.control
        control[layout.FRAME_ID], control[layout.PREVIOUS_ID] = frame_id, self._previous_id
        control[layout.OLDEST_ID] = next(iter(self.frames), frame_id)
        control[layout.BUDGET] = self.config.max_num_batched_tokens if is_open else 0
        control[layout.ADMITS] = self.pause_state is PauseState.UNPAUSED
        taken = {frame.place for frame in self.frames.values()}
        place = min(set(range(self.inbox.dims.frames)) - taken)
        control[layout.PLACE] = place
        self.inbox.launch("plan_kernel")
        finished = tuple(sorted(self.finished_req_ids))
        frame, plan = read_frame(self.inbox, frame_id, place, finished)
        if frame.slots:
            self.frames[frame_id] = frame
        self.finished_req_ids.clear()
        self.previous_names = tuple(frame.rows)
        self._previous_id, self.next_frame_id = frame_id, frame_id + 1
        return plan

    def _commit(self, event: Commit) -> Outputs | Rejected:
        problem = frame_problem(event.frame_id, self.frames)
        if problem is not None:
            return problem
        frame = self.frames[event.frame_id]
        answers = {row.request_id: row.token_ids for row in event.sampled}
        problem = answer_problem(
            event.frame_id, len(event.sampled), frame.rows, answers, self._are_among
        )
        if problem is not None:
            return problem
        tokens = [answers[request_id] for request_id in frame.rows]
        self.inbox.reserve_nodes(sum(map(len, tokens)), len(tokens))
        s = self.inbox.state
        s.control[layout.COMMIT_PLACE] = frame.place
        for row, ids in enumerate(tokens):
            s.answer_counts[row] = len(ids)
            s.answer_tokens[row, : len(ids)] = ids
        self.inbox.launch("commit_kernel")
        outputs, ended = read_outputs(self.inbox, frame, tokens)
        for slot in ended:
            self._forget(slot)
        del self.frames[event.frame_id]
        self._last_frame_of_ended = {
            name: last for name, last in self._last_frame_of_ended.items() if last != event.frame_id
        }
        return outputs

    def _are_among(self, drafts: TokenIds, accepted: TokenIds) -> bool:
        """Under asynchronous scheduling drafts are placeholders, and any token may be behind."""
        return self.config.async_scheduling or accepted == drafts[: len(accepted)]

    def _forget(self, slot: int) -> RequestId:
        """It has ended; the next plan tells the worker."""
        last = self.inbox.last_frames.get(slot, layout.NONE)
        request_id = self.inbox.remove(slot)
        self.finished_req_ids.add(request_id)
        if last in self.frames:
            self._last_frame_of_ended[request_id] = last
        return request_id

    # what comes in between steps

    def _submit(self, request: Request) -> Ack | Rejected:
        problem = submit_problem(
            self.config,
            request,
            most_blocks(self.config, request),
            request.request_id in self.inbox.slot_of,
            request.request_id in self._last_frame_of_ended,
        )
        if problem is not None:
            return problem
        self.inbox.add(request)
        return Ack()

    def _take_drafts(self, event: Drafts) -> DraftsTaken | Rejected:
        problem = drafts_problem(self.config, event)
        if problem is not None:
            return problem
        asked: list[tuple[RequestId, int]] = []
        for row in event.drafts:
            slot = self.inbox.slot_of.get(row.request_id)
            if slot is not None:
                self.inbox.state.offered[slot, : len(row.token_ids)] = row.token_ids
                self.inbox.command(layout.DRAFT, slot, len(row.token_ids))
                asked.append((row.request_id, slot))
        self.inbox.launch("commands_kernel")
        taken = self.inbox.state.taken
        return DraftsTaken(tuple(request_id for request_id, slot in asked if taken[slot]))

    def _set_grammar_ready(self, request_id: RequestId) -> Ack | Rejected:
        slot = self.inbox.slot_of.get(request_id)
        request = None if slot is None else self.inbox.requests[slot]
        problem = grammar_problem(request, request_id)
        if problem is not None or slot is None:
            assert problem is not None, "an unknown request is refused"
            return problem
        self.inbox.command(layout.GRAMMAR, slot)
        return Ack()

    def _abort(self, request_ids: tuple[RequestId, ...]) -> Aborted:
        ended: list[RequestId] = []
        for request_id in request_ids:
            slot = self.inbox.slot_of.get(request_id)
            if slot is not None:
                self.inbox.command(layout.ABORT, slot)
                ended.append(self._forget(slot))
        return Aborted(tuple(ended))

    def _reset(self, reset_running_requests: bool) -> bool:
        """Forget every cached block; whether that was possible (P25)."""
        self.inbox.command(layout.RESET, 0, int(reset_running_requests))
        self.inbox.launch("commands_kernel")
        if reset_running_requests:
            self.previous_names = ()
        return bool(self.inbox.state.reset_done[0])
