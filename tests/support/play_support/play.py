"""Play: an engine run up to a step, the history and the worker, and ways to change that step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.judge.checks import check_step
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.worker import Worker
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.protocol.token_function import token_function
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import (
    BlockKey,
    Commit,
    Config,
    Drafts,
    Event,
    Outputs,
    Plan,
    Request,
    RowTokens,
    Schedule,
    Snapshot,
)

CONFIG = Config(
    num_blocks=9, block_size=2, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=16
)


class Play:
    """An engine with its history, a worker, and its last step."""

    default: ClassVar[EngineFactory] = HostEngine
    """The engine of plays that do not name one."""

    def __init__(self, config: Config = CONFIG, make_engine: EngineFactory | None = None) -> None:
        self.config = config
        self.make_engine = make_engine or type(self).default
        self.engine: Any = self.make_engine(config)
        self.history = History(config)
        self.worker = Worker(config, token_function(1, 50))
        self.before = self._snapshot()
        self.client = Client()
        self.events: list[Event] = []
        self._last: Step | None = None

    @property
    def plans(self) -> list[Plan]:
        return self.client.plans

    @property
    def step(self) -> Step:
        assert self._last is not None
        return self._last

    def do(self, *events: Event) -> Play:
        """Apply events; each step must pass all checks. Return the play itself."""
        for event in events:
            step = self.take(event)
            assert check_step(step, self.history, self.worker) == []
            self.client.follow(event, step.observation)
        return self

    def take(self, event: Event) -> Step:
        """Apply an event and return its step, which is not checked."""
        if self._last is not None:
            self.history.record(self._last)
        self.events.append(event)
        observation = self.engine.apply(event)
        after = self._snapshot()
        self._last = Step(self.config, len(self.events), event, observation, self.before, after)
        self.before = after
        return self._last

    def rewound(self) -> tuple[Play, Event]:
        """Return a new play with all events but the last one, and that event."""
        play = Play(self.config, self.make_engine)
        play.worker.acceptance = self.worker.acceptance
        return play.do(*self.events[:-1]), self.events[-1]

    def _snapshot(self) -> Snapshot:
        snapshot: Snapshot | None = self.engine.snapshot()
        assert snapshot is not None
        return snapshot

    def commit(self) -> Play:
        frame_id = self.plans[0].frame_id
        return self.do(Commit(frame_id, self.worker.answer(frame_id)))

    def run(self, num_steps: int) -> Play:
        for _ in range(num_steps):
            self.do(Schedule()).commit()
        return self

    def propose(self, name: str, count: int, num_right: int) -> Play:
        tokens = self.worker.propose(name, count, num_right)
        return self.do(Drafts((RowTokens(name, tokens),)))


def request(name: str, *tokens: int, **fields: Any) -> Request:
    return Request(name, tokens, **{"max_tokens": 3, **fields})


A = request("A", 1, 2, 3, 4, 5)
B = request("B", 1, 2, 3, 4, 9)
C = request("C", 7, 8, arrival_time=1)


Bend: TypeAlias = Callable[[Step], Step]
"""Returns a wrong step in place of the one that happened."""
Plant: TypeAlias = Callable[[Any], object]
"""Breaks an engine that was right until now."""
Case: TypeAlias = tuple[str, Callable[[], Play], Plant, Bend]
"""Name of a check, a play that passes all checks, a plant, and a bend of its last step."""


def nothing(_engine: Any) -> None:
    """Plant nothing: the engine is right, and the bend makes its step wrong."""


def same(step: Step) -> Step:
    """Return the step as it is."""
    return step


def after(step: Step, **fields: Any) -> Step:
    return replace(step, after=replace(step.after, **fields))


def before(step: Step, **fields: Any) -> Step:
    return replace(step, before=replace(step.before, **fields))


def observed(step: Step, **fields: Any) -> Step:
    return replace(step, observation=replace(step.observation, **fields))


def changed(step: Step, name: str, **fields: Any) -> Step:
    """Return the step with other fields in one request after it."""
    requests = tuple(
        replace(each, **fields) if each.request_id == name else each for each in step.after.requests
    )
    return after(step, requests=requests)


def with_row(step: Step, name: str, **fields: Any) -> Step:
    """Return the step with other fields in one request's row of the plan."""
    plan = step.plan
    new = [replace(row, **fields) if row.request_id == name else row for row in plan.new]
    cached = [replace(row, **fields) if row.request_id == name else row for row in plan.cached]
    return observed(step, new=tuple(new), cached=tuple(cached))


def first_output(step: Step, **fields: Any) -> Step:
    assert isinstance(step.observation, Outputs)
    rows = step.observation.rows
    return observed(step, rows=(replace(rows[0], **fields), *rows[1:]))


def counted(step: Step) -> Step:
    """Return the step with seven preemptions in its statistics."""
    return after(step, stats=replace(step.after.stats, preemptions=7))


def table_of(step: Step, name: str) -> tuple[int, ...]:
    return step.new[name].block_tables[0]


def with_key(step: Step, block: int, key: BlockKey | None) -> Step:
    keys = list(step.after.block_keys)
    keys[block] = key
    return after(step, block_keys=tuple(keys))


def with_count(step: Step, block: int, count: int) -> Step:
    counts = list(step.after.ref_counts)
    counts[block] = count
    return after(step, ref_counts=tuple(counts))
