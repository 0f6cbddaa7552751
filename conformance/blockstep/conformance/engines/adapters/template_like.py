"""Adapter of a scheduler: fill in five functions, in its own terms; the rest makes plans.

    blockstep check --engine NAME:make

What is not filled in yet is a finding, with the program that needs it. `blockstep explain Plan`
(or NewRow, CachedRow, Outputs, abort, ...) says what a word means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from blockstep.conformance.engine import Capability, EngineFault, EngineTraits, Safety
from blockstep.spec import vocabulary as v


def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config that the scheduler takes."""
    fitting = v.Config(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=False,
    )
    # --- only caching
    if config.enable_prefix_caching:
        fitting = replace(fitting, enable_prefix_caching=True)
    # --- only async
    if config.async_scheduling:
        fitting = replace(fitting, async_scheduling=True, max_frames_in_flight=2)
    # --- always
    return fitting  # add the options of the scheduler


def fit_request(request: v.Request, _config: v.Config) -> v.Request:
    """Return the nearest request that the scheduler takes: here a prompt and a length."""
    return v.Request(request.request_id, request.prompt_token_ids, request.max_tokens)


@dataclass
class Row:
    """The work of one request in one step: `count` tokens from position `start`."""

    request_id: v.RequestId
    start: int
    """Number of tokens before it whose KV exists: computed, or a prefix hit."""
    count: int
    blocks: tuple[v.BlockId, ...]
    """The blocks that it got since its last row; all of its blocks in its first row, in the first
    after a preemption, and if it is remapped. Block ids count from 1: 0 is the null block."""


@dataclass
class Step:
    """The work of one step: running requests before those that are admitted."""

    rows: Sequence[Row] = ()
    preempted: Sequence[v.RequestId] = ()
    """Requests that were preempted while the step was planned."""
    # --- only caching
    remapped: Sequence[v.RequestId] = ()
    """Running requests whose blocks were exchanged for others with the same content."""
    # --- always


@dataclass
class Life:
    """The adapter's record of one unfinished request."""

    request: v.Request
    outputs: list[int] = field(default_factory=list)
    has_run: bool = False
    is_preempted: bool = False
    # --- only async
    promised: Counter[v.FrameId] = field(default_factory=Counter)
    """Number of tokens that plans in flight will sample, by plan: placeholders until then."""
    # --- always

    @property
    def tokens(self) -> v.TokenIds:
        """Prompt and outputs, as far as they are known."""
        return (*self.request.prompt_token_ids, *self.outputs)

    # --- only async
    @property
    def num_promised(self) -> int:
        """Number of tokens that plans in flight will sample."""
        return self.promised.total()

    # --- always


class Adapter:
    """One run of the scheduler: built from a config, used once."""

    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request),
        out_of_reach=frozenset(),  # unreachable goals: {"preempted"} if it never preempts
        # --- only async
        max_depth=2,
        # --- always
    )

    def __init__(self, config: v.Config) -> None:
        self.config = config
        self.lives: dict[v.RequestId, Life] = {}
        self.last: set[v.RequestId] = set()
        """Requests with a row in the last plan."""
        self.ended: list[v.RequestId] = []
        """Requests that finished since the last plan."""
        self.num_plans = 0
        self.ending: list[v.RequestId] = []
        """Aborted requests that finish with the next plan."""
        self.build()

    # Fill in five functions, in the terms of the scheduler.

    def build(self) -> None:
        """Make the scheduler from `self.config`. It has `num_blocks - 1` usable blocks."""

    def add(self, request: v.Request) -> None:
        """Take a new request."""
        raise EngineFault("add() is not filled in: hand the request to the scheduler")

    def step(self) -> Step:
        """Plan one step; return no rows if nothing can run."""
        raise EngineFault("step() is not filled in: run the scheduler, and return Step(rows, ...)")

    def take(
        self, frame_id: v.FrameId, sampled: Mapping[v.RequestId, v.TokenIds]
    ) -> dict[v.RequestId, v.FinishReason | None]:
        """Take the tokens that rows of a plan sampled; return the finish reason of each request, or
        None.

        The order is that of scheduling, without requests that have finished since.
        """
        raise EngineFault("take() is not filled in: return {name: None or v.FinishReason.LENGTH}")

    def drop(self, request_ids: Sequence[v.RequestId]) -> Sequence[v.RequestId]:
        """Abort these unfinished requests; return the names of those that finished at once.

        A request that is left out finishes with the next plan, and has no row in it.
        """
        raise EngineFault("drop() is not filled in: end them, and return their names")

    # Complete: what the protocol asks for.

    def capabilities(self) -> frozenset[str]:
        """Return what it takes besides Submit, Schedule and Commit; the rest is never sent."""
        # --- only plain, caching
        return frozenset({Capability.ABORT})
        # --- only async
        return frozenset({Capability.ABORT, Capability.ASYNC})
        # --- always

    def snapshot(self) -> v.Snapshot | None:
        """Return its state after the last event, or None: then only its observations are
        checked.
        """
        return None

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event. An exception that is raised here is a finding."""
        match event:
            case v.Submit(request=request):
                self.lives[request.request_id] = Life(request)
                self.add(request)
                return v.Ack()
            case v.Schedule():
                return self.schedule()
            case v.Commit(frame_id=frame_id, sampled=sampled):
                return self.commit(frame_id, sampled)
            case v.Abort(request_ids=request_ids):
                return self.abort(request_ids)
        raise EngineFault(f"{type(event).__name__} is not taken, and no capability names it")

    def schedule(self) -> v.Plan:
        """Plan one step."""
        for name in tuple(self.ending):
            self.end(name)
        step, new, cached = self.step(), [], []
        for name in step.preempted:
            self.lives[name].is_preempted = True
        for row in step.rows:
            life = self.lives[row.request_id]
            if life.has_run:
                cached.append(self.make_cached_row(row, life))
            else:
                new.append(v.NewRow(life.request, (row.blocks,), row.start, row.count))
            life.has_run, life.is_preempted = True, False
            # --- only async
            if row.start + row.count == len(life.tokens) + life.num_promised:
                life.promised[self.num_plans] += (
                    1  # it samples, and the next plan counts on this token
                )
            # --- always
        plan = v.Plan(
            frame_id=self.num_plans,
            new=tuple(new),
            cached=tuple(cached),
            finished_req_ids=tuple(sorted(self.ended)),
            preempted_req_ids=tuple(sorted(step.preempted)),
            # --- only caching
            remapped_req_ids=tuple(sorted(step.remapped)),
            # --- always
        )
        self.num_plans, self.ended = self.num_plans + 1, []
        self.last = {row.request_id for row in step.rows}
        return plan

    def make_cached_row(self, row: Row, life: Life) -> v.CachedRow:
        """Return the row of a request that has had one."""
        num_outputs = len(life.outputs)
        # --- only async
        num_outputs += life.num_promised
        # --- always
        return v.CachedRow(
            request_id=row.request_id,
            resumed=life.is_preempted,
            new_block_ids=(row.blocks,),
            all_token_ids=None if row.request_id in self.last else life.tokens,
            num_computed_tokens=row.start,
            num_output_tokens=num_outputs,
            num_scheduled_tokens=row.count,
        )

    def commit(self, frame_id: v.FrameId, sampled: tuple[v.RowTokens, ...]) -> v.Outputs:
        """Deliver the tokens that the rows of a plan sampled; a row within its prompt sampled
        none.
        """
        living = {row.request_id: row.token_ids for row in sampled if row.request_id in self.lives}
        # --- only async
        for name in living:
            self.lives[name].promised.pop(frame_id, None)
        # --- always
        tokens = {name: token_ids for name, token_ids in living.items() if token_ids}
        rows = []
        for name, reason in self.take(frame_id, tokens).items():
            self.lives[name].outputs += living[name]
            rows.append(v.OutputRow(name, living[name], reason))
            if reason is not None:
                self.end(name)
        return v.Outputs(tuple(rows))

    def abort(self, request_ids: tuple[v.RequestId, ...]) -> v.Aborted:
        """Abort requests, at any time. Ids that are unknown or finished change nothing."""
        known = [name for name in dict.fromkeys(request_ids) if name in self.lives]
        dropped = set(self.drop([name for name in known if name not in self.ending]))
        ended = tuple(name for name in known if name in dropped)
        ending = tuple(name for name in known if name not in dropped)
        for name in ended:
            self.end(name)
        self.ending += [name for name in ending if name not in self.ending]
        return v.Aborted(ended, ending)

    def end(self, name: v.RequestId) -> None:
        """Forget a request; the next plan lists it as finished."""
        if name in self.ending:
            self.ending.remove(name)
        del self.lives[name]
        self.ended.append(name)


make = Adapter
"""The factory that `--engine NAME:make` calls with a config."""
