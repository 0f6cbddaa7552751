"""Replay: a workload, driven through one engine alone, or through spec and engine in lock-step.

The replayer plays the clients and the model worker. It knows only what it submitted and what the
plans say, so it decides for itself which rows sample, what each request has been given, and which
blocks are held; an engine that loses a token is found out without any reference.

Time is virtual. `Arrivals.OPEN` submits a request when its `arrival_time` has come, where each
step takes `ticks_per_step`; an idle engine sleeps until the next arrival. `Arrivals.CLOSED`
ignores times and keeps `concurrency` requests unfinished, in order of arrival: prompts that wait
for nothing are not even spelled out.

Every sampled token is a token id that no other position of any request has, so outputs never
share blocks, and every request runs to its `max_tokens` (or `max_model_len`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from blockstep.conformance.draw.workloads import OUTPUT_TOKENS_START, WorkloadFormat
from blockstep.conformance.engine import Engine, EngineFactory
from blockstep.conformance.protocol.compare import observation_differences, snapshot_differences
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.spec.vocabulary import (
    Ack,
    BlockId,
    BlockTables,
    CachedRow,
    Commit,
    Config,
    Event,
    FinishReason,
    GrammarReady,
    NewRow,
    Observation,
    Outputs,
    Plan,
    Rejected,
    Request,
    RequestId,
    RowTokens,
    Schedule,
    Snapshot,
    Submit,
    TokenIds,
)

OUTPUT_TOKENS = 1 << 30
"""Distinct output tokens before ids repeat."""

DIFFERENCES_MAX = 20
"""Differences kept of one divergence: a real pool has a hundred thousand blocks."""

PROGRESS_STEPS = 256
"""Steps between two calls of `on_progress`."""


class Arrivals(StrEnum):
    """When requests are submitted."""

    OPEN = "open"
    """At their arrival time, however busy the engine is."""
    CLOSED = "closed"
    """As soon as fewer than `concurrency` are unfinished."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast requests come."""

    arrivals: Arrivals = Arrivals.CLOSED
    concurrency: int = 256
    """Requests unfinished at once, at most, when arrivals are closed."""
    ticks_per_step: int = 50
    """Ticks that one step takes, when arrivals are open; the ticks of a workload are ms."""

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.ticks_per_step < 1:
            raise ValueError(f"{self}: concurrency and ticks_per_step must be at least 1")


@dataclass(frozen=True, slots=True)
class ReplayPreset:
    """A config and a pace that suit one workload."""

    config: Config
    pace: Pace


REPLAY_PRESETS: Mapping[WorkloadFormat, ReplayPreset] = MappingProxyType(
    {
        # All blocks that the whole trace ever allocates fit (191,195): nothing is evicted, so
        # what hits depends on the trace alone.
        WorkloadFormat.MOONCAKE: ReplayPreset(
            Config(
                num_blocks=200_000,
                block_size=512,
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_model_len=131_072,
            ),
            Pace(Arrivals.CLOSED, concurrency=256),
        ),
        # A pool under pressure: prompts are unique, so what matters is the traffic in blocks.
        WorkloadFormat.AZURE: ReplayPreset(
            Config(
                num_blocks=16_384,
                block_size=16,
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_model_len=16_384,
            ),
            Pace(Arrivals.CLOSED, concurrency=256),
        ),
        WorkloadFormat.AGENT: ReplayPreset(
            Config(
                num_blocks=65_536,
                block_size=16,
                max_num_seqs=64,
                max_num_batched_tokens=8192,
                max_model_len=65_536,
            ),
            Pace(Arrivals.CLOSED, concurrency=64),
        ),
    }
)
"""What `blockstep replay` uses unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a check is shown: one event that an engine took."""

    step: int
    """Schedules before it."""
    event: Event
    observation: Observation
    snapshot: Snapshot | None
    """The engine's; only at the snapshot cadence."""


Check: TypeAlias = Callable[[Moment], Finding | None]
"""A property, asked after every event; may keep a state of its own."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay is."""

    steps: int
    requests_submitted: int
    requests_finished: int
    requests_refused: int
    requests_unfinished: int


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay did. Rates are between 0 and 1, and 0 where nothing was counted."""

    equivalence: str
    """"exact" (snapshots equal), "observations", or "none": an engine alone."""
    snapshot_every: int
    """Events between two snapshots, with one more at the end; 0: none taken."""
    config: Config
    pace: Pace
    finding: Finding | None = None
    """What stopped the replay; None if it went through."""
    finding_step: int | None = None
    """Schedules before the event that `finding` is about."""
    finding_event: Event | None = None
    requests_submitted: int = 0
    requests_finished: int = 0
    requests_refused: Mapping[str, int] = field(default_factory=dict)
    """By reject code."""
    requests_running_peak: int = 0
    steps: int = 0
    """Schedules."""
    events: int = 0
    snapshots_taken: int = 0
    rows: int = 0
    """Rows of all plans."""
    tokens_scheduled: int = 0
    tokens_prompt: int = 0
    """Of requests at their first admission; likewise the next three."""
    tokens_prefix_hit: int = 0
    blocks_prompt: int = 0
    """A partial last block counts as one, as it does in the published traces."""
    blocks_prefix_hit: int = 0
    tokens_resumed_hit: int = 0
    """Prefix hits of requests that came back from preemption."""
    tokens_output: int = 0
    preemptions: int = 0
    pool_blocks_usable: int = 0
    pool_blocks_peak: int = 0
    """Blocks held after a plan, at most."""
    pool_blocks_mean: float = 0.0
    """Blocks held after a plan, on average over plans."""
    seconds: float = 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that a prefix hit served."""
        return _ratio(self.tokens_prefix_hit, self.tokens_prompt)

    @property
    def block_hit_rate(self) -> float:
        """Share of prompt blocks that a prefix hit served."""
        return _ratio(self.blocks_prefix_hit, self.blocks_prompt)

    @property
    def events_per_second(self) -> float:
        """Events by wall clock, the replayer's own work included."""
        return _ratio(self.events, self.seconds)

    def to_json(self) -> dict[str, object]:
        """The report in JSON types, with stable keys."""
        plain: dict[str, object] = {"format": "blockstep-replay", "version": 1}
        for spec in fields(self):
            plain[spec.name] = getattr(self, spec.name)
        plain["config"] = _plain_fields(self.config)
        plain["pace"] = _plain_fields(self.pace)
        plain["requests_refused"] = dict(sorted(self.requests_refused.items()))
        plain["finding"] = None if self.finding is None else _plain_finding(self.finding)
        plain["finding_event"] = None if self.finding_event is None else repr(self.finding_event)
        plain["prefix_hit_rate"] = self.prefix_hit_rate
        plain["block_hit_rate"] = self.block_hit_rate
        plain["events_per_second"] = self.events_per_second
        return plain


def replay(
    requests: Iterable[Request],
    config: Config,
    engine_factory: EngineFactory,
    *,
    spec_factory: EngineFactory | None = None,
    pace: Pace | None = None,
    checks: Sequence[Check] = (),
    snapshot_every: int = 1,
    steps_max: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayReport:
    """Drive `requests` (by time of arrival) to their ends, or to the first finding.

    With `spec_factory` every event goes to both, and every observation is compared; snapshots
    every `snapshot_every` events and at the end (0: never). An engine alone is asked for snapshots
    only if there are `checks` to show them to. `steps_max` Schedules are the end of it in any case
    (a LIVENESS finding), and so is a long run of steps that deliver nothing. `clock` gives seconds
    and is used for the report only.

    What the factories raise (a `ConfigError`, say) passes through; what the engines raise later
    is a finding.
    """
    if snapshot_every < 0:
        raise ValueError(f"snapshot_every = {snapshot_every}: must be at least 0")
    started = clock()
    pace = Pace() if pace is None else pace
    sides = _Sides(engine_factory, spec_factory, config, checks, snapshot_every)
    run = _Replay(iter(requests), config, pace, sides, steps_max, on_progress)
    finding: Finding | None = None
    try:
        run.drive()
    except _Found as found:
        finding = found.finding
    return run.report(finding, clock() - started)


# --- both sides of the comparison


class _Found(Exception):
    """Unwinds the loop with what was found."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(finding.message)


class _Sides:
    """The engine, perhaps the spec beside it, and the checks on top."""

    def __init__(
        self,
        engine_factory: EngineFactory,
        spec_factory: EngineFactory | None,
        config: Config,
        checks: Sequence[Check],
        snapshot_every: int,
    ) -> None:
        self._spec = None if spec_factory is None else spec_factory(config)
        self._engine = engine_factory(config)
        self._checks = tuple(checks)
        compares = self._spec is not None or bool(self._checks)
        self.snapshot_every = snapshot_every if compares else 0
        self.events = 0
        self.snapshots_taken = 0
        self.snapshots_compared = 0
        self.step = 0
        """Schedules so far."""
        self.last_event: Event | None = None
        self._bare = self._spec is None and not self._checks

    @property
    def equivalence(self) -> str:
        """Which equivalence held so far (architecture D4)."""
        if self._spec is None:
            return "none"
        return "exact" if self.snapshots_compared else "observations"

    def apply(self, event: Event) -> Observation:
        """Let both sides take `event`; the engine's answer. Raises `_Found`."""
        self.last_event = event
        self.events += 1
        expected: Observation | None = None
        if self._spec is not None:
            expected = _guarded(self._spec, event, FindingKind.SPEC)
        seen = _guarded(self._engine, event, FindingKind.FAULT)
        if expected is not None and seen != expected:
            raise _divergence("observation", observation_differences(expected, seen))
        if not self._bare:
            self._look(event, seen)
        return seen

    def finish(self) -> None:
        """Compare the last states, wherever the cadence stood. Raises `_Found`."""
        if self.snapshot_every and self.events % self.snapshot_every != 0:
            self._compare_snapshots()

    def _look(self, event: Event, seen: Observation) -> None:
        snapshot: Snapshot | None = None
        if self.snapshot_every and self.events % self.snapshot_every == 0:
            snapshot = self._compare_snapshots()
        for check in self._checks:
            finding = check(Moment(self.step, event, seen, snapshot))
            if finding is not None:
                raise _Found(finding)

    def _compare_snapshots(self) -> Snapshot | None:
        """The engine's snapshot, equal to the spec's where there is one."""
        snapshot = _guarded_snapshot(self._engine, FindingKind.FAULT)
        if snapshot is None:
            return None
        self.snapshots_taken += 1
        if self._spec is not None:
            expected = _guarded_snapshot(self._spec, FindingKind.SPEC)
            if expected is not None:
                self.snapshots_compared += 1
                if snapshot != expected:
                    raise _divergence("snapshot", snapshot_differences(expected, snapshot))
        return snapshot


def _guarded(engine: Engine, event: Event, kind: FindingKind) -> Observation:
    try:
        return engine.apply(event)
    except Exception as error:
        raise _Found(_raised(kind, type(event).__name__, error)) from error


def _guarded_snapshot(engine: Engine, kind: FindingKind) -> Snapshot | None:
    try:
        return engine.snapshot()
    except Exception as error:
        raise _Found(_raised(kind, "snapshot()", error)) from error


def _raised(kind: FindingKind, what: str, error: Exception) -> Finding:
    side = "spec" if kind is FindingKind.SPEC else "engine"
    message = f"{side} raised {type(error).__name__} at {what}: {error}"
    return Finding(kind, "", "an_event_is_taken_or_rejected", _cut(message, 400))


def _divergence(what: str, differences: tuple[Difference, ...]) -> _Found:
    named = ", ".join(difference.field for difference in differences[:4])
    if len(differences) > 4:
        named += f" and {len(differences) - 4} more"
    return _Found(
        Finding(
            FindingKind.DIVERGENCE,
            "",
            f"spec_and_engine_give_the_same_{what}",
            f"{what}s differ in {named}",
            differences[:DIFFERENCES_MAX],
        )
    )


# --- the loop


class _Live:
    """One unfinished request, as the replayer knows it."""

    __slots__ = ("end", "known", "prompt", "sampled", "table", "token")

    def __init__(self, prompt: int, end: int, token: int) -> None:
        self.prompt = prompt
        """Prompt tokens."""
        self.known = prompt
        """Prompt and output tokens."""
        self.end = end
        """The known tokens with which it ends."""
        self.token = token
        """Its next output, less `OUTPUT_TOKENS_START`, before it wraps around."""
        self.sampled: TokenIds = ()
        """What the commit under way says it sampled."""
        self.table: list[BlockId] = []
        """The blocks it holds, all groups in one list."""


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        source: Iterator[Request],
        config: Config,
        pace: Pace,
        sides: _Sides,
        steps_max: int | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source = source
        self._next = next(source, None)
        self._config = config
        self._pace = pace
        self._sides = sides
        self._steps_max = steps_max
        self._on_progress = on_progress
        self._ticks = 0
        self._live: dict[RequestId, _Live] = {}
        self._refs: dict[BlockId, int] = {}
        """Holders of each held block."""
        self._outputs_promised = 0
        """Tokens set aside as outputs of the requests submitted so far."""
        self._idle_steps = 0
        """Steps since something was delivered."""
        chunks = -(-config.max_model_len // config.max_num_batched_tokens)
        self._idle_steps_max = 1000 + 4 * config.max_num_seqs * chunks
        self._blocks_sum = 0
        self._refused: Counter[str] = Counter()
        self._submitted = self._finished = self._running_peak = self._blocks_peak = 0
        self._rows = self._scheduled = self._outputs = self._preemptions = 0
        self._prompt_tokens = self._hit_tokens = self._resumed_hit_tokens = 0
        self._prompt_blocks = self._hit_blocks = 0

    def drive(self) -> None:
        """Until every request is finished or refused. Raises `_Found`."""
        while True:
            self._submit_due()
            if not self._live:
                if self._next is None:
                    self._sides.finish()
                    return
                self._ticks = max(self._ticks, self._next.arrival_time)
                continue
            plan = self._schedule()
            if plan.new or plan.cached:
                self._commit(plan)
            elif not plan.preempted_req_ids:
                self._wait()
            if self._idle_steps >= self._idle_steps_max:
                raise _Found(self._liveness(f"{self._idle_steps} steps delivered nothing"))
            self._ticks += self._pace.ticks_per_step
            steps = self._sides.step
            if self._on_progress is not None and steps % PROGRESS_STEPS == 0:
                self._on_progress(self._progress())

    def _submit_due(self) -> None:
        closed = self._pace.arrivals is Arrivals.CLOSED
        while self._next is not None:
            if closed:
                if len(self._live) >= self._pace.concurrency:
                    return
            elif self._next.arrival_time > self._ticks:
                return
            request, self._next = self._next, None
            self._submit(request)
            self._next = next(self._source, None)

    def _submit(self, request: Request) -> None:
        self._submitted += 1
        observation = self._sides.apply(Submit(request))
        if isinstance(observation, Rejected):
            self._refused[observation.code.value] += 1
            return
        if not isinstance(observation, Ack):
            what = f"it gave {_cut(repr(observation))}"
            raise _Found(_broken("P11", "a_submit_is_taken_or_refused", what))
        prompt = len(request.prompt_token_ids)
        end = min(prompt + request.max_tokens, self._config.max_model_len)
        self._live[request.request_id] = _Live(prompt, end, self._outputs_promised)
        self._outputs_promised += end - prompt
        if request.structured_output:
            self._sides.apply(GrammarReady(request.request_id))

    # The next three run once per row of every plan: they are written for speed.

    def _schedule(self) -> Plan:
        sides = self._sides
        if self._steps_max is not None and sides.step >= self._steps_max:
            raise _Found(self._liveness(f"{sides.step} steps, the most allowed, were taken"))
        plan = sides.apply(Schedule())
        sides.step += 1
        self._idle_steps += 1
        if not isinstance(plan, Plan):
            raise _Found(_broken("P26", "a_schedule_gives_a_plan", f"it gave {_cut(repr(plan))}"))
        try:
            for request_id in plan.preempted_req_ids:
                self._release(self._live[request_id])
                self._preemptions += 1
            for new in plan.new:
                self._admit(new)
            for row in plan.cached:
                if row.resumed:
                    self._resumed_hit_tokens += row.num_computed_tokens
                    self._release(self._live[row.request_id])
                if row.new_block_ids != ((),):
                    self._hold(self._live[row.request_id], row.new_block_ids)
        except KeyError as error:
            raise _Found(
                _broken("P26", "a_plan_names_unfinished_requests", f"it names {error}")
            ) from None
        rows = len(plan.new) + len(plan.cached)
        self._rows += rows
        self._running_peak = max(self._running_peak, rows)
        self._blocks_sum += len(self._refs)
        self._blocks_peak = max(self._blocks_peak, len(self._refs))
        return plan

    def _commit(self, plan: Plan) -> None:
        live = self._live
        answers: list[RowTokens] = []
        sampling = 0
        scheduled = 0
        for rows in (plan.new, plan.cached):
            row: NewRow | CachedRow
            for row in rows:
                request_id = row.request_id
                state = live.get(request_id)
                if state is None:
                    what = f"it names {request_id!r}"
                    raise _Found(_broken("P26", "a_plan_names_unfinished_requests", what))
                count = row.num_scheduled_tokens
                scheduled += count
                missing = state.known - row.num_computed_tokens - count
                if missing > 0:
                    state.sampled = ()
                elif missing == 0:
                    sampling += 1
                    token = OUTPUT_TOKENS_START + state.token % OUTPUT_TOKENS
                    state.sampled = (token,)
                    state.token += 1
                else:
                    what = f"{request_id!r} has {state.known} tokens, the plan ends {-missing} on"
                    raise _Found(_broken("P12", "a_plan_schedules_known_tokens", what))
                answers.append(RowTokens(request_id, state.sampled))
        self._scheduled += scheduled
        self._deliver(plan, tuple(answers), sampling)

    def _deliver(self, plan: Plan, answers: tuple[RowTokens, ...], sampling: int) -> None:
        outputs = self._sides.apply(Commit(plan.frame_id, answers))
        if not isinstance(outputs, Outputs):
            what = f"it gave {_cut(repr(outputs))}"
            raise _Found(_broken("P13", "a_commit_gives_outputs", what))
        if len(outputs.rows) != sampling:
            what = f"{sampling} rows sampled, {len(outputs.rows)} delivered"
            raise _Found(_broken("P13", "every_sampled_token_is_delivered_once", what))
        live = self._live
        for row in outputs.rows:
            state = live.get(row.request_id)
            if state is None or row.new_token_ids != state.sampled:
                what = f"{row.request_id!r} was given {_cut(repr(row.new_token_ids))}"
                raise _Found(_broken("P13", "every_sampled_token_is_delivered_once", what))
            state.known += 1
            if (state.known < state.end) is not (row.finish_reason is None):
                self._check_end(row.request_id, state, row.finish_reason)
            if row.finish_reason is not None:
                self._release(state)
                del live[row.request_id]
                self._finished += 1
        if sampling:
            self._outputs += sampling
            self._idle_steps = 0

    def _admit(self, row: NewRow) -> None:
        state = self._live[row.request.request_id]
        size = self._config.block_size
        self._prompt_tokens += state.prompt
        self._hit_tokens += row.num_computed_tokens
        self._prompt_blocks += -(-state.prompt // size)
        self._hit_blocks += row.num_computed_tokens // size
        self._hold(state, row.block_ids)

    def _hold(self, state: _Live, tables: BlockTables) -> None:
        refs = self._refs
        for table in tables:
            state.table += table
            for block in table:
                refs[block] = refs.get(block, 0) + 1

    def _release(self, state: _Live) -> None:
        refs = self._refs
        for block in state.table:
            holders = refs[block]
            if holders == 1:
                del refs[block]
            else:
                refs[block] = holders - 1
        state.table = []

    def _check_end(self, request_id: RequestId, state: _Live, reason: FinishReason | None) -> None:
        if reason in (FinishReason.STOP, FinishReason.REPETITION):
            return  # the request asked for it: workloads never do, other requests may
        what = f"{request_id!r} has {state.known} of {state.end} tokens and finish_reason {reason}"
        raise _Found(_broken("P13", "a_request_ends_at_its_length_cap", what))

    def _wait(self) -> None:
        """After an empty plan only an arrival can change anything: go there, or give up."""
        if self._next is None or self._pace.arrivals is Arrivals.CLOSED:
            raise _Found(self._liveness("an empty plan, and nothing is due from outside"))
        self._ticks = max(self._ticks, self._next.arrival_time)

    def _liveness(self, what: str) -> Finding:
        oldest = next(iter(self._live), "none")
        return Finding(
            FindingKind.LIVENESS,
            "P10",
            "unfinished_requests_make_progress",
            f"{what}; {len(self._live)} requests are unfinished, the oldest {oldest!r}",
        )

    def _progress(self) -> Progress:
        return Progress(
            self._sides.step,
            self._submitted,
            self._finished,
            self._refused.total(),
            len(self._live),
        )

    def report(self, finding: Finding | None, seconds: float) -> ReplayReport:
        """What happened so far."""
        sides = self._sides
        return ReplayReport(
            equivalence=sides.equivalence,
            snapshot_every=sides.snapshot_every,
            config=self._config,
            pace=self._pace,
            finding=finding,
            finding_step=None if finding is None else sides.step,
            finding_event=None if finding is None else sides.last_event,
            requests_submitted=self._submitted,
            requests_finished=self._finished,
            requests_refused=dict(self._refused),
            requests_running_peak=self._running_peak,
            steps=sides.step,
            events=sides.events,
            snapshots_taken=sides.snapshots_taken,
            rows=self._rows,
            tokens_scheduled=self._scheduled,
            tokens_prompt=self._prompt_tokens,
            tokens_prefix_hit=self._hit_tokens,
            blocks_prompt=self._prompt_blocks,
            blocks_prefix_hit=self._hit_blocks,
            tokens_resumed_hit=self._resumed_hit_tokens,
            tokens_output=self._outputs,
            preemptions=self._preemptions,
            pool_blocks_usable=self._config.num_usable_blocks,
            pool_blocks_peak=self._blocks_peak,
            pool_blocks_mean=_ratio(self._blocks_sum, sides.step),
            seconds=seconds,
        )


def _broken(property_id: str, sentence: str, message: str) -> Finding:
    return Finding(FindingKind.PROPERTY, property_id, sentence, message)


# --- the report


def render(report: ReplayReport, console: Console) -> None:
    """Print `report` as a table, and its finding, if any, beneath."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value, note in _lines(report):
        table.add_row(name, value, note)
    console.print(table)
    finding = report.finding
    if finding is None:
        return
    named = f"{finding.property_id} {finding.sentence}".strip()
    console.print(
        f"{finding.kind.value.upper()} at step {report.finding_step}: {named}",
        style="bold red",
        markup=False,
        highlight=False,
    )
    console.print(f"  {finding.message}", markup=False, highlight=False)
    console.print(f"  event     {_cut(repr(report.finding_event))}", markup=False, highlight=False)
    for difference in finding.differences:
        console.print(f"  {difference.field}", markup=False, highlight=False)
        console.print(f"    expected  {difference.expected}", markup=False, highlight=False)
        console.print(f"    seen      {difference.seen}", markup=False, highlight=False)


def _lines(report: ReplayReport) -> Iterator[tuple[str, str, str]]:
    refused = sum(report.requests_refused.values())
    codes = ", ".join(f"{n:,} {code}" for code, n in sorted(report.requests_refused.items()))
    yield "requests finished", f"{report.requests_finished:,}", f"of {report.requests_submitted:,}"
    yield "requests refused", f"{refused:,}", codes
    yield "steps", f"{report.steps:,}", f"{report.rows:,} rows"
    yield "events", f"{report.events:,}", f"{report.events_per_second:,.0f} per second"
    yield "tokens scheduled", f"{report.tokens_scheduled:,}", ""
    yield "prompt tokens", f"{report.tokens_prompt:,}", ""
    hits = f"{report.tokens_prefix_hit:,} tokens"
    yield "  prefix hits", f"{report.prefix_hit_rate:.1%}", hits
    blocks = f"{report.blocks_prefix_hit:,} of {report.blocks_prompt:,}"
    yield "  blocks hit", f"{report.block_hit_rate:.1%}", blocks
    yield "output tokens", f"{report.tokens_output:,}", ""
    resumed = f"{report.tokens_resumed_hit:,} tokens hit when resumed" if report.preemptions else ""
    yield "preemptions", f"{report.preemptions:,}", resumed
    usable = report.pool_blocks_usable
    yield "pool in use, mean", f"{_ratio(report.pool_blocks_mean, usable):.1%}", "of usable blocks"
    peak = f"{report.pool_blocks_peak:,} of {usable:,}"
    yield "pool in use, peak", f"{_ratio(report.pool_blocks_peak, usable):.1%}", peak
    cadence = f"snapshots every {report.snapshot_every} events" if report.snapshot_every else ""
    yield "equivalence", report.equivalence, cadence
    yield "seconds", f"{report.seconds:.2f}", ""


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _cut(text: str, length: int = 200) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _plain_fields(value: Config | Pace) -> dict[str, object]:
    plain = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    return {name: str(v) if isinstance(v, StrEnum) else v for name, v in plain.items()}


def _plain_finding(finding: Finding) -> dict[str, object]:
    return {
        "kind": str(finding.kind),
        "property_id": finding.property_id,
        "sentence": finding.sentence,
        "message": finding.message,
        "differences": [
            {"field": d.field, "expected": d.expected, "seen": d.seen, "note": d.note}
            for d in finding.differences
        ],
    }
