"""Exchange: one event and both answers to it, and what is said of a side that gave none."""

from __future__ import annotations

from blockstep.conformance.engine import ALL_CAPABILITIES, Engine
from blockstep.conformance.protocol.findings import (
    Difference,
    Finding,
    FindingKind,
    list_frames,
    tell_error,
)
from blockstep.conformance.protocol.typed import find_ill_typed
from blockstep.spec import vocabulary as v
from blockstep.spec.copies import wide_dataclass


@wide_dataclass(frozen=True, slots=True)
class Exchange:
    """One event and both answers to it."""

    event: v.Event
    expected: v.Observation
    """The spec's answer. The engine's, where the spec is not asked or failed an assertion."""
    seen: v.Observation | None
    """The engine's answer; None if it raised."""


class Unbuilt:
    """Stands in for an engine whose constructor raised `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def apply(self, _event: v.Event) -> v.Observation:
        """Raise the constructor's error: the first event shows it in every kind of run."""
        raise self._error

    def snapshot(self) -> None:
        """It has no state."""

    def capabilities(self) -> frozenset[str]:
        """All, so that no config is taken for one that the engine need not have."""
        return ALL_CAPABILITIES


def get_first_state(engine: Engine, expected: v.Snapshot) -> v.Snapshot | None:
    """The state of a new engine, `expected` itself if it is that; None if it shows none. What is
    wrong is told after an event."""
    try:
        first = engine.snapshot()
        if first == expected:
            return expected
    except Exception:
        return None
    return first if find_ill_typed(first, v.Snapshot) is None else None


def fault_of(error: Exception, when: str = "") -> Finding:
    """What an engine that raised has done wrong; `when`: while what, if not in a call."""
    return Finding(
        FindingKind.FAULT,
        "",
        "engine_raises_nothing",
        f"the engine raised {tell_error(error)} {when}".rstrip(),
        (Difference("exception", "none", type(error).__name__),),
        frames=list_frames(error),
    )


def blame_spec(error: AssertionError) -> Finding:
    """What a spec that failed an assertion of its own has done wrong."""
    return Finding(
        FindingKind.SPEC,
        "",
        "spec_asserts_nothing_false",
        f"the spec is wrong: {error}",
        frames=list_frames(error),
    )
