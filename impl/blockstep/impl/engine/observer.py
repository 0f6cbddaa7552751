"""Observer: the interface by which a checker watches the engine while it serves.

The engine passes every event to the observer instead of its scheduler, and reports the inputs of
each forward pass: the arrays that the kernels were given. The observer decides what to do with
them; `blockstep.conformance.engines.serving` checks both against the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from blockstep.impl.engine.journal import StepRan
from blockstep.impl.engine.model import Inputs
from blockstep.impl.engine.schedulers import MakeScheduler
from blockstep.spec.vocabulary import (
    Config,
    Event,
    FrameId,
    Observation,
    RequestId,
    RowTokens,
    Snapshot,
    TokenIds,
)


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass."""

    is_draft: bool
    """Whether it is a pass of the draft model, in its own cache."""
    request_ids: tuple[RequestId, ...]
    """Requests in the order of `inputs`."""
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class Ran:
    """The execution of one plan."""

    frame_id: FrameId
    passes: tuple[Pass, ...]
    sampled: tuple[RowTokens, ...]
    """The model output that will be committed: one row per request, in plan order."""
    proposals: Mapping[RequestId, TokenIds]
    """Proposed draft tokens of the requests that sampled."""


class Observer(Protocol):
    """Takes the events in place of the scheduler, passes them on and checks them."""

    def apply(self, event: Event) -> Observation:
        """Pass the event to the scheduler and return its observation. An exception ends the run."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the scheduler's state."""
        ...

    def ran(self, ran: Ran) -> None:
        """Take note of the execution of a plan, before the next event. An exception ends the
        run."""
        ...


@runtime_checkable
class FenceObserver(Observer, Protocol):
    """An observer that works with fences: it sees nothing between two of them."""

    def fence(self, steps: Sequence[StepRan]) -> None:
        """Take the plans and commits of a burst, in order; no frame is in flight at its end.

        An exception ends the run.
        """
        ...


MakeObserver: TypeAlias = Callable[[Config, MakeScheduler], Observer]
"""Builds an observer around the scheduler that the second argument builds."""
