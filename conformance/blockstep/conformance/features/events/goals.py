"""Goals that need a log of KV events."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.features.events.properties import get_kv_events
from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Commit,
    Reset,
)

TEXTS = {
    "events_stored": "blocks of a request were logged as stored",
    "events_stored_together": "one event listed several stored blocks",
    "events_stored_behind_others": "stored blocks were logged with a parent",
    "events_copy_stored": "a second block of a cached key was logged as stored",
    "events_removed": "a block was logged as removed",
    "events_copy_removed": "a block was logged as removed while another of its key stayed",
    "events_of_a_plan_in_flight": "a commit logged blocks that a plan in flight stored",
    "events_cleared": "the cache was logged as cleared",
}


def of_events(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of an answer with KV events."""
    events = get_kv_events(step)
    if not events:
        return
    copies = history.follower.copies.copy()
    for event in events:
        if isinstance(event, BlockStored):
            yield "events_stored"
            if len(event.keys) > 1:
                yield "events_stored_together"
            if event.parent is not None:
                yield "events_stored_behind_others"
            if any(copies[key] for key in event.keys):
                yield "events_copy_stored"
            copies.update(event.keys)
        elif isinstance(event, BlockRemoved):
            yield "events_removed"
            if any(copies[key] > 1 for key in event.keys):
                yield "events_copy_removed"
            copies.subtract(event.keys)
        elif isinstance(event, AllBlocksCleared):
            yield "events_cleared"
            copies.clear()
    if isinstance(step.event, Commit) and _is_ahead(step, history):
        yield "events_of_a_plan_in_flight"


def _is_ahead(step: Step, history: History) -> bool:
    """Whether a block is logged as stored that only a frame in flight fills."""
    keys = {
        key for event in get_kv_events(step) if isinstance(event, BlockStored) for key in event.keys
    }
    if not keys or not step.after.frames_in_flight:
        return False
    written = {row.request_id: row.end for row in history.frame_of(step)}
    flying = {
        row.request_id for name in step.after.frames_in_flight for row in history.frames[name]
    }
    return any(
        step.after.block_keys[block] in keys
        for name in flying & step.new.keys()
        for table, size in zip(step.new[name].block_tables, step.block_sizes, strict=True)
        for block in table[written.get(name, 0) // size :]
    )


GOALS = Goals(TEXTS, {Commit: of_events, Reset: of_events})
