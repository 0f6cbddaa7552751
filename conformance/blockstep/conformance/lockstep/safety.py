"""Safety: the equivalence of an engine that decides differently: properties, no comparison.

The specification is one way to schedule. An engine that admits, evicts or preempts by other rules
is not wrong for it, so no answer is compared with the specification's. It is judged by what holds
for every engine: the worker lives on its plans and finds in each slot what was written for that
very prefix (P2, P3, P4, P6, P24, P26), budgets are kept (P9), what is delivered is what was sampled
(P13), all ends once arrivals stop (P10), and, where it shows its state, the sentences of `JUDGED`.

Who is live and what is in flight follows from the engine's own answers. The specification is asked
one question, and always in its empty state: whether a request can ever fit (P11).

A factory declares the equivalence, by an attribute of this name:

    class Adapter:
        equivalence = Safety(fit_config=..., fit_request=...)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from blockstep.conformance.engine import Capability, EngineFactory
from blockstep.conformance.judge.properties import ANSWER_TYPES, Sentence, Step, output, pool
from blockstep.conformance.judge.properties.output import cut_at_stop
from blockstep.conformance.lockstep.driver import Exchange, LockStep, _fault
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.conformance.protocol.program import Action, Hostile, Misanswer
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.profiles import STRICT, Profile
from blockstep.spec.transition import transition
from blockstep.spec.vocabulary import (
    Abort,
    Aborted,
    Ack,
    BlockId,
    BlockKey,
    CachedRow,
    Commit,
    Config,
    ConfigError,
    ConfigProblem,
    Drafts,
    Event,
    FinishReason,
    GrammarReady,
    NewRow,
    Observation,
    OutputRow,
    Outputs,
    PauseState,
    Plan,
    Rejected,
    Request,
    RequestId,
    RequestSnapshot,
    RowTokens,
    Schedule,
    Snapshot,
    Stats,
    Submit,
    TokenId,
    TokenIds,
)

JUDGED: tuple[Sentence, ...] = (
    # P1: counting holders is no policy.
    pool.pool_keeps_its_size,
    pool.every_block_is_free_or_held,
    pool.null_block_is_nobodys,
    # P2: who writes must own the block alone, whatever block it is.
    pool.no_table_names_a_block_twice,
    pool.block_still_to_be_written_has_one_holder,
    # P3, P6: a key says what is in the block. When to publish is a policy, what to publish is not.
    pool.cache_map_and_blocks_agree,
    pool.nothing_is_cached_without_caching,
    pool.held_block_carries_the_name_of_its_tokens,
    pool.held_block_carries_the_extra_keys_of_its_request,
    # P4: a block that is still written to cannot be hit.
    pool.block_still_to_be_written_is_not_published,
    # P13: the state holds what was delivered, and no one else has ended.
    output.finished_request_is_forgotten_and_others_stay,
    output.outputs_in_the_state_are_those_delivered,
    # P14: the counters after a commit follow from the tokens alone.
    output.sampling_leaves_one_token_to_compute,
)
"""Sentences about a state that any engine must satisfy.

Left out are those that fix one policy where others are right too: order of queues, rows and
eviction (P16), when to publish (P3, P4), the longest hit (P5), how many blocks and when (P8), who
might have been scheduled (P15), the counters (P12, P21), refusals (P7, P18), pause and reset (P9,
P25), and what a plan must repeat of the state (P26), which the worker judges by living on it.
"""

_NO_FEATURES = {"max_tokens", "arrival_time"}
"""Fields that every engine has: a length, and a place in the order of arrival."""


def _same_config(config: Config) -> Config:
    return config


def _same_request(request: Request, _config: Config) -> Request:
    return request


@dataclass(frozen=True, slots=True)
class Safety:
    """What the factory of an engine declares, to be held to this equivalence."""

    fit_config: Callable[[Config], Config] = _same_config
    """The nearest config that the engine can be built with."""
    fit_request: Callable[[Request, Config], Request] = _same_request
    """The nearest request that it understands. What is dropped on the way is counted."""
    takes_abort: bool = True
    situations: tuple[str, ...] = ("admitted", "stop_length")
    """What a run must have reached to mean anything; names of `witnesses.WITNESSES`."""
    name: str = "safety"

    def start(
        self,
        config: Config,
        make_engine: EngineFactory,
        token_seed: int = 0,
        vocabulary_size: int = 50,
        keep_exchanges: bool = False,
        profile: Profile = STRICT,
    ) -> SafetyRun:
        """Build the engine and all that watches it, as `LockStep.start` does.

        Raises:
            ConfigError: the engine cannot be built with this config.
        """
        fitting = self.fit_config(config)
        if fitting != config:
            name = next(f.name for f in fields(Config) if _differ(f.name, fitting, config))
            rule = "is not a config of this engine"
            fix = f"use {getattr(fitting, name)!r}"
            raise ConfigError([ConfigProblem(name, getattr(config, name), rule, fix)])
        run = SafetyRun.start(
            config, make_engine, token_seed, vocabulary_size, keep_exchanges, profile
        )
        run.equivalence, run.scope = self.name, self
        return run

    def fit(self, action: Action, config: Config) -> tuple[Action, tuple[str, ...]]:
        """The action that the engine understands, and the fields of a request that it drops."""
        if not isinstance(action, Submit):
            return action, ()
        request = self.fit_request(action.request, config)
        plain = Request("", ())
        dropped = tuple(
            f.name
            for f in fields(Request)
            if f.name not in _NO_FEATURES
            and _differ(f.name, request, action.request)
            and not _differ(f.name, request, plain)
        )
        return Submit(request), dropped


def show_state(
    requests: Sequence[RequestSnapshot],
    waiting: Sequence[RequestId],
    running: Sequence[RequestId],
    ref_counts: tuple[int, ...],
    free_queue: tuple[BlockId, ...],
    block_keys: tuple[BlockKey | None, ...],
    num_frames_in_flight: int,
) -> Snapshot:
    """A snapshot of what is judged at this equivalence; `requests` sorted by id.

    Queues are in their true order, for a state that returns is taken for a cycle. A block has a key
    if it can be hit now.
    """
    cached: dict[BlockKey, tuple[BlockId, ...]] = {}
    for block, key in enumerate(block_keys):
        if key is not None:
            cached[key] = (*cached.get(key, ()), block)
    return Snapshot(
        pause_state=PauseState.UNPAUSED,
        waiting=tuple(waiting),
        skipped_waiting=(),
        running=tuple(running),
        requests=tuple(requests),
        ref_counts=ref_counts,
        free_queue=free_queue,
        block_keys=block_keys,
        cached=cached,
        frames_in_flight=tuple(range(num_frames_in_flight)),
        next_frame_id=num_frames_in_flight,
        finished_req_ids=(),
        prev_scheduled_req_ids=(),
        stats=Stats(),
    )


def _differ(name: str, left: object, right: object) -> bool:
    return bool(getattr(left, name) != getattr(right, name))


@dataclass(slots=True)
class SafetyRun(LockStep):
    """One run of one engine, watched and not compared. Not reusable."""

    scope: Safety = field(default_factory=Safety)
    num_preemptions: Counter[str] = field(default_factory=Counter)

    def fit(self, action: Action) -> Action:
        """The action that the engine understands; what it drops is counted."""
        fitting, dropped = self.scope.fit(action, self.config)
        for name in dropped:
            self.skipped[name] = self.skipped.get(name, 0) + 1
        return fitting

    def resolve(self, action: Action) -> Event | None:
        """The event that an action comes to. Mistakes come to nothing: refusals are not judged."""
        if isinstance(action, Hostile | Misanswer):
            return None
        return LockStep.resolve(self, action)

    def _proposal(self, rows: tuple[RowTokens, ...]) -> Drafts | None:
        """Drafts for those who have not ended."""
        rows = tuple(row for row in rows if row.request_id in self.live)
        return Drafts(rows) if rows else None

    def _is_welcome(self, event: Event) -> bool:
        """Whether any engine must take the event now; decided by what this one has answered."""
        match event:
            case Submit(request=request):
                name = request.request_id
                return (
                    name not in self.live
                    and not any(row.request_id == name for plan in self.plans for row in plan.rows)
                    and self.scope.fit_request(request, self.config) == request
                    and not isinstance(transition(self.spec.state, event), Rejected)
                )
            case Schedule():
                return len(self.plans) < self.config.max_frames_in_flight
            case Abort():
                return self.scope.takes_abort
            case GrammarReady(request_id=name):
                return name in self.live and self.live[name].structured_output
            case _:
                return True

    def apply(self, event: Event) -> list[Finding]:
        """Give one event to the engine and check what can be checked without a reference."""
        if not self._is_welcome(event):
            return []
        self.num_events += 1
        try:
            seen = self.engine.apply(event)
            after = self.engine.snapshot()
        except Exception as error:
            self._keep(Exchange(event, Ack(), None))
            return [_fault(error)]
        self._keep(Exchange(event, seen, seen))
        if isinstance(seen, Rejected) and isinstance(event, Submit):
            what = f"requests refused as {seen.code}"
            self.skipped[what] = self.skipped.get(what, 0) + 1
            return []
        due = ANSWER_TYPES[type(event)]
        if type(seen) is not due:
            what = f"{type(event).__name__} was answered with {type(seen).__name__}"
            return [_finding("P18", "answer_is_of_the_kind_of_the_event", what)]
        findings = [*self._judge_answer(event, seen), *self.worker.observe(event, seen)]
        if after is not None and self.before is not None:
            findings += self._judge_state(event, seen, self.before, after)
        if not findings:
            self._count(event, seen)
        self.before = after
        self._follow(event, seen)
        return findings

    def _judge_answer(self, event: Event, seen: Observation) -> Iterator[Finding]:
        match event, seen:
            case Schedule(), Plan() as plan:
                yield from self._judge_plan(plan)
            case Commit(), Outputs(rows=rows):
                yield from self._judge_outputs(event, rows)
            case Abort(request_ids=named), Aborted(request_ids=ended):
                wrong = sorted(set(ended) ^ (set(named) & self.live.keys()))
                if wrong:
                    told = f"not ended, or ended without being named: {wrong}"
                    yield _finding("P18", "abort_ends_exactly_the_unfinished_it_names", told)

    def _judge_plan(self, plan: Plan) -> Iterator[Finding]:
        """P9, and that a plan is about requests that there are."""
        config, rows = self.config, plan.rows
        total, limit = plan.total_num_scheduled_tokens, config.max_num_batched_tokens
        if total > limit:
            what = f"{total} tokens planned, {limit} allowed"
            yield _finding("P9", "plan_stays_within_token_budget", what)
        if len(rows) > config.max_num_seqs:
            what = f"{len(rows)} rows planned, {config.max_num_seqs} allowed"
            yield _finding("P9", "plan_stays_within_max_num_seqs", what)
        names = [row.request_id for row in rows]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield _finding("P26", "request_has_one_row", f"{name!r} has {names.count(name)} rows")
        for row in rows:
            name, end = row.request_id, row.num_computed_tokens + row.num_scheduled_tokens
            if name not in self.live:
                yield _finding("P26", "row_is_of_an_unfinished_request", f"{name!r} has ended")
            elif isinstance(row, NewRow) and row.request != self.live[name]:
                what = f"{name!r} is not the request that was submitted"
                yield _finding("P26", "new_row_carries_the_request_as_submitted", what)
            if end > config.max_model_len:
                what = f"{name!r} runs {end} tokens, the model takes {config.max_model_len}"
                yield _finding("P9", "row_stays_within_max_model_len", what)

    def _judge_outputs(self, event: Commit, rows: tuple[OutputRow, ...]) -> Iterator[Finding]:
        """P13: each unfinished request of the frame gets what it sampled, up to its stop."""
        expected = dict(self._expected_outputs(event))
        names = [row.request_id for row in rows]
        if sorted(names) != sorted(expected):
            difference = Difference("rows", str(sorted(expected)), str(sorted(names)))
            what = "others are told of tokens than those who sampled"
            yield _finding("P13", "delivered_rows_are_those_that_sampled", what, difference)
        for row in rows:
            name = row.request_id
            if name not in expected:
                continue
            tokens, stop = expected[name]
            if row.new_token_ids != tokens:
                difference = Difference("new_token_ids", str(tokens), str(row.new_token_ids))
                what = f"{name!r} was delivered the wrong tokens"
                sentence = "delivered_tokens_are_the_sampled_ones_until_the_stop"
                yield _finding("P13", sentence, what, difference)
            seen = None if row.finish_reason is None else (row.finish_reason, row.stop_token_id)
            if seen != stop:
                difference = Difference("finish_reason", _told(stop), _told(seen))
                what = f"{name!r} after {tokens}"
                yield _finding("P13", "finish_reason_is_the_one_that_holds", what, difference)

    def _expected_outputs(
        self, event: Commit
    ) -> Iterator[tuple[str, tuple[TokenIds, tuple[FinishReason, TokenId | None] | None]]]:
        for row in event.sampled:
            request = self.live.get(row.request_id)
            if request is not None and row.token_ids:
                said = list(self.said.get(row.request_id, ()))
                yield row.request_id, cut_at_stop(self.config, request, said, row.token_ids)

    def _judge_state(
        self, event: Event, seen: Observation, before: Snapshot, after: Snapshot
    ) -> list[Finding]:
        """The sentences of `JUDGED`, and what the worker can say about a state."""
        step = Step(self.config, self.num_events, event, seen, before, after)
        findings = [*self.worker.check_published(after)]
        if isinstance(event, Schedule | Commit):
            findings += self.worker.check_view(after)
        for sentence in JUDGED:
            if type(event) in sentence.kinds:
                try:
                    findings += sentence(step, self.ledger)
                except Exception as error:
                    what = f"the step makes no sense: {type(error).__name__}: {error}"
                    findings.append(sentence.finding(what))
        self.ledger.record(step)
        return findings

    # Situations.

    def _count(self, event: Event, seen: Observation) -> None:
        match seen:
            case Ack() if isinstance(event, Submit):
                self.num_preemptions.pop(event.request.request_id, None)
            case Plan() as plan:
                self.witnesses.counts.update(self._situations_of_plan(plan))
            case Outputs(rows=rows):
                ended = [row for row in rows if row.finish_reason is not None]
                self.witnesses.counts.update(_stop_of(row) for row in ended)
                if len(ended) > 1:
                    self.witnesses.counts["several_ended_in_one_commit"] += 1
                if isinstance(event, Commit) and not all(row.token_ids for row in event.sampled):
                    self.witnesses.counts["prefill_row_sampled_nothing"] += 1

    def _situations_of_plan(self, plan: Plan) -> Iterator[str]:
        if not plan.rows:
            yield "empty_plan_with_work" if self.live else "empty_plan"
        if len(self.plans) in (1, 3):
            yield "several_frames_in_flight" if len(self.plans) == 1 else "four_frames_in_flight"
        if len(plan.preempted_req_ids) > 1:
            yield "several_preempted_in_one_step"
        for name in plan.preempted_req_ids:
            self.num_preemptions[name] += 1
            yield "preempted"
            if self.num_preemptions[name] > 1:
                yield "preempted_twice"
        for row in plan.rows:
            yield from self._situations_of_row(row)

    def _situations_of_row(self, row: NewRow | CachedRow) -> Iterator[str]:
        end = row.num_computed_tokens + row.num_scheduled_tokens
        said = len(self.said.get(row.request_id, ()))
        request = self.live[row.request_id]
        if end < len(request.prompt_token_ids) + said:
            yield "chunked_prefill"
        if isinstance(row, NewRow):
            yield "admitted"
            if row.num_computed_tokens:
                yield "prefix_hit"
        elif row.resumed:
            yield "preempted_then_resumed"
            if row.num_computed_tokens:
                yield "resumed_with_hit"
            if said:
                yield "resumed_with_outputs"


def _stop_of(row: OutputRow) -> str:
    if row.finish_reason is FinishReason.STOP:
        return "stop_eos" if row.stop_token_id is None else "stop_token"
    return f"stop_{row.finish_reason}"


def _told(stop: tuple[FinishReason, TokenId | None] | None) -> str:
    reason, token = stop or (None, None)
    return str(reason) if token is None else f"{reason} by token {token}"


def _finding(property_id: str, sentence: str, message: str, *differences: Difference) -> Finding:
    return Finding(FindingKind.PROPERTY, property_id, sentence, message, differences)


class SafetyCanary(SpecEngine):
    """An engine that a safety run must catch: it shows no state, and claims a hit that was none."""

    equivalence = Safety()

    def apply(self, event: Event) -> Observation:
        """The right answer, but the first newcomer of each plan leaves out a token."""
        answer = super().apply(event)
        if not isinstance(answer, Plan) or not answer.new:
            return answer
        row = answer.new[0]
        if row.num_scheduled_tokens == 1:
            return answer
        claimed = replace(
            row,
            num_computed_tokens=row.num_computed_tokens + 1,
            num_scheduled_tokens=row.num_scheduled_tokens - 1,
        )
        return replace(answer, new=(claimed, *answer.new[1:]))

    def snapshot(self) -> None:  # type: ignore[override]
        """Nothing: plans must be enough."""
        return

    def capabilities(self) -> frozenset[str]:
        """All that needs no refusal and no state."""
        return super().capabilities() - {Capability.REJECTION, Capability.SNAPSHOT}
