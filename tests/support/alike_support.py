"""Two engines side by side: both give the same answers and show the same states."""

from __future__ import annotations

import random
from typing import Protocol

from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v


class Taking(Protocol):
    """Any of our engines."""

    def apply(self, event: v.Event) -> v.Observation:
        """Take an event and return the answer."""
        ...

    def snapshot(self) -> v.Snapshot | None:
        """Return the state."""
        ...


def apply_alike(engine: Taking, other: HostEngine, event: v.Event) -> v.Observation:
    """Give an event to both engines and return their answer."""
    answer = engine.apply(event)
    assert answer == other.apply(event)
    return answer


def step_alike(engine: Taking, other: HostEngine, draw: random.Random) -> None:
    """Let both engines plan a step, and answer it with one token for each row that samples."""
    plan = apply_alike(engine, other, v.Schedule())
    assert isinstance(plan, v.Plan)
    rows = [
        v.RowTokens(name, () if drafts is None else (draw.randrange(5),))
        for name, drafts in other.frames.get(plan.frame_id, {}).items()
    ]
    if rows:
        apply_alike(engine, other, v.Commit(plan.frame_id, tuple(rows)))
    assert engine.snapshot() == other.snapshot()
