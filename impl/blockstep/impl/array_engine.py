"""Doors: event handling that engines in arrays share; they know requests by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from blockstep.impl.capabilities import list_config_problems
from blockstep.impl.rejections import (
    answer_problem,
    bad_fork,
    brought_problem,
    drafts_problem,
    frame_problem,
    grammar_problem,
    most_blocks,
    submit_problem,
    update_problem,
)
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    Commit,
    Config,
    ConfigError,
    Drafts,
    DraftsTaken,
    Event,
    FinishReason,
    Fork,
    FrameId,
    GrammarBitmask,
    GrammarFailed,
    GrammarOutput,
    GrammarReady,
    KVEvent,
    KVTransfers,
    Message,
    Observation,
    OutputRow,
    Outputs,
    PauseState,
    Plan,
    Rejected,
    Request,
    RequestId,
    Reset,
    ResetDone,
    Schedule,
    SetPause,
    StreamingUpdate,
    Submit,
    TokenIds,
    TransfersReported,
    event_problem,
)

F = TypeVar("F")
"""A frame in flight, as an engine keeps it."""


class Register(Protocol):
    """Gives each unfinished request an index (slot)."""

    slot_of: dict[RequestId, int]

    @property
    def requests(self) -> Mapping[int, Request] | Sequence[Request]:
        """Unfinished requests by index."""
        ...

    def add(self, request: Request) -> object:
        """Add a new request."""
        ...

    def remove(self, slot: int) -> RequestId:
        """Forget a finished request; return its id."""
        ...


class ArrayEngine(ABC, Generic[F]):
    """Validates events, and handles those that do not depend on how a step is planned.

    Args:
        config: the constants of the run.
        capabilities: capabilities of the engine.

    Raises:
        ConfigError: `list_config_problems` finds a problem in the config.
    """

    def __init__(self, config: Config, capabilities: frozenset[str]) -> None:
        problems = list_config_problems(config, capabilities)
        if problems:
            raise ConfigError(problems)
        self.config = config
        self._capabilities = capabilities
        self.pause_state = PauseState.UNPAUSED
        self.frames: dict[FrameId, F] = {}
        """Frames in flight, oldest first."""
        self.next_frame_id: FrameId = 0
        self.finished_req_ids: dict[RequestId, None] = {}
        """Requests that have finished since the last plan, in that order."""
        self._previous_id: FrameId = -1
        """Id of the last plan; -1 before the first."""
        self._last_frame_of_ended: dict[RequestId, FrameId] = {}
        """The last frame in flight with a row of each finished request, if there is one."""

    def apply(self, event: Event) -> Observation:
        """Apply one event. Never raises; a rejected event changes nothing."""
        problem = event_problem(event) or brought_problem(event, self._capabilities)
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
                return drafts_problem(self.config, event) or self._take_drafts(event)
            case Abort(request_ids=request_ids):
                return self._abort(request_ids)
            case GrammarReady(request_id=request_id):
                return self._take_grammar(request_id)
            case StreamingUpdate(request=request):
                return self._update(request)
            case SetPause(pause_state=pause_state):
                self.pause_state = pause_state
                return Ack()
            case Reset():
                is_done = self._reset_both(event)
                return ResetDone(is_done, self._take_kv_events() if is_done else ())
            case TransfersReported(transfers=transfers):
                return self._take_report(transfers)
            case Fork():
                return self._fork(event)
            case GrammarFailed(request_id=request_id):
                return self._fail_grammar(request_id)
            case GrammarBitmask():
                return self._make_mask(event)
            case _:
                self._take_message(event)
                return Ack()

    # Engine-specific parts: their events are valid, except that a step may exceed the pipeline.

    @property
    @abstractmethod
    def _register(self) -> Register: ...

    @abstractmethod
    def _schedule(self) -> Plan | Rejected: ...

    @abstractmethod
    def _get_rows(self, frame: F) -> Mapping[RequestId, TokenIds | None]:
        """Return the drafts of each row, None if it does not sample; in the order of rows."""

    @abstractmethod
    def _take_answer(
        self, frame_id: FrameId, tokens: list[TokenIds], transfers: KVTransfers
    ) -> Outputs | Rejected:
        """Commit the oldest frame, with tokens by row and the worker's report about transfers."""

    @abstractmethod
    def _take_drafts(self, event: Drafts) -> DraftsTaken: ...

    @abstractmethod
    def _set_grammar_ready(self, slot: int) -> None: ...

    @abstractmethod
    def _end(self, slot: int) -> None:
        """Remove a request that ends, and free its blocks."""

    @abstractmethod
    def _get_last_frame(self, slot: int) -> FrameId:
        """Return the last plan that had a row of the request; -1 if none had."""

    def _get_cached_tokens(self, slot: int) -> int:
        """Return the prompt tokens that were hits at its first admission; -1 before that."""
        raise AssertionError(f"slot {slot}: rejected, as the engine has no masks")

    @abstractmethod
    def _reset(self, reset_running_requests: bool) -> bool:
        """Forget every cached block; return whether that was possible (P25)."""

    # parts that an engine may lack

    def _find_other_size(self, _request: Request) -> Rejected | None:
        """Return why an item is rejected, or None: its identifier is in use with another size."""
        return None

    def _fork(self, event: Fork) -> Ack | Rejected:
        """Add a branch of a request."""
        return bad_fork(event, "this engine has no forks")

    def _take_message(self, event: Message) -> None:
        """Take a message about a part of the engine; ignored by an engine without that part."""

    def _take_report(self, _transfers: KVTransfers) -> Outputs:
        """Take a report about transfers that comes without a commit."""
        return Outputs()

    def _reset_both(self, event: Reset) -> bool:
        """Empty the prefix cache and, if asked, the store's offers; return whether it was
        possible."""
        return not event.reset_connector and self._reset(event.reset_running_requests)

    def _update(self, update: Request) -> Ack | Aborted | Rejected:
        """Take the next input of a session, or its end."""
        return update_problem(update.request_id, update.request_id in self._register.slot_of)

    def _make_mask(self, event: GrammarBitmask) -> GrammarOutput | Rejected:
        """Return the bitmask of a frame (P23)."""
        raise AssertionError(f"{event}: rejected, as the engine has no masks")

    def _take_kv_events(self) -> tuple[KVEvent, ...]:
        """Return the KV events since the last call; none if the config has no KV events."""
        return ()

    # common parts

    def _fail_grammar(self, request_id: RequestId) -> Outputs | Rejected:
        """End a request whose grammar failed, in any status; tokens in flight are discarded."""
        slot = self._register.slot_of.get(request_id)
        request = None if slot is None else self._register.requests[slot]
        problem = grammar_problem(request, request_id, "failed")
        if problem is not None or slot is None:
            assert problem is not None, "an unknown request is rejected"
            return problem
        num_cached_tokens = max(self._get_cached_tokens(slot), 0)
        self._end(slot)
        self._forget(slot)
        row = OutputRow(request_id, (), FinishReason.ERROR, num_cached_tokens=num_cached_tokens)
        return Outputs((row,))

    def _submit(self, request: Request) -> Ack | Rejected:
        problem = submit_problem(
            self.config,
            request,
            self._count_most_blocks(request),
            request.request_id in self._register.slot_of,
            request.request_id in self._last_frame_of_ended,
        )
        problem = problem or self._find_other_size(request)
        if problem is not None:
            return problem
        self._register.add(request)
        return Ack()

    def _count_most_blocks(self, request: Request) -> int:
        """Return the blocks that a request needs at its longest (P11)."""
        return most_blocks(self.config, request)

    def _commit(self, event: Commit) -> Outputs | Rejected:
        problem = frame_problem(event.frame_id, self.frames)
        if problem is not None:
            return problem
        rows = self._get_verified(event.frame_id)
        answers = {row.request_id: row.token_ids for row in event.sampled}
        problem = answer_problem(event.frame_id, len(event.sampled), rows, answers, self._are_among)
        if problem is not None:
            return problem
        tokens = [answers[request_id] for request_id in rows]
        return self._take_answer(event.frame_id, tokens, event.transfers)

    def _get_verified(self, frame_id: FrameId) -> Mapping[RequestId, TokenIds | None]:
        """Return the drafts that may be accepted by each row of a frame; None: it does not
        sample."""
        return self._get_rows(self.frames[frame_id])

    def _are_among(self, drafts: TokenIds, accepted: TokenIds) -> bool:
        """Whether drafts may be accepted like this; asynchronously they are placeholders for any
        token."""
        return self.config.async_scheduling or accepted == drafts[: len(accepted)]

    def _take_grammar(self, request_id: RequestId) -> Ack | Rejected:
        slot = self._register.slot_of.get(request_id)
        request = None if slot is None else self._register.requests[slot]
        problem = grammar_problem(request, request_id)
        if problem is not None or slot is None:
            assert problem is not None, "an unknown request is rejected"
            return problem
        self._set_grammar_ready(slot)
        return Ack()

    def _abort(self, request_ids: tuple[RequestId, ...]) -> Aborted:
        ended: list[RequestId] = []
        for request_id in request_ids:
            slot = self._register.slot_of.get(request_id)
            if slot is not None:
                self._end(slot)
                ended.append(self._forget(slot))
        return Aborted(tuple(ended))

    def _forget(self, slot: int) -> RequestId:
        """Remove a request that has ended; the next plan lists it as finished."""
        last = self._get_last_frame(slot)
        request_id = self._register.remove(slot)
        self.finished_req_ids[request_id] = None
        if last in self.frames:
            self._last_frame_of_ended[request_id] = last
        return request_id

    def _close(self, frame_id: FrameId) -> None:
        """Forget a committed frame."""
        del self.frames[frame_id]
        if self._last_frame_of_ended:
            last_frames = self._last_frame_of_ended
            for name in [name for name, last in last_frames.items() if last == frame_id]:
                del last_frames[name]
