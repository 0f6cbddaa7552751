"""The face of a failure: property, minimal program, state diff, and how to see it again.

Plain text on purpose: it is read in CI logs, pasted into issues, and compared by snapshot tests.
"""

from __future__ import annotations

import textwrap

from blockstep.conformance.check import CheckOptions
from blockstep.conformance.findings import Difference, Finding, FindingKind
from blockstep.conformance.program import describe
from blockstep.conformance.shrink import Shrunk
from blockstep.spec.vocabulary import Config

HEADLINES = {
    FindingKind.PROPERTY: "VIOLATION",
    FindingKind.DIVERGENCE: "DIVERGENCE",
    FindingKind.FAULT: "FAULT",
    FindingKind.LIVENESS: "STALL",
    FindingKind.SPEC: "THE SPEC IS WRONG",
}
WIDTH = 100
MAX_DIFFERENCES = 12


def render_failure(
    shrunk: Shrunk, options: CheckOptions, episode: int, num_actions_before: int
) -> str:
    """The whole report of one failure, a trailing newline included."""
    findings = shrunk.findings
    run = shrunk.run
    where = f"(engine {options.engine}, preset {options.preset}, seed {options.seed})"
    headline = HEADLINES[findings[0].kind]
    lines = [f"blockstep check: {headline} at event {run.num_events} {where}", ""]
    for finding in findings:
        lines += _render_finding(finding)
    num_actions = len(shrunk.program.actions)
    lines += [
        "",
        f"  config    {describe_config(shrunk.program.config)}",
        f"  program   (shrunk from {num_actions_before} actions to {num_actions})",
    ]
    width = len(str(num_actions))
    for number, action in enumerate(shrunk.program.actions, 1):
        lines.append(f"    {number:>{width}}  {describe(action)}")
    lines += _render_answers(shrunk)
    differences = [
        (finding.kind, difference) for finding in findings for difference in finding.differences
    ]
    if differences:
        lines += ["", *_render_differences([difference for _, difference in differences], findings)]
    lines += ["", f"  reproduce  {reproduce(options, episode)}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def reproduce(options: CheckOptions, episode: int) -> str:
    """The command line that fails in the same way."""
    policy = f" --policy {options.policy}" if options.policy else ""
    return (
        f"blockstep check --engine {options.engine} --preset {options.preset}{policy} "
        f"--seed {options.seed} --episode {episode}"
    )


def describe_config(config: Config) -> str:
    """Whatever is not a default, in the order of the fields."""
    plain = Config(config.num_blocks)
    parts = [f"num_blocks={config.num_blocks}"]
    for name in Config.__dataclass_fields__:
        value = getattr(config, name)
        if name != "num_blocks" and value != getattr(plain, name):
            parts.append(f"{name}={value}")
    return "\n            ".join(textwrap.wrap(" ".join(parts), WIDTH - 12))


def _render_finding(finding: Finding) -> list[str]:
    name = f"{finding.property_id} {finding.sentence}".strip()
    label = "property" if finding.property_id else str(finding.kind)
    lines = [f"  {label:<10}{name}"]
    lines += textwrap.wrap(
        finding.message, WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 12
    )
    return lines


def _render_answers(shrunk: Shrunk) -> list[str]:
    """What both sides answered to the last event."""
    if not shrunk.run.exchanges:
        return []
    last = shrunk.run.exchanges[-1]
    lines = ["", f"  last event {type(last.event).__name__}"]
    if last.seen is None or last.expected != last.seen:
        lines.append(f"    spec      {_clip(last.expected)}")
        lines.append(f"    engine    {'raised' if last.seen is None else _clip(last.seen)}")
    else:
        lines.append(f"    both      {_clip(last.expected)}")
    return lines


def _clip(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 240 else text[:237] + "..."


def _render_differences(differences: list[Difference], findings: list[Finding]) -> list[str]:
    """A table of three columns: field, expected, seen."""
    diverged = any(finding.kind is FindingKind.DIVERGENCE for finding in findings)
    left = "spec" if diverged else "expected"
    shown = differences[:MAX_DIFFERENCES]
    field_width = max(len("state after"), *(len(d.field) for d in shown))
    value_width = max(len(left), *(min(len(d.expected), 44) for d in shown))
    lines = [f"  {'state after':<{field_width}}  {left:<{value_width}}  engine"]
    for difference in shown:
        note = f"   <- {difference.note}" if difference.note else ""
        expected = textwrap.wrap(difference.expected, 44) or [""]
        seen = textwrap.wrap(difference.seen, 44) or [""]
        for row in range(max(len(expected), len(seen))):
            name = difference.field if row == 0 else ""
            left_cell = expected[row] if row < len(expected) else ""
            right_cell = seen[row] if row < len(seen) else ""
            cells = f"{name:<{field_width}}  {left_cell:<{value_width}}  {right_cell}"
            lines += [f"  {cells}{note if row == 0 else ''}"]
    hidden = len(differences) - len(shown)
    return [*lines, f"  and {hidden} more (all of them with --json)"] if hidden else lines
