"""Validate: how far a recorded run agrees with the spec, for people and for machines."""

from __future__ import annotations

from pathlib import Path

from blockstep.conformance.recorded.validate import Validation
from blockstep.conformance.report.jsonform import difference_to_json


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
