"""A walk through the states of an engine that is compared with nothing (`safety`).

    program --events of the world--> longer programs --by the state that they lead to--> each once

There is no specification to keep to, so the engine is the only one to say where a program leads:
programs are played from the start, each judged as in any run at `safety`, and two that
lead to equal states count as one. From each state the engine must also be able to end all requests.
An engine that shows no state has as many states as there are programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import TypeAlias

from blockstep.conformance.engine import EngineFactory
from blockstep.conformance.explore.shard import Task
from blockstep.conformance.explore.walk import PathStep, Walked
from blockstep.conformance.explore.world import Counts, World, get_forks
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import get_start
from blockstep.conformance.protocol.features import get_missing
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Drain, Propose
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import fit_config, list_changes
from blockstep.spec import vocabulary as v

Deed: TypeAlias = Action | v.Commit
"""An action, or a right model output for the oldest plan, with tokens from the vocabulary."""
Program: TypeAlias = tuple[Deed, ...]
BLIND_PROGRAMS_MAX = 500
"""The most programs of an engine that shows no state, unless fewer are asked for."""


def walk_alone(
    task: Task, on_progress: Callable[[int, int, int], None] = lambda *_: None
) -> Walked:
    """Visit the states of `task.engine` that `task.world` leads to, like `walk`.

    `Counts.refused` counts events that could not be taken, or that the engine rejected. If the
    engine shows no state, the walk is never complete, since programs have no end.

    Raises:
        EngineNotFoundError: `task.engine` cannot be loaded.
    """
    started = time.perf_counter()
    make_engine = load_engine(task.engine)
    config, _ = fit_config(task.world.config, make_engine)
    world = replace(task.world, config=config)
    walked = Walked(task, Counts(0, 0, 0, 0), False, 0.0)
    walked.equivalence, walked.notes = "safety", tuple(list_changes(task.world.config, config))
    first = _play(world, make_engine, ())[0]
    is_blind = walked.is_blind = first.before is None
    most = min(task.max_states, BLIND_PROGRAMS_MAX) if is_blind else task.max_states
    level: list[Program] = [()]
    seen, states, transitions, refused, depth = {_get_key(first)}, 0, 0, 0, -1
    while level and not walked.found and states + len(level) <= most and depth < task.max_depth:
        states, depth = states + len(level), depth + 1
        following: list[Program] = []
        for program in level:
            for deed in _list_deeds(world, _play(world, make_engine, program)[0], walked):
                run, findings = _play(world, make_engine, (*program, deed))
                walked.excused |= run.excuses.counts  # each is of one program
                if not findings and run.num_events == 0:
                    refused += 1
                    continue
                transitions += 1
                key = _get_key(run)
                is_new = is_blind or key not in seen
                if not findings and is_new:
                    seen.add(key)
                    following.append((*program, deed))
                    findings = run.perform(Drain()) if task.properties else []
                if findings and not walked.found:
                    walked.found = tuple(map(_format_finding, findings))
                    walked.path = _get_path(run)
        level = following
        on_progress(states, transitions, depth)
    walked.counts = Counts(states, transitions, refused, depth)
    walked.is_complete = not level
    walked.seconds = time.perf_counter() - started
    return walked


def _play(
    world: World, make_engine: EngineFactory, program: Program
) -> tuple[LockStep, list[Finding]]:
    """Play a program from the start; return its run and what was found.

    `num_events` of the run counts the events of the program's last element only.
    """
    run = get_start(make_engine)(world.config, make_engine, keep_exchanges=True)
    findings: list[Finding] = []
    for deed in program:
        assert not findings, "a program with a finding is not continued"
        run.num_events = 0
        findings = run.apply(deed) if isinstance(deed, v.Commit) else run.perform(deed)
    return run, findings


def _list_deeds(world: World, run: LockStep, walked: Walked) -> Iterator[Deed]:
    """Yield everything that may be done now, always in the same order."""
    for event in (*world.signals, *_list_forks(world, run)):
        assert not isinstance(event, v.Drafts | v.Commit), "a signal is an action"
        action = run.fit(event)
        if get_missing(action, run.lacking) is not None:
            walked.left_out += 1
        elif not isinstance(action, v.Submit) or action.request.request_id not in run.live:
            yield action
    yield v.Schedule()
    if world.proposals and run.sampled:
        yield Propose(((1, 0),))
        yield Propose(((1, 1),))
    if run.plans:
        yield from _list_answers(world, run)


def _list_forks(world: World, run: LockStep) -> Iterator[v.Fork]:
    """Yield the forks of each unfinished request into each request that is not live."""
    if world.forks:
        delivered = {name: run.delivered.get(name, ()) for name in run.live}
        forks = get_forks(world, delivered)
        yield from (
            fork
            for fork in forks
            if fork.request_id in delivered and fork.child_id not in delivered
        )


def _list_answers(world: World, run: LockStep) -> Iterator[v.Commit]:
    """Yield each right model output for the oldest plan, with any token for a row that samples.

    With other plans in flight, or with drafts, the worker has continued from its own tokens; then
    its model output is the only one.
    """
    plan = run.plans[0]
    rows = run.worker.answer(plan.frame_id)
    choices: list[list[v.TokenIds]] = [[row.token_ids] for row in rows]
    if len(run.plans) == 1 and not any(row.draft_token_ids for row in plan.rows):
        others: list[v.TokenIds] = [(token,) for token in world.vocabulary]
        choices = [others if row.token_ids else [()] for row in rows]
    for answer in product(*choices):
        named = zip(rows, answer, strict=True)
        yield v.Commit(
            plan.frame_id, tuple(v.RowTokens(row.request_id, tokens) for row, tokens in named)
        )


def _get_key(run: LockStep) -> object:
    """Return what the future depends on: the engine's state, and what clients and worker know."""
    state = run.before
    if state is None:
        return None
    requests = tuple(replace(request, num_preemptions=0) for request in state.requests)
    shown = replace(
        state, requests=requests, frames_in_flight=(), next_frame_id=0, stats=v.Stats(), cached={}
    )
    plans = tuple(replace(plan, frame_id=0) for plan in run.plans)
    return repr(shown), plans, tuple(run.live.items()), tuple(run.delivered.items())


def _format_finding(finding: Finding) -> str:
    return f"{finding.property_id or finding.kind} {finding.sentence}: {finding.message}"


def _get_path(run: LockStep) -> tuple[PathStep, ...]:
    return tuple(PathStep(exchange.event, exchange.seen) for exchange in run.exchanges)
