"""Exchange: one event with the answers of both sides, and findings of a side that failed to
answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from blockstep.conformance.engine import ALL_CAPABILITIES, Engine, EngineFault
from blockstep.conformance.protocol.findings import (
    Difference,
    Finding,
    FindingKind,
    blame_check,
    describe_error,
    leave_out_raised,
    list_frames,
)
from blockstep.conformance.protocol.type_check import fault_of_types, find_ill_typed
from blockstep.spec import vocabulary as v
from blockstep.spec.copies import wide_dataclass

T = TypeVar("T")


@wide_dataclass(frozen=True, slots=True)
class Exchange:
    """One event with the answers of both sides."""

    event: v.Event
    expected: v.Observation
    """Answer of the specification, or of the engine if the specification was not given the event or
    failed an assertion."""
    seen: v.Observation | None
    """Answer of the engine; None if it raised."""


class Unbuilt:
    """Placeholder of an engine whose constructor raised `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def apply(self, _event: v.Event) -> v.Observation:
        """Raise the constructor's error, so that every kind of run shows it at its first event."""
        raise self._error

    def snapshot(self) -> None:
        """Return None: there is no state."""

    def capabilities(self) -> frozenset[str]:
        """Return all capabilities, so that the config is not taken for an unsupported one."""
        return ALL_CAPABILITIES


def get_first_state(engine: Engine, expected: v.Snapshot) -> v.Snapshot | None:
    """Return the first state of an engine, `expected` itself if equal, or None if it shows none or
    an ill-typed one, which is reported after the first event."""
    try:
        first = engine.snapshot()
        if first == expected:
            return expected
    except Exception:
        return None
    return first if find_ill_typed(first, v.Snapshot) is None else None


def fault_of(error: Exception, when: str = "") -> Finding:
    """Return the finding about an engine that raised; `when` says when, if it was not in a call."""
    words = error.last_words if isinstance(error, EngineFault) else ()
    note = f"its standard error: {' | '.join(words)}" if words else ""
    return Finding(
        FindingKind.FAULT,
        "",
        "engine_raises_nothing",
        f"the engine raised {describe_error(error)} {when}".rstrip(),
        (Difference("exception", "none", type(error).__name__, note),),
        frames=list_frames(error),
    )


def ask_adapter(name: str, function: Callable[..., T], *args: object) -> T:
    """Return what a function that an adapter gives Blockstep returns.

    Raises:
        EngineFault: it raised; the fault names the function.
    """
    try:
        return function(*args)
    except EngineFault:
        raise
    except Exception as error:
        fault = EngineFault(f"{name} of its adapter raised {describe_error(error)}")
        raise fault.with_traceback(error.__traceback__) from error


def blame_raised(error: Exception, what: str) -> Finding:
    """Return the finding about an exception outside of the engine's answer: a fault of the adapter
    (`ask_adapter`), or one of Blockstep, which was doing `what`."""
    return fault_of(error) if isinstance(error, EngineFault) else blame_check(error, what)


def blame_spec(error: Exception) -> Finding:
    """Return the finding about a specification that raised, as by an assertion of its own."""
    is_assertion = isinstance(error, AssertionError) and str(error)
    return Finding(
        FindingKind.SPEC,
        "",
        "spec_assertions_hold",
        f"the spec is wrong: {error if is_assertion else describe_error(error)}",
        frames=list_frames(error),
    )


def find_blame(
    error: Exception,
    event: v.Event,
    seen: object,
    after: object = None,
    found: Sequence[Finding] = (),
) -> list[Finding]:
    """Return the findings about a step at which a check or comparison raised `error`.

    The engine is to blame if its answer or the state after it is ill-typed, or if something else
    was `found` in the step. Otherwise Blockstep is.

    Args:
        error: What was raised, by neither the engine nor the specification.
        event: Event of the step.
        seen: Answer of the engine.
        after: State of the engine after it, or None.
        found: Findings of the step until then.
    """
    ill_typed = fault_of_types(event, seen, after)
    if ill_typed is not None:
        return [ill_typed]
    what = f"Blockstep, while it judged the answer to {type(event).__name__.lower()},"
    return leave_out_raised([*found, blame_raised(error, what)])
