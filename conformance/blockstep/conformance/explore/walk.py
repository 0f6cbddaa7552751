"""A walk: visits every state of a world, breadth first, each once.

    level n  --expand-->  candidates  --by digest, to the shard that owns it-->  level n + 1

The digest decides which shard owns a state; each shard records those it has seen, and with several
jobs each shard is a process. A state is represented by the first path to it: of the least digest
among the states before, then of the first event. So the number of shards changes no result.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from blockstep.conformance.engine import (
    EXACT,
    Safety,
    get_capabilities,
    get_equivalence_name,
    get_traits,
)
from blockstep.conformance.explore.canonical import Canonicaliser, Digest
from blockstep.conformance.explore.cycles import find_cycles, get_no_progress
from blockstep.conformance.explore.shard import Edge, Hit, Level, Shard, Task
from blockstep.conformance.explore.transition_checks import get_moment
from blockstep.conformance.explore.world import Counts, get_events
from blockstep.conformance.protocol.features import find_lacking, get_missing
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.call import follow_parent
from blockstep.conformance.search.episodes import list_changes
from blockstep.spec.core.state import State
from blockstep.spec.profiles import initial_state
from blockstep.spec.vocabulary import Event, Observation, Rejected


class LostShardError(Exception):
    """A process of a walk has died, so the walk proves nothing."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One event on the path to a finding."""

    event: Event
    observation: Observation | None
    """None if the specification failed an assertion."""


@dataclass(slots=True)
class Walked:
    """The result of a walk."""

    task: Task
    counts: Counts
    is_complete: bool
    """Whether every state was visited."""
    seconds: float
    found: tuple[str, ...] = ()
    """The first finding, in lines for a reader."""
    path: tuple[PathStep, ...] = ()
    """The shortest path to it."""
    cycle: tuple[PathStep, ...] = ()
    """A cycle without progress that starts where `path` ends."""
    edges: list[Edge] = field(default_factory=list)
    programs: list[tuple[Event, ...]] = field(default_factory=list)
    """The paths to transitions that did something new, each included."""
    left_out: int = 0
    """Events that the engine could not be given."""
    equivalence: str = EXACT
    """The equivalence at which the engine was compared; at `safety` the states are the engine's."""
    excused: Counter[str] = field(default_factory=Counter)
    """Number of findings that its adapter declares, by the deviation."""
    notes: tuple[str, ...] = ()
    """Changes of the config for the engine, as `name=value`."""
    is_blind: bool = False
    """Whether the engine shows no state, so that each program counts as a state, without end."""


def get_obstacle(task: Task) -> str | None:
    """Return why a task's engine cannot walk its world; None if it can.

    Raises:
        EngineNotFoundError: it cannot be loaded.
    """
    if not task.engine:
        return None
    make_engine, config = load_engine(task.engine), task.world.config
    missing = get_missing(config, find_lacking(get_capabilities(make_engine)))
    if missing is not None:
        return f"lacks {missing}"
    scope = get_traits(make_engine).equivalence
    if scope is None or isinstance(scope, Safety):
        return None  # it walks its own states, with the nearest config
    changes = list_changes(config, scope.fit_config(config))
    return f"is built with {', '.join(changes)} only" if changes else None


def walk(
    task: Task, jobs: int = 1, on_progress: Callable[[int, int, int], None] = lambda *_: None
) -> Walked:
    """Visit every state of `task.world`, or all up to the first level with a finding.

    `on_progress` gets states, transitions and depth after each level.

    Raises:
        EngineNotFoundError: `task.engine` cannot be loaded.
        LostShardError: a process of the walk died.
    """
    started = time.perf_counter()
    opened: AbstractContextManager[_Shards] = nullcontext(_Local(task))
    if jobs > 1:
        opened = closing(_Processes(task, jobs))
    with opened as shards:
        states, transitions, refused, left_out, depth = 0, 0, 0, 0, -1
        edges: list[Edge] = []
        hits: list[Hit] = []
        novelties: list[tuple[Digest, int]] = []
        shards.call("start")
        num_new = 1
        while (
            num_new and not hits and states + num_new <= task.max_states and depth < task.max_depth
        ):
            states += num_new
            depth += 1
            levels: list[Level] = shards.call("expand")
            transitions += sum(level.transitions for level in levels)
            refused += sum(level.refused for level in levels)
            left_out += sum(level.left_out for level in levels)
            hits = [hit for level in levels for hit in level.hits]
            edges += [edge for level in levels for edge in level.edges]
            novelties += [found for level in levels for found in level.novelties]
            inboxes = [[c for level in levels for c in level.outboxes[i]] for i in range(jobs)]
            num_new = sum(shards.call("absorb", inboxes))
            on_progress(states, transitions, depth)
        counts = Counts(states, transitions, refused, depth)
        walked = Walked(task, counts, not num_new, 0.0, edges=edges, left_out=left_out)
        if task.engine:
            walked.equivalence = get_equivalence_name(load_engine(task.engine))
        walked.programs = [
            tuple(step.event for step in _path(task, shards, parent, number))
            for parent, number in novelties
        ]
        if hits:
            first = min(hits)
            walked.found = tuple(first.lines)
            walked.path = _path(task, shards, first.parent, first.number)
        elif not num_new and (task.properties or task.stalls):
            cycles = find_cycles(shards.call("stalls"))
            if cycles:
                walked.found = ("P10 a cycle of states without progress, nothing due from outside",)
                _, digests = min((len(_way(shards, cycle[0])), cycle) for cycle in cycles)
                walked.path = path = _path(task, shards, digests[0])
                start = _last_state(task, path)
                walked.cycle = _follow(task, start, [*digests[1:], digests[0]], stalls=True)
    walked.seconds = time.perf_counter() - started
    return walked


# --- the path to a state


def _path(task: Task, shards: _Shards, digest: Digest, number: int = -1) -> tuple[PathStep, ...]:
    """Return the representative path to a state, with the event of this number, if one is given."""
    start = initial_state(task.world.config, task.profile)
    steps = _follow(task, start, _way(shards, digest))
    if number < 0:
        return steps
    state = _last_state(task, steps)
    event = list(get_events(task.world, state))[number]
    try:
        return (*steps, PathStep(event, get_moment(state, event).observation))
    except AssertionError:
        return (*steps, PathStep(event, None))


def _way(shards: _Shards, digest: Digest) -> list[Digest]:
    """Return the states after the initial one on the representative path to a state."""
    digests: list[Digest] = []
    while True:
        parents = shards.call("parent", [digest] * shards.num_shards)
        parent = next(parent for parent in parents if parent is not None)
        if parent == digest:
            return digests[::-1]
        digests.append(digest)
        digest = parent


def _follow(
    task: Task, state: State, digests: list[Digest], *, stalls: bool = False
) -> tuple[PathStep, ...]:
    """Return the first events that lead from `state` to a state of each digest in turn; with
    `stalls`, those without progress.
    """
    digest_of = Canonicaliser(task.world).digest
    steps = []
    for digest in digests:
        for event in get_events(task.world, state):
            moment = get_moment(state, event)
            target = digest_of(moment.after)
            if stalls and not get_no_progress(moment, target == digest_of(state)):
                continue
            if target == digest and not isinstance(moment.observation, Rejected):
                steps.append(PathStep(event, moment.observation))
                state = moment.after
                break
        else:
            raise AssertionError("each state on a path leads to the next one")
    return tuple(steps)


def _last_state(task: Task, steps: tuple[PathStep, ...]) -> State:
    state = initial_state(task.world.config, task.profile)
    for step in steps:
        state = get_moment(state, step.event).after
    return state


# --- shards in this process, or each in its own


class _Local:
    num_shards = 1

    def __init__(self, task: Task) -> None:
        self._shard = Shard(task, 0, 1)

    def call(self, method: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        return [getattr(self._shard, method)(*([] if arguments is None else arguments))]


class _Processes:
    def __init__(self, task: Task, jobs: int) -> None:
        self.num_shards = jobs
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for index in range(jobs):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, task, index, jobs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def call(self, method: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        try:
            for index, pipe in enumerate(self._pipes):
                pipe.send((method, [] if arguments is None else [arguments[index]]))
            answers = [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError):
            raise LostShardError("a process of the walk died; is there memory for it?") from None
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, task: Task, index: int, num_shards: int) -> None:
    """Serve one shard in a process until the other end closes the pipe."""
    follow_parent()
    shard: Shard | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            shard = shard or Shard(task, index, num_shards)
            pipe.send(getattr(shard, method)(*arguments))
        except Exception as error:
            pipe.send(error)


_Shards: TypeAlias = _Local | _Processes
"""`call` calls a method of every shard, each with its argument, and returns the results in order.
"""
