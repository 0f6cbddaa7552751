"""The face of a failure: property, minimal program, state diff, and how to see it again.

Plain text on purpose: it is read in CI logs, pasted into issues, and compared by snapshot tests.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.draw.presets import MAX_DEPTH
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.conformance.protocol.program import describe, describe_observation
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.shrink import Shrunk
from blockstep.spec.profiles import STRICT
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
NOT_AGAIN = (
    "this was seen once, and not when the program ran again: the engine is not deterministic"
)
"""Said of a finding that does not come back."""


def tell_failure(result: CheckResult) -> str:
    """The whole report of the first failure of a check, a trailing newline included."""
    if result.told is not None:
        return result.told.text
    assert result.failure is not None
    assert result.first is not None
    assert result.failing_program is not None
    note = "" if result.failure.findings else f"\n  {NOT_AGAIN}\n"
    shrunk = replace(result.failure, findings=result.failure.findings or [result.first])
    before = len(result.failing_program.actions)
    return render_failure(shrunk, result.options, result.failed_episode or 0, before) + note


def render_failure(
    shrunk: Shrunk, options: CheckOptions, episode: int, num_actions_before: int
) -> str:
    """The whole report of one failure, a trailing newline included."""
    findings = shrunk.findings
    run = shrunk.run
    how = f"equivalence {run.equivalence}, " if run.equivalence else ""
    where = f"(engine {options.engine}, {how}preset {options.preset}, seed {options.seed})"
    headline = HEADLINES[findings[0].kind]
    lines = [f"blockstep check: {headline} at event {run.num_events} {where}", ""]
    for finding in findings:
        lines += render_finding(finding)
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
    lines += render_divergence(findings)
    lines += ["", f"  reproduce  {reproduce(options, episode)}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def render_served(findings: Sequence[Finding], num_events: int) -> str:
    """What was wrong while an engine served (`CheckFailedError`), and after how many events."""
    headline = HEADLINES[findings[0].kind]
    told = [line for finding in findings for line in render_finding(finding)]
    lines = [f"blockstep generate: {headline} at event {num_events}", "", *told]
    return "\n".join([*lines, *render_divergence(findings)])


def reproduce(options: CheckOptions, episode: int) -> str:
    """The command line that fails in the same way."""
    policy = f" --policy {options.policy}" if options.policy else ""
    if options.profile != STRICT.name:
        policy += f" --profile {options.profile}"
    if options.max_depth != MAX_DEPTH:
        policy += f" --depth {options.max_depth}"
    path = f" --path {options.path}" if options.path else ""
    return (
        f"blockstep check --engine {options.engine}{path} --preset {options.preset}{policy} "
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


def render_finding(finding: Finding) -> list[str]:
    """Property and sentence, then what was seen; a property says what it expected."""
    name = f"{finding.property_id} {finding.sentence}".strip()
    label = "property" if finding.property_id else str(finding.kind)
    told = [finding.message]
    if finding.kind is not FindingKind.DIVERGENCE:
        told += [_told(difference) for difference in finding.differences[:MAX_DIFFERENCES]]
    indent = " " * 14
    wrapped = [
        line
        for text in told
        for line in textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    ]
    return [f"  {label:<12}{name}", *wrapped]


def render_divergence(findings: Sequence[Finding]) -> list[str]:
    """Where the states of spec and engine differ, as a table after an empty line; [] if nowhere."""
    differences = [
        difference
        for finding in findings
        if finding.kind is FindingKind.DIVERGENCE
        for difference in finding.differences
    ]
    return ["", *_render_differences(differences)] if differences else []


def _told(difference: Difference) -> str:
    note = f" ({difference.note})" if difference.note else ""
    return f"{difference.field}: expected {difference.expected}, seen {difference.seen}{note}"


def _render_answers(shrunk: Shrunk) -> list[str]:
    """What both sides answered to the last event."""
    if not shrunk.run.exchanges:
        return []
    last = shrunk.run.exchanges[-1]
    expected, seen = describe_observation(last.expected), describe_observation(last.seen)
    event = type(last.event).__name__.lower()
    if shrunk.run.equivalence:
        return ["", *_wrapped(f"answer to {event}: {'it raised' if last.seen is None else seen}")]
    if last.expected == last.seen:
        return ["", *_wrapped(f"answer to {event}, both sides alike: {expected}")]
    return [
        "",
        *_wrapped(f"spec's answer to {event}: {expected}"),
        *_wrapped(f"engine's answer: {'it raised' if last.seen is None else seen}"),
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _render_differences(differences: list[Difference]) -> list[str]:
    """A table of three columns: field, the spec's side, the engine's side."""
    left = "spec"
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
