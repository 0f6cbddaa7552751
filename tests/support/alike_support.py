"""Two engines side by side: both give the same answers and show the same states."""

from __future__ import annotations

import random
from typing import Protocol

from blockstep.spec import vocabulary as v


class Taking(Protocol):
    """Any of our engines, or the specification."""

    def apply(self, event: v.Event) -> v.Observation:
        """Take an event and return the answer."""
        ...

    def snapshot(self) -> v.Snapshot | None:
        """Return the state."""
        ...


def apply_alike(engine: Taking, other: Taking, event: v.Event) -> v.Observation:
    """Give an event to both engines and return their answer."""
    answer = engine.apply(event)
    assert answer == other.apply(event)
    return answer


def step_alike(engine: Taking, other: Taking, draw: random.Random) -> None:
    """Let both engines plan a step, and commit it with one token for each row that samples."""
    plan = apply_alike(engine, other, v.Schedule())
    assert isinstance(plan, v.Plan)
    rows = draw_rows(plan, engine.snapshot(), draw)
    if rows:
        apply_alike(engine, other, v.Commit(plan.frame_id, rows))
    assert engine.snapshot() == other.snapshot()


def draw_rows(
    plan: v.Plan, state: v.Snapshot | None, draw: random.Random
) -> tuple[v.RowTokens, ...]:
    """Return an answer to the newest plan: one token for each row that samples.

    `state`: the state after that plan.
    """
    assert state is not None
    prefills = {request.request_id for request in state.requests if request.is_prefill_chunk}
    return tuple(
        v.RowTokens(row.request_id, () if row.request_id in prefills else (draw.randrange(5),))
        for row in plan.rows
    )
