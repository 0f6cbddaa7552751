"""Fill: from a walk to a file of vectors that covers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blockstep.conformance.explore.cover import choose, trace_program
from blockstep.conformance.explore.shard import Task
from blockstep.conformance.explore.vectors import Manifest, write_vectors
from blockstep.conformance.explore.walk import walk
from blockstep.conformance.explore.world import World
from blockstep.spec.profiles import initial_state
from blockstep.spec.vocabulary import Event


@dataclass(frozen=True, slots=True)
class Filled:
    """What was written."""

    manifest: Manifest
    num_events: int
    num_deeds: int
    """Branches, situations and answers that the programs cover: all that the walk met."""
    num_states: int
    is_complete: bool
    """Whether the walk came to every state."""


def fill(
    path: Path,
    world: World,
    max_states: int,
    on_progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Filled:
    """Walk `world`, up to `max_states`, and write the programs that cover what was met.

    Raises:
        TraceError: the file cannot be written.
    """
    task = Task(world, properties=False, deeds=True, max_states=max_states)
    walked = walk(task, on_progress=on_progress)
    start = initial_state(world.config)
    programs: list[tuple[Event, ...]] = [*walked.programs, world.mistakes]
    deeds = [trace_program(start, events) for events in programs]
    chosen = choose([(len(events), done) for events, done in zip(programs, deeds, strict=True)])
    last = len(programs) - 1
    kept = [programs[index] for index in sorted({*chosen, last})]
    return Filled(
        manifest=write_vectors(path, world.name, world.config, kept),
        num_events=sum(map(len, kept)),
        num_deeds=len(frozenset[str]().union(*deeds)),
        num_states=walked.counts.states,
        is_complete=walked.is_complete,
    )
