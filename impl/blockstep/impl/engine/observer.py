"""Observer: how somebody outside watches the engine while it serves.

The engine gives every event to the observer instead of its scheduler, and tells what each forward
pass really ran on: the very arrays that the kernels were given. Who hands an observer in decides
what is done with that; `blockstep.conformance.engines.serving` holds both to the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from blockstep.impl.engine.journal import StepRan
from blockstep.impl.engine.model import Inputs
from blockstep.impl.fastest import MakeScheduler
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
    """Whether the draft model ran, in its own cache, and not the model itself."""
    request_ids: tuple[RequestId, ...]
    """Whose tokens, in the order of `inputs`."""
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class Ran:
    """What one plan came to."""

    frame_id: FrameId
    passes: tuple[Pass, ...]
    sampled: tuple[RowTokens, ...]
    """One row per request, in plan order; what will be committed."""
    proposals: Mapping[RequestId, TokenIds]
    """The drafts that follow, of requests that sampled."""


class Observer(Protocol):
    """A scheduler that takes the events of ours, and looks at them."""

    def apply(self, event: Event) -> Observation:
        """Give the event to the scheduler and return its answer. What it raises ends the run."""
        ...

    def snapshot(self) -> Snapshot:
        """The scheduler's state."""
        ...

    def ran(self, ran: Ran) -> None:
        """A plan was run; told before the next event. What it raises ends the run."""
        ...


@runtime_checkable
class FenceObserver(Observer, Protocol):
    """An observer that can do with fences: between two of them it sees nothing."""

    def fence(self, steps: Sequence[StepRan]) -> None:
        """Take the plans and commits of a burst, in order; no frame is in flight behind them.

        What it raises ends the run.
        """
        ...


MakeObserver: TypeAlias = Callable[[Config, MakeScheduler], Observer]
"""Builds an observer around the scheduler that the second argument builds."""
