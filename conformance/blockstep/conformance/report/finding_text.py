"""Wording: the text of a finding, in every command."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from blockstep.conformance.engine import Setting
from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind
from blockstep.conformance.protocol.program import WIDTH
from blockstep.conformance.report.headlines import make_headline

HEADLINES = {
    FindingKind.PROPERTY: "VIOLATION",
    FindingKind.DIVERGENCE: "DIVERGENCE",
    FindingKind.FAULT: "FAULT",
    FindingKind.LIVENESS: "STALL",
    FindingKind.SPEC: "THE SPEC IS WRONG",
    FindingKind.HARNESS: "BLOCKSTEP IS WRONG",
}
MAX_DIFFERENCES = 12


def make_first_line(command: str, finding: Finding, num_events: int, where: str) -> str:
    """Return the first line of a report: verdict, headline, the check that found it, and where.

    Args:
        command: What ran, as in `blockstep check`.
        finding: First finding.
        num_events: Events that were played until then.
        where: Engine, preset and seed.
    """
    name = f"{finding.property_id} {finding.sentence}, " if finding.property_id else ""
    when = f"{HEADLINES[finding.kind]} at event {num_events}"
    return f"{command}: {when}: {make_headline(finding)} ({name}{where})"


def render_finding(finding: Finding) -> list[str]:
    """Return property and check, then the message; for a property also the expected values."""
    name = f"{finding.property_id} {finding.sentence}".strip()
    label = "property" if finding.property_id else str(finding.kind)
    texts = [finding.message]
    texts += [f"raised in {frame}" for frame in finding.frames[-1:]]
    texts += [f"called by {frame}" for frame in reversed(finding.frames[:-1])]
    if finding.kind is not FindingKind.DIVERGENCE:
        texts += [
            _format_difference(difference) for difference in finding.differences[:MAX_DIFFERENCES]
        ]
    indent = " " * 14
    wrapped = [
        line
        for text in texts
        for line in textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    ]
    return [f"  {label:<12}{name}", *wrapped]


def render_divergence(findings: Sequence[Finding]) -> list[str]:
    """Return the differing fields of spec and engine as a table after an empty line; [] if none."""
    differences = [
        difference
        for finding in findings
        if finding.kind is FindingKind.DIVERGENCE
        for difference in finding.differences
    ]
    return ["", *_render_differences(differences)] if differences else []


def make_stale_line(name: str, num_excused: int) -> str:
    """Return a line about a declared deviation that its own program does not show.

    If it covers findings of the run, the program is wrong and not the declaration.
    """
    if num_excused:
        return f"{name}: its program does not show it, and {num_excused:,} findings do: mend that"
    return f"{name}: its program does not show it, and no finding does; the adapter can drop it"


def make_known_lines(counts: Mapping[str, int | None]) -> list[str]:
    """Return lines about the known programs of `--known`."""
    return [
        f"gone        {name}: it passes now; remove it from the known programs"
        if count is None
        else f"known       {name}: {count:,} failures were the same defect, and were suppressed"
        for name, count in counts.items()
    ]


def make_settings_line(word: str, settings: Sequence[Setting]) -> str:
    """Return the line that names the settings that differ from the engine's defaults.

    Args:
        word: Verdict under these settings: `conforms` or `run`.
        settings: Settings, with reasons that are printed elsewhere.
    """
    return f"{word} at: {', '.join(setting.name for setting in settings)}"


def _format_difference(difference: Difference) -> str:
    note = f" ({difference.note})" if difference.note else ""
    return f"{difference.field}: expected {difference.expected}, seen {difference.seen}{note}"


def _render_differences(differences: list[Difference]) -> list[str]:
    """Return a table of three columns: field, the spec's side, the engine's side."""
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
