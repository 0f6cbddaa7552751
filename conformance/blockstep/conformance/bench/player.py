"""Player: the clients and the model worker, and how a side plays what they wrote down.

The pilot plays a stretch of the scenario on an engine of its own and writes down what comes in from
outside: requests, drafts, answers. Then each side in turn is given the same, ready made, so that
nothing but the engine runs between two looks at the clock; and then what it decided is read.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockstep.conformance.bench.scenarios import Scenario, get_token
from blockstep.conformance.bench.sides import Answer, Decision, Delivered, PlannedRow, Side, Times
from blockstep.spec.vocabulary import Config, Request, RequestId, TokenIds


@dataclass(slots=True)
class Moment:
    """One step, as it comes in from outside."""

    submitted: list[Request] = field(default_factory=list)
    drafts: Answer = ()
    answer: Answer | None = None
    """To the oldest plan in flight; None while plans pile up in the pipeline."""
    num_rows: int = 0
    num_tokens: int = 0
    num_new: int = 0
    num_preempted: int = 0


@dataclass(slots=True)
class Live:
    """One unfinished request, as its client and the worker know it."""

    number: int
    known: int
    """Prompt and delivered output tokens."""
    promised: int = 0
    """Outputs that plans in flight will sample."""
    proposal: TokenIds = ()
    """The drafts handed in for its next row."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One step of one side: seconds of each reading."""

    schedule: Times
    commit: Times
    """Zeros while plans pile up in the pipeline."""


class Track:
    """A digest of what a side decided and delivered: equal ones say that both did the same."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """Of everything so far."""
        return self._digest.hexdigest()

    def note(self, decision: Decision, delivered: Delivered) -> None:
        """Add a step. By id: a plan of the protocol does not say how new and resumed rows mix."""
        rows = sorted(decision.rows, key=lambda row: row.request_id)
        told = sorted(delivered, key=lambda row: row[0])
        self._digest.update(repr((rows, decision.preempted, decision.finished, told)).encode())


class Pilot:
    """Plays clients and worker on one side, one step at a time, and writes them down."""

    def __init__(self, side: Side, scenario: Scenario, num_running: int, config: Config) -> None:
        self.side = side
        self.track = Track()
        self.depth = config.max_frames_in_flight
        self.num_drafts = config.num_speculative_tokens
        self.concurrency = scenario.get_concurrency(num_running)
        self.live: dict[RequestId, Live] = {}
        self.running: set[RequestId] = set()
        self.has_all_submitted = False
        self._source: Iterator[Request] = scenario.get_requests(num_running)
        self._frames: deque[list[tuple[PlannedRow, bool]]] = deque()
        """In flight, oldest first: each row, and whether it samples."""

    @property
    def is_done(self) -> bool:
        """Whether the traffic has ended."""
        return self.has_all_submitted and not self.live

    def step(self) -> Moment:
        """Submit what is due, plan, and answer the oldest plan once the pipeline is full."""
        moment = Moment(self._submit_due())
        if self.num_drafts:
            moment.drafts = self._propose()
            self.side.propose(moment.drafts)
        decision = self.side.read_plan(self.side.schedule()[1])
        moment.num_rows = len(decision.rows)
        moment.num_tokens = sum(row.num_scheduled_tokens for row in decision.rows)
        moment.num_new = sum(row.is_new for row in decision.rows)
        moment.num_preempted = len(decision.preempted)
        self._note(decision)
        delivered: Delivered = ()
        if len(self._frames) >= self.depth or (self._frames and not decision.rows):
            moment.answer = [
                (row.request_id, self._sample(row) if samples else ())
                for row, samples in self._frames.popleft()
            ]
            _, outputs = self.side.commit(self.side.prepare(moment.answer))
            delivered = self.side.read_outputs(outputs)
            self._take(delivered)
        self.track.note(decision, delivered)
        return moment

    def _submit_due(self) -> list[Request]:
        due: list[Request] = []
        while not self.has_all_submitted and len(self.live) < self.concurrency:
            request = next(self._source, None)
            if request is None:
                self.has_all_submitted = True
                break
            self.side.submit(request)
            due.append(request)
            number = int(request.request_id[1:])
            self.live[request.request_id] = Live(number, len(request.prompt_token_ids))
        return due

    def _propose(self) -> list[tuple[RequestId, TokenIds]]:
        """Zero to all drafts of a request agree with what it will say, turn by turn."""
        drafts: list[tuple[RequestId, TokenIds]] = []
        for name in sorted(self.running):
            live = self.live[name]
            agreeing = (live.number + live.known) % (self.num_drafts + 1)
            live.proposal = tuple(
                get_token(live.number, live.known + offset) + (offset >= agreeing)
                for offset in range(self.num_drafts)
            )
            drafts.append((name, live.proposal))
        return drafts

    def _note(self, decision: Decision) -> None:
        for name in decision.preempted:
            self.running.discard(name)
        frame: list[tuple[PlannedRow, bool]] = []
        for row in decision.rows:
            live = self.live[row.request_id]
            reached = row.num_computed_tokens + row.num_scheduled_tokens
            samples = reached - row.num_drafts >= live.known + live.promised
            if samples:
                live.promised += 1 + row.num_drafts
                self.running.add(row.request_id)
            frame.append((row, samples))
        if frame:
            self._frames.append(frame)

    def _take(self, delivered: Delivered) -> None:
        for name, tokens, reason in delivered:
            self.live[name].known += len(tokens)
            if reason is not None:
                del self.live[name]
                self.running.discard(name)

    def _sample(self, row: PlannedRow) -> TokenIds:
        """What the model samples in a row that samples: accepted drafts, and one token more."""
        live = self.live.get(row.request_id)
        if live is None:
            return (0,)  # it has ended meanwhile, and nobody looks
        live.promised -= 1 + row.num_drafts
        tokens = [get_token(live.number, live.known)]
        for draft in live.proposal[: row.num_drafts]:
            if draft != tokens[-1]:
                break
            tokens.append(get_token(live.number, live.known + len(tokens)))
        return tuple(tokens)


def play(side: Side, track: Track, moments: Sequence[Moment]) -> list[Timing]:
    """Give a side what comes in, and time it; then read what it decided."""
    answers = [None if m.answer is None else side.prepare(m.answer) for m in moments]
    timings: list[Timing] = []
    given: list[tuple[Any, Any]] = []
    nothing = (0.0,) * len(side.readings)
    for moment, answer in zip(moments, answers, strict=True):
        for request in moment.submitted:
            side.submit(request)
        if moment.drafts:
            side.propose(moment.drafts)
        planned, plan = side.schedule()
        committed, outputs = (nothing, None) if answer is None else side.commit(answer)
        timings.append(Timing(planned, committed))
        given.append((plan, outputs))
    for plan, outputs in given:
        delivered = () if outputs is None else side.read_outputs(outputs)
        track.note(side.read_plan(plan), delivered)
    return timings
