"""Validate: hold a recorded run to the spec, long after it happened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockstep.conformance.protocol.compare import observation_differences
from blockstep.conformance.protocol.findings import Difference
from blockstep.conformance.protocol.program import describe_event
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.recorded.traces import read_trace
from blockstep.conformance.report.jsonform import difference_to_json


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


def validation_to_json(result: Validation) -> dict[str, object]:
    """The verdict for machines (docs/reference/json.md)."""
    return {
        "format": "blockstep-validate",
        "version": 1,
        "conforms": result.conforms,
        "num_steps": result.num_steps,
        "num_agreed": result.num_agreed,
        "event": result.event,
        "differences": [difference_to_json(row) for row in result.differences],
    }


def render_validation(path: Path, result: Validation) -> str:
    """The verdict, and the first difference if there is one."""
    if result.conforms:
        return (
            f"conforms: {path.name}: {result.num_steps:,} recorded steps, all as the spec has it\n"
        )
    where = f"step {result.num_agreed + 1} of {result.num_steps} ({path.name})"
    lines = [
        f"blockstep validate: DIVERGENCE at {where}",
        f"  event     {result.event}",
        "",
        *(
            f"  {difference.field}: spec {difference.expected}, recorded {difference.seen}"
            for difference in result.differences
        ),
        "",
        f"  explain   blockstep explain {path.name} --at {result.num_agreed}",
    ]
    return "\n".join(lines) + "\n"
