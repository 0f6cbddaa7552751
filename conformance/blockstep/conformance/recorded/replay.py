"""Replay of a workload by one engine alone, or by spec and engine in lock-step.

The replayer takes the part of the clients and of the model worker. It knows only what it submitted
and what the plans say, so it decides by itself which rows sample, which tokens each request got,
and which blocks are held; it finds an engine that loses a token without any reference.

Time is virtual. `Arrivals.OPEN` submits a request when its `arrival_time` has passed, where each
step takes `ticks_per_step`; an idle engine sleeps until the next arrival. `Arrivals.CLOSED`
ignores times and keeps `concurrency` requests unfinished, in order of arrival; later prompts are
not even built. A request that follows others (`follows`) is submitted when these have finished or
were rejected, and with open arrivals when its delay has passed.

Every sampled token is a token id that no other position of any request has, so outputs never share
blocks, and every request runs to its `max_tokens` (or `max_model_len`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from blockstep.conformance.draw.workloads import OUTPUT_TOKENS_START, Follows
from blockstep.conformance.engine import (
    EXACT,
    EngineFactory,
    get_traits,
)
from blockstep.conformance.protocol.findings import (
    NO_SUBJECTS,
    Finding,
    FindingKind,
    Subjects,
    of_request,
    violated,
)
from blockstep.conformance.protocol.type_check import fault_of_types
from blockstep.conformance.recorded.arrival_rate import Arrivals, Pace
from blockstep.conformance.recorded.replay_counts import ReplayReport
from blockstep.conformance.recorded.replay_targets import FindingRaised, Side, open_side
from blockstep.spec import vocabulary as v

OUTPUT_TOKENS = 1 << 30
"""Number of output tokens before ids repeat."""

DIFFERENCES_MAX = 20
"""The most differences kept of one divergence: a real pool has a hundred thousand blocks."""

PROGRESS_STEPS = 256
"""Steps between two calls of `on_progress`."""


def cut(text: str, length: int = 200) -> str:
    """Return `text`, cut to the length."""
    return text if len(text) <= length else text[: length - 3] + "..."


def replay(
    requests: Iterable[v.Request],
    config: v.Config,
    make_engine: EngineFactory,
    *,
    with_spec: bool = False,
    pace: Pace | None = None,
    snapshot_every: int = 1,
    steps_max: int | None = None,
    on_progress: Callable[[ReplayReport], None] = lambda _report: None,
    clock: Callable[[], float] = time.perf_counter,
    follows: Mapping[v.RequestId, Follows] | None = None,
) -> ReplayReport:
    """Play `requests` (sorted by arrival) until all have finished, or to the first finding.

    With `with_spec` every observation is compared with the spec's, and whole states every
    `snapshot_every` events and at the end (0: never); an engine that declares a weaker equivalence
    is compared at that, and gets the config and requests that it can take. The replay stops with a
    LIVENESS finding after `steps_max` Schedules, or after many steps that deliver nothing.
    `on_progress` gets the growing report. `clock` gives seconds and is used for the report only.

    An exception of the engine is a finding, also while it is built, except a `ConfigError`.
    """
    if snapshot_every < 0:
        raise ValueError(f"snapshot_every = {snapshot_every}: must be at least 0")
    started = clock()
    scope = get_traits(make_engine).equivalence
    config = config if scope is None else scope.fit_config(config)
    report = ReplayReport(config, pace or Pace(), pool_blocks_usable=config.num_usable_blocks)
    side: Side | None = None
    try:
        side = open_side(make_engine, config, report, with_spec, snapshot_every)
        run = _Replay(iter(requests), report, side, steps_max, on_progress, follows or {})
        try:
            run.drive()
        except FindingRaised:
            raise
        except Exception as error:  # an engine alone may answer anything
            event = run.last_event
            ill_typed = None if event is None else fault_of_types(event, run.last_seen, None)
            if ill_typed is None:
                raise
            raise FindingRaised(ill_typed) from error
    except FindingRaised as error:
        found = error.finding
        report.finding = replace(found, differences=found.differences[:DIFFERENCES_MAX])
        report.finding_step = report.steps
        report.finding_event = None if side is None else run.last_event
    if side is not None:
        report.snapshots_taken = side.num_compared
        report.excused = dict(sorted(side.excused.items()))
    if scope is None and report.snapshots_taken:
        report.equivalence = EXACT
    report.seconds = clock() - started
    return report


@dataclass(slots=True)
class _Live:
    """One unfinished request, as the replayer knows it."""

    prompt: int
    """Number of prompt tokens."""
    known: int
    """Number of prompt and output tokens."""
    end: int
    """Number of known tokens at which it finishes."""
    token: int
    """The next output token minus `OUTPUT_TOKENS_START`, before wrapping around."""
    sampled: v.TokenIds = ()
    """The token that this commit says it sampled."""
    table: list[v.BlockId] = field(default_factory=list)
    """The blocks that it holds, all KV groups in one list."""


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        source: Iterator[v.Request],
        report: ReplayReport,
        side: Side,
        steps_max: int | None,
        on_progress: Callable[[ReplayReport], None],
        follows: Mapping[v.RequestId, Follows],
    ) -> None:
        self._source = source
        self._next = next(source, None)
        self._follows = follows
        self._followed = {name for one in follows.values() for name in one.request_ids}
        self._ended_at: dict[v.RequestId, int] = {}
        """Ticks, of requests that others follow."""
        self._held: dict[v.RequestId, list[v.Request]] = {}
        """Requests that have arrived and wait for another one to finish, by that other one."""
        self._due: list[tuple[int, int, v.Request]] = []
        """Heap of requests whose predecessor has finished: due ticks, a number that breaks ties."""
        self._num_due = 0
        self._report = report
        self._config = config = report.config
        self._pace = report.pace
        self._side = side
        self._steps_max = steps_max
        self._on_progress = on_progress
        self.last_event: v.Event | None = None
        self.last_seen: v.Observation | None = None
        self._ticks = 0
        self._live: dict[v.RequestId, _Live] = {}
        self._refs: dict[v.BlockId, int] = {}
        """Number of holders of each held block."""
        self._outputs_promised = 0
        """Token ids reserved for outputs of the requests submitted so far."""
        self._idle_steps = 0
        """Steps since a token was delivered."""
        chunks = -(-config.max_model_len // config.max_num_batched_tokens)
        self._idle_steps_max = 1000 + 4 * config.max_num_seqs * chunks
        self._blocks_sum = 0

    def drive(self) -> None:
        """Run until every request is finished or rejected. Raises `FindingRaised`."""
        while True:
            self._submit_due()
            if not self._live:
                at = self._get_next_arrival()
                if at is None:
                    self._side.finish()
                    return
                self._ticks = max(self._ticks, at)
                continue
            plan = self._schedule()
            if plan.new or plan.cached:
                self._commit(plan)
            elif not plan.preempted_req_ids:
                self._wait()
            if self._idle_steps >= self._idle_steps_max:
                raise self._stall(f"{self._idle_steps} steps delivered nothing")
            self._ticks += self._pace.ticks_per_step
            if self._report.steps % PROGRESS_STEPS == 0:
                self._on_progress(self._report)

    def _get_next_arrival(self) -> int | None:
        """Return the ticks at which the next request is due; None: there is none."""
        ticks = [self._due[0][0]] if self._due else []
        ticks += [] if self._next is None else [self._next.arrival_time]
        return min(ticks, default=None)

    def _submit_due(self) -> None:
        closed = self._pace.arrivals is Arrivals.CLOSED
        while not (closed and len(self._live) >= self._pace.concurrency):
            if self._due and (closed or self._due[0][0] <= self._ticks):
                self._submit(heappop(self._due)[2])
            elif self._next is not None and (closed or self._next.arrival_time <= self._ticks):
                request, self._next = self._next, None
                if request.request_id in self._follows:
                    self._hold_back(request)
                else:
                    self._submit(request)
                self._next = next(self._source, None)
            else:
                return

    def _hold_back(self, request: v.Request) -> None:
        """Keep a request until all those that it follows have finished."""
        follows = self._follows[request.request_id]
        for before in follows.request_ids:
            if before not in self._ended_at:
                self._held.setdefault(before, []).append(request)
                return
        ended_at = max(self._ended_at[before] for before in follows.request_ids)
        due = max(request.arrival_time, ended_at + follows.delay)
        heappush(self._due, (due, self._num_due, request))
        self._num_due += 1

    def _end(self, request_id: v.RequestId) -> None:
        """Let the requests go that follow one that has finished or was refused."""
        if request_id in self._followed:
            self._ended_at[request_id] = self._ticks
            for request in self._held.pop(request_id, ()):
                self._hold_back(request)

    def _apply(self, event: v.Event) -> v.Observation:
        self.last_event = event
        self._report.events += 1
        self.last_seen = seen = self._side.apply(event)
        return seen

    def _submit(self, request: v.Request) -> None:
        report = self._report
        report.requests_submitted += 1
        observation = self._apply(v.Submit(request))
        if isinstance(observation, v.Rejected):
            code = observation.code.value
            report.requests_refused[code] = report.requests_refused.get(code, 0) + 1
            self._end(request.request_id)
            return
        if not isinstance(observation, v.Ack):
            what = f"it gave {cut(repr(observation))}"
            raise _broken("P11", "a_submit_is_taken_or_refused", what)
        prompt = len(request.prompt_token_ids)
        end = min(prompt + request.max_tokens, self._config.max_model_len)
        self._live[request.request_id] = _Live(prompt, prompt, end, self._outputs_promised)
        self._outputs_promised += end - prompt
        if request.structured_output:
            self._apply(v.GrammarReady(request.request_id))

    # The next three methods run once per row of every plan: they are written for speed.

    def _schedule(self) -> v.Plan:
        report = self._report
        if self._steps_max is not None and report.steps >= self._steps_max:
            raise self._stall(f"{report.steps} steps, the most allowed, were taken")
        plan = self._apply(v.Schedule())
        report.steps += 1
        self._idle_steps += 1
        if not isinstance(plan, v.Plan):
            raise _broken("P26", "a_schedule_gives_a_plan", f"it gave {cut(repr(plan))}")
        try:
            for request_id in plan.preempted_req_ids:
                self._release(self._live[request_id])
                report.preemptions += 1
            for new in plan.new:
                self._admit(new)
            for row in plan.cached:
                if row.resumed or row.request_id in plan.remapped_req_ids:
                    report.tokens_resumed_hit += row.num_computed_tokens * row.resumed
                    self._release(self._live[row.request_id])
                if row.new_block_ids != ((),):
                    self._hold(self._live[row.request_id], row.new_block_ids)
        except KeyError as error:
            raise _broken("P26", "a_plan_names_unfinished_requests", f"it names {error}") from None
        rows = len(plan.new) + len(plan.cached)
        report.rows += rows
        report.requests_running_peak = max(report.requests_running_peak, rows)
        report.pool_blocks_peak = max(report.pool_blocks_peak, len(self._refs))
        self._blocks_sum += len(self._refs)
        report.pool_blocks_mean = self._blocks_sum / report.steps
        return plan

    def _commit(self, plan: v.Plan) -> None:
        live = self._live
        answers: list[v.RowTokens] = []
        sampling = 0
        scheduled = 0
        for rows in (plan.new, plan.cached):
            row: v.NewRow | v.CachedRow
            for row in rows:
                request_id = row.request_id
                state = live.get(request_id)
                if state is None:
                    what = f"it names {request_id!r}"
                    raise _broken("P26", "a_plan_names_unfinished_requests", what)
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
                    raise _broken("P12", "a_plan_schedules_known_tokens", what)
                answers.append(v.RowTokens(request_id, state.sampled))
        self._report.tokens_scheduled += scheduled
        self._deliver(plan, tuple(answers), sampling)

    def _deliver(self, plan: v.Plan, answers: tuple[v.RowTokens, ...], sampling: int) -> None:
        outputs = self._apply(v.Commit(plan.frame_id, answers))
        if not isinstance(outputs, v.Outputs):
            what = f"it gave {cut(repr(outputs))}"
            raise _broken("P13", "a_commit_gives_outputs", what)
        if len(outputs.rows) != sampling:
            what = f"{sampling} rows sampled, {len(outputs.rows)} delivered"
            raise _broken("P13", "every_sampled_token_is_delivered_once", what)
        live = self._live
        for row in outputs.rows:
            state = live.get(row.request_id)
            if state is None or row.new_token_ids != state.sampled:
                what = f"{row.request_id!r} was given {cut(repr(row.new_token_ids))}"
                raise _broken("P13", "every_sampled_token_is_delivered_once", what)
            state.known += 1
            if (state.known < state.end) is not (row.finish_reason is None):
                self._check_end(row.request_id, state, row.finish_reason)
            if row.finish_reason is not None:
                self._release(state)
                del live[row.request_id]
                self._report.requests_finished += 1
                self._end(row.request_id)
        if sampling:
            self._report.tokens_output += sampling
            self._idle_steps = 0

    def _admit(self, row: v.NewRow) -> None:
        state, report = self._live[row.request.request_id], self._report
        size = self._config.block_size
        report.tokens_prompt += state.prompt
        report.tokens_prefix_hit += row.num_computed_tokens
        report.blocks_prompt += -(-state.prompt // size)
        report.blocks_prefix_hit += row.num_computed_tokens // size
        self._hold(state, row.block_ids)

    def _hold(self, state: _Live, tables: v.BlockTables) -> None:
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

    def _check_end(
        self, request_id: v.RequestId, state: _Live, reason: v.FinishReason | None
    ) -> None:
        if reason in (v.FinishReason.STOP, v.FinishReason.REPETITION):
            return  # the request allows it; those of workloads do not, others may
        what = f"{request_id!r} has {state.known} of {state.end} tokens and finish_reason {reason}"
        raise _broken("P13", "a_request_ends_at_its_length_cap", what, of_request(request_id))

    def _wait(self) -> None:
        """Go to the next arrival: after an empty plan nothing else changes anything."""
        at = self._get_next_arrival()
        if at is None or self._pace.arrivals is Arrivals.CLOSED:
            raise self._stall("an empty plan, and no output, load or arrival is due")
        self._ticks = max(self._ticks, at)

    def _stall(self, what: str) -> FindingRaised:
        oldest = next(iter(self._live), "none")
        message = f"{what}; {len(self._live)} requests are unfinished, the oldest {oldest!r}"
        sentence = "unfinished_requests_make_progress"
        subjects = Subjects(tuple(self._live)[:1])
        return FindingRaised(Finding(FindingKind.LIVENESS, "P10", sentence, message, (), subjects))


def _broken(
    property_id: str, sentence: str, message: str, subjects: Subjects = NO_SUBJECTS
) -> FindingRaised:
    return FindingRaised(violated(property_id, sentence, message, subjects=subjects))
