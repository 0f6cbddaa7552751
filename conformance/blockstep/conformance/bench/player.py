"""Player: the clients and the model worker of one side, who know only what plans say."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from blockstep.conformance.bench.scenarios import Scenario, get_token
from blockstep.conformance.bench.sides import Decision, PlannedRow, Side
from blockstep.spec.vocabulary import Config, Request, RequestId, TokenIds


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
    """One step: seconds of each reading, and what it was about."""

    schedule: tuple[float, ...]
    commit: tuple[float, ...]
    """Empty while plans pile up in the pipeline."""
    num_rows: int
    num_tokens: int
    num_new: int
    num_preempted: int


class Player:
    """Plays a scenario on one side, one step at a time.

    `digest` changes with every decision and every delivered token, so equal digests of two players
    say that both sides did the same.
    """

    def __init__(self, side: Side, scenario: Scenario, num_running: int, config: Config) -> None:
        self.side = side
        self.depth = config.max_frames_in_flight
        self.num_drafts = config.num_speculative_tokens
        self.concurrency = scenario.get_concurrency(num_running)
        self.live: dict[RequestId, Live] = {}
        self.running: set[RequestId] = set()
        self.has_all_submitted = False
        self._source: Iterator[Request] = scenario.get_requests(num_running)
        self._frames: deque[list[tuple[PlannedRow, bool]]] = deque()
        """In flight, oldest first: each row, and whether it samples."""
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """Of everything that was decided and delivered so far."""
        return self._digest.hexdigest()

    @property
    def is_done(self) -> bool:
        """Whether the traffic has ended."""
        return self.has_all_submitted and not self.live

    def step(self) -> Timing:
        """Submit what is due, plan, and answer the oldest plan once the pipeline is full."""
        self._submit_due()
        if self.num_drafts:
            self._propose()
        planned, decision = self.side.schedule()
        self._note(decision)
        committed: tuple[float, ...] = ()
        if len(self._frames) >= self.depth or (self._frames and not decision.rows):
            committed = self._answer()
        return Timing(
            planned,
            committed,
            num_rows=len(decision.rows),
            num_tokens=sum(row.num_scheduled_tokens for row in decision.rows),
            num_new=sum(row.is_new for row in decision.rows),
            num_preempted=len(decision.preempted),
        )

    def _submit_due(self) -> None:
        while not self.has_all_submitted and len(self.live) < self.concurrency:
            request = next(self._source, None)
            if request is None:
                self.has_all_submitted = True
                return
            self.side.submit(request)
            number = int(request.request_id[1:])
            self.live[request.request_id] = Live(number, len(request.prompt_token_ids))

    def _propose(self) -> None:
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
        self.side.propose(drafts)

    def _note(self, decision: Decision) -> None:
        # By id: a plan of the protocol does not say how new and resumed rows are mixed.
        rows = sorted(decision.rows, key=lambda row: row.request_id)
        self._digest.update(repr((rows, decision.preempted, decision.finished)).encode())
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

    def _answer(self) -> tuple[float, ...]:
        frame = self._frames.popleft()
        answer = [self._sample(row) if samples else () for row, samples in frame]
        seconds, delivered = self.side.commit(answer)
        self._digest.update(repr(sorted(delivered, key=lambda row: row[0])).encode())
        for name, tokens, reason in delivered:
            live = self.live[name]
            live.known += len(tokens)
            if reason is not None:
                del self.live[name]
                self.running.discard(name)
        return seconds

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
