"""Validate: hold a recorded run to the spec, long after it happened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockstep.conformance.protocol.compare import observation_differences
from blockstep.conformance.protocol.findings import Difference
from blockstep.conformance.protocol.program import describe_event
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.recorded.traces import read_trace


@dataclass(frozen=True, slots=True)
class Validation:
    """How far a trace agrees with the spec."""

    num_steps: int
    """Steps of the trace."""
    num_agreed: int
    """Steps before the first difference; all of them if there is none."""
    event: str = ""
    """The event at the first difference."""
    differences: tuple[Difference, ...] = ()

    @property
    def conforms(self) -> bool:
        """Whether the spec gives every recorded answer."""
        return not self.differences


def validate(path: Path) -> Validation:
    """Give each recorded event to the spec and compare its answer with the recorded one.

    Raises:
        TraceError: if the file is no trace.
    """
    trace = read_trace(path)
    spec = SpecEngine(trace.config)
    for number, step in enumerate(trace.steps):
        differences = observation_differences(spec.apply(step.event), step.observation)
        if differences:
            event = describe_event(step.event)
            return Validation(len(trace.steps), number, event, differences)
    return Validation(len(trace.steps), len(trace.steps))
