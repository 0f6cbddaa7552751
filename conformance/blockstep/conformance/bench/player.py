"""Player: clients and model worker of a scenario, recorded once and played to each side.

The pilot plays a part of the scenario on an engine of its own and records the inputs: requests,
drafts, model outputs. Then each side gets the same inputs ready made, so that only the engine runs
while the clock does; its decisions are read afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from blockstep.conformance.bench import timed_engines as s
from blockstep.conformance.bench.scenarios import Scenario, get_token
from blockstep.conformance.bench.timed_engines import ALL_EXACT, Terms
from blockstep.conformance.protocol.features import UsageError
from blockstep.spec.vocabulary import Request, RequestId, TokenIds

FILL_STEPS_MAX = 1000
"""Number of steps without a further running request after which the fill is given up."""

Timing: TypeAlias = tuple[s.Times, s.Times]
"""Times of schedule and commit in one step; zeros while the pipeline fills."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The inputs of one step."""

    submitted: list[Request]
    drafts: s.Answer
    answer: s.Answer | None
    """Model output for the oldest plan in flight; None while the pipeline fills."""
    counts: tuple[int, int, int, int]
    """Rows, tokens, new and preempted requests of the plan."""
    digest: str
    """Digest of all decisions and deliveries so far."""


@dataclass(slots=True)
class Live:
    """An unfinished request as client and worker know it."""

    number: int
    known: int
    """Prompt and delivered output tokens."""
    promised: int = 0
    """Number of outputs that plans in flight will sample."""
    proposal: TokenIds = ()
    """Drafts proposed for its next row."""


class Pilot:
    """Plays clients and worker on one side, step by step, and records their inputs."""

    def __init__(self, scenario: Scenario, num_running: int, terms: Terms = ALL_EXACT) -> None:
        self.scenario = scenario
        self.num_running = num_running
        self.terms = terms
        self.config = terms.fit_config(scenario.get_config(num_running))
        self.side = self.open_side(terms.pilot)
        self.live: dict[RequestId, Live] = {}
        self.running: set[RequestId] = set()
        self.has_all_submitted = False
        self._source = terms.fit_requests(scenario.get_requests(num_running), self.config)
        self._frames: deque[list[tuple[s.PlannedRow, bool]]] = deque()
        """Plans in flight, oldest first: each row, and whether it samples."""

    def open_side(self, engine: str, through_apply: bool = False) -> s.TimedEngine:
        """Return a side for `engine`. Raises as `sides.open_side`."""
        try:
            side = s.open_side(engine, self.config, through_apply)
        except s.SideError as error:
            raise self.accuse(engine, error) from error
        side.sees_blocks = self.terms.sees_blocks
        return side

    def fill(self) -> list[Moment]:
        """Play until enough requests run and the untimed steps are over; return the inputs.

        Raises:
            UsageError: the wanted number of requests never runs.
        """
        wanted = self.scenario.min_running * self.num_running
        moments: list[Moment] = []
        most, num_since = 0, 0
        while len(self.running) < wanted:
            if num_since == FILL_STEPS_MAX or (
                moments and not self.live and self.has_all_submitted
            ):
                raise UsageError(
                    f"scenario {self.scenario.name}: of {self.num_running:,} requests no more than "
                    f"{most:,} run at once on {self.terms.pilot}: take a smaller -n or another "
                    "--scenario"
                )
            moments += self.play(1)
            num_since = 0 if len(self.running) > most else num_since + 1
            most = max(most, len(self.running))
        return moments + self.play(self.scenario.num_warmup)

    def play(self, num_steps: int) -> list[Moment]:
        """Play `num_steps` steps, or fewer if the workload ends; return the inputs."""
        moments: list[Moment] = []
        try:
            while len(moments) < num_steps and (self.live or not self.has_all_submitted):
                moments.append(self._step())
        except s.SideError as error:
            raise self.accuse(self.terms.pilot, error) from error
        return moments

    def accuse(self, engine: str, error: s.SideError) -> s.SideError:
        """Return the error with the scenario and the engine."""
        where = f"scenario {self.scenario.name}: {engine}"
        return s.SideError(f"{where}: {error}; `blockstep check` finds out why")

    def _step(self) -> Moment:
        """Submit what is due, plan, and answer the oldest plan once the pipeline is full."""
        submitted, drafts = self._submit_due(), self._propose()
        plan, _ = self.side.schedule()
        decision = self.side.read_plan(plan)
        self.running.difference_update(decision.preempted)
        if decision.rows:
            self.side.frames.append(plan)
            self._frames.append([(row, self._promise(row)) for row in decision.rows])
        answer: s.Answer | None = None
        delivered: s.Delivered = ()
        is_full = len(self._frames) >= self.config.max_frames_in_flight
        if is_full or (self._frames and not decision.rows):
            answer = [
                (row.request_id, self._sample(row) if samples else ())
                for row, samples in self._frames.popleft()
            ]
            outputs, _ = self.side.commit(self.side.prepare(answer))
            delivered = self.side.read_outputs(outputs)
            self._take(delivered)
        counts = (
            len(decision.rows),
            sum(row.num_scheduled_tokens for row in decision.rows),
            sum(row.is_new for row in decision.rows),
            len(decision.preempted),
        )
        return Moment(submitted, drafts, answer, counts, self.side.note(decision, delivered))

    def _submit_due(self) -> list[Request]:
        room = self.scenario.get_concurrency(self.num_running) - len(self.live)
        due = list(islice(self._source, room))
        self.has_all_submitted = len(due) < room
        taken = [request for request in due if self.side.submit(request)]
        for request in taken:
            number = int(request.request_id[1:])
            self.live[request.request_id] = Live(number, len(request.prompt_token_ids))
        return taken

    def _propose(self) -> s.Answer:
        """Zero to all drafts of a request agree with what it will say, turn by turn."""
        num_drafts = self.config.num_speculative_tokens
        if not num_drafts:
            return ()
        for name in self.running:
            live = self.live[name]
            agreeing = (live.number + live.known) % (num_drafts + 1)
            live.proposal = tuple(
                get_token(live.number, live.known + offset) + (offset >= agreeing)
                for offset in range(num_drafts)
            )
        drafts = [(name, self.live[name].proposal) for name in sorted(self.running)]
        self.side.propose(drafts)
        return drafts

    def _promise(self, row: s.PlannedRow) -> bool:
        """Return whether a row samples, and count the outputs that it will sample."""
        live = self._find(row.request_id)
        reached = row.num_computed_tokens + row.num_scheduled_tokens
        samples = reached - row.num_drafts >= live.known + live.promised
        if samples:
            live.promised += 1 + row.num_drafts
            self.running.add(row.request_id)
        return samples

    def _take(self, delivered: s.Delivered) -> None:
        for name, tokens, reason in delivered:
            self._find(name).known += len(tokens)
            if reason is not None:
                del self.live[name]
                self.running.discard(name)

    def _find(self, name: RequestId) -> Live:
        if name not in self.live:
            raise s.SideError(f"the engine names {name!r}, which was not submitted or has finished")
        return self.live[name]

    def _sample(self, row: s.PlannedRow) -> TokenIds:
        """Return the tokens of a row that samples: the accepted drafts and one more."""
        live = self.live.get(row.request_id)
        if live is None:
            return (0,)  # the request has finished; its token is not used
        live.promised -= 1 + row.num_drafts
        tokens = [get_token(live.number, live.known)]
        for draft in live.proposal[: row.num_drafts]:
            if draft != tokens[-1]:
                break
            tokens.append(get_token(live.number, live.known + len(tokens)))
        return tuple(tokens)


def play(side: s.TimedEngine, moments: Sequence[Moment], engine: str, pilot: Pilot) -> list[Timing]:
    """Play recorded inputs to a side and time it; then read its decisions.

    Raises:
        NotEqualError: the decisions differ from the pilot's.
    """
    answers = [None if m.answer is None else side.prepare(m.answer) for m in moments]
    timings: list[Timing] = []
    given: list[tuple[Any, Any]] = []
    try:
        for moment, answer in zip(moments, answers, strict=True):
            for request in moment.submitted:
                if not side.submit(request):
                    raise s.NotEqualError(f"{request.request_id} is refused")
            if moment.drafts:
                side.propose(moment.drafts)
            plan, seconds = side.schedule()
            planned = side.get_times(plan, seconds)
            if moment.counts[0]:
                side.frames.append(plan)
            outputs, committed = None, (0.0,) * len(planned)
            if answer is not None:
                outputs, seconds = side.commit(answer)
                committed = side.get_times(outputs, seconds)
            timings.append((planned, committed))
            given.append((plan, outputs))
        digests = [
            side.note(side.read_plan(plan), side.read_outputs(outputs) if outputs else ())
            for plan, outputs in given
        ]
    except s.NotEqualError:
        digests = []
    except s.SideError as error:
        raise pilot.accuse(engine, error) from error
    if digests != [moment.digest for moment in moments]:
        other = "the same twice" if engine == pilot.terms.pilot else f"as {pilot.terms.pilot} does"
        raise s.NotEqualError(
            f"scenario {pilot.scenario.name}: {engine} does not decide {other}, so its times "
            "cannot be compared; `blockstep check` finds out why"
        )
    return timings
