"""Reports of `validate`: how far a recorded run agrees with the spec, as text and JSON."""

from __future__ import annotations

from pathlib import Path

from blockstep.conformance.engine import EXACT, Safety
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.recorded.validate import Validation
from blockstep.conformance.report.jsonform import difference_to_json, finding_to_json
from blockstep.conformance.report.wording import HEADLINES, render_finding


def validation_to_json(result: Validation) -> dict[str, object]:
    """Return the verdict as JSON types (docs/reference/json.md)."""
    return {
        "format": "blockstep-validate",
        "version": 1,
        "conforms": result.conforms,
        "equivalence": result.equivalence,
        "num_steps": result.num_steps,
        "num_agreed": result.num_agreed,
        "event": result.event,
        "differences": [difference_to_json(row) for row in result.differences],
        "finding": None if result.finding is None else finding_to_json(result.finding),
        "left_out": dict(sorted(result.left_out.items())),
        "excused": dict(sorted(result.excused.items())),
    }


def render_validation(path: Path, result: Validation) -> str:
    """Return the verdict, and the first finding if there is one."""
    lines = [f"left out  {name}: {count} times" for name, count in sorted(result.left_out.items())]
    lines += [
        f"declared  {name}: {count} findings that the trace says are its engine's"
        for name, count in sorted(result.excused.items())
    ]
    if not result.num_steps:
        return f"NO VERDICT (nothing was recorded): {path.name}\n"
    if result.finding is None:
        told = f"conforms: {path.name}: {result.num_steps:,} recorded steps, "
        return "\n".join([*lines, f"{told}{_tell(result.equivalence)}"]) + "\n"
    headline = HEADLINES[result.finding.kind]
    where = f"step {result.num_agreed + 1} of {result.num_steps} ({path.name})"
    lines += [f"blockstep validate: {headline} at {where}", f"  event     {result.event}", ""]
    if result.finding.kind is FindingKind.DIVERGENCE:
        lines += [
            f"  {difference.field}: spec {difference.expected}, recorded {difference.seen}"
            for difference in result.differences
        ]
    else:
        lines += render_finding(result.finding)
    if result.has_events:
        lines += ["", f"  explain   blockstep explain {path.name} --at {result.num_agreed}"]
    return "\n".join(lines) + "\n"


def _tell(equivalence: str) -> str:
    if equivalence == EXACT:
        return "all as the spec has it"
    if equivalence == Safety.name:
        return f"judged by properties alone (equivalence {equivalence})"
    return f"all as the spec has it, up to what is not compared (equivalence {equivalence})"
