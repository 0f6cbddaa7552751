"""Reports of `replay` and `validate`, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blockstep.conformance.engine import EXACT, Safety
from blockstep.conformance.protocol.codec import get_fields, to_plain
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import describe_event
from blockstep.conformance.recorded.arrival_rate import Arrivals, Pace
from blockstep.conformance.recorded.replay import cut
from blockstep.conformance.recorded.replay_counts import ReplayReport, get_ratio
from blockstep.conformance.recorded.validate import Validation
from blockstep.conformance.report.finding_text import HEADLINES, render_finding
from blockstep.conformance.report.headlines import make_headline
from blockstep.conformance.report.jsonform import (
    difference_to_json,
    finding_to_json,
    subjects_to_json,
)
from blockstep.spec.vocabulary import Config

MAX_DIFFERENCES = 5


def render_replay(report: ReplayReport, console: Console) -> None:
    """Print `report` as a table, and its finding, if any, beneath."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, value, note in _lines(report):
        table.add_row(name, value, note)
    console.print(table)
    finding = report.finding
    if finding is None:
        return
    named = f"{finding.property_id} {finding.sentence}".strip()
    console.print(
        f"{finding.kind.value.upper()} at step {report.finding_step}: {named}",
        style="bold red",
        markup=False,
        highlight=False,
    )
    console.print(f"  {cut(finding.message)}", markup=False, highlight=False)
    if report.finding_event is not None:
        event = cut(describe_event(report.finding_event))
        console.print(f"  event     {event}", markup=False, highlight=False)
    for difference in finding.differences[:MAX_DIFFERENCES]:
        console.print(f"  {difference.field}", markup=False, highlight=False)
        console.print(f"    expected  {cut(difference.expected)}", markup=False, highlight=False)
        console.print(f"    seen      {cut(difference.seen)}", markup=False, highlight=False)
    if len(finding.differences) > MAX_DIFFERENCES:
        hidden = len(finding.differences) - MAX_DIFFERENCES
        console.print(f"  and {hidden} more (all of them with --json)", highlight=False)


def _lines(report: ReplayReport) -> Iterator[tuple[str, str, str]]:
    refused = sum(report.requests_refused.values())
    codes = ", ".join(f"{n:,} {code}" for code, n in sorted(report.requests_refused.items()))
    pace, submitted = report.pace, f"of {report.requests_submitted:,}"
    if pace.arrivals is Arrivals.CLOSED:
        submitted += f", at most {pace.concurrency:,} at once"
    yield "requests finished", f"{report.requests_finished:,}", submitted
    yield "requests refused", f"{refused:,}", codes
    yield "steps", f"{report.steps:,}", f"{report.rows:,} rows"
    yield "events", f"{report.events:,}", f"{report.events_per_second:,.0f} per second"
    yield "tokens scheduled", f"{report.tokens_scheduled:,}", ""
    yield "prompt tokens", f"{report.tokens_prompt:,}", ""
    hits = f"{report.tokens_prefix_hit:,} tokens"
    yield "  prefix hits", f"{report.prefix_hit_rate:.1%}", hits
    blocks = f"{report.blocks_prefix_hit:,} of {report.blocks_prompt:,}"
    yield "  blocks hit", f"{report.block_hit_rate:.1%}", blocks
    yield "output tokens", f"{report.tokens_output:,}", ""
    resumed = f"{report.tokens_resumed_hit:,} tokens hit when resumed" if report.preemptions else ""
    yield "preemptions", f"{report.preemptions:,}", resumed
    usable = report.pool_blocks_usable
    yield (
        "pool in use, mean",
        f"{get_ratio(report.pool_blocks_mean, usable):.1%}",
        "of usable blocks",
    )
    peak = f"{report.pool_blocks_peak:,} of {usable:,}"
    yield "pool in use, peak", f"{get_ratio(report.pool_blocks_peak, usable):.1%}", peak
    cadence = f"snapshots every {report.snapshot_every} events" if report.snapshot_every else ""
    yield "equivalence", report.equivalence, cadence
    yield "seconds", f"{report.seconds:.2f}", ""


def replay_to_json(report: ReplayReport) -> dict[str, object]:
    """Return the report in JSON types, with stable keys (docs/reference/json.md)."""
    plain: dict[str, object] = {"format": "blockstep-replay", "version": 1}
    plain |= get_fields(report)
    plain["config"] = _plain_fields(report.config)
    plain["pace"] = _plain_fields(report.pace)
    plain["requests_refused"] = dict(sorted(report.requests_refused.items()))
    plain["finding"] = None if report.finding is None else _plain_finding(report.finding)
    plain["finding_event"] = None if report.finding_event is None else repr(report.finding_event)
    plain["prefix_hit_rate"] = report.prefix_hit_rate
    plain["block_hit_rate"] = report.block_hit_rate
    plain["events_per_second"] = report.events_per_second
    return plain


def _plain_fields(value: Config | Pace) -> dict[str, object]:
    return {name: to_plain(part) for name, part in get_fields(value).items()}


def _plain_finding(finding: Finding) -> dict[str, object]:
    return {
        "kind": str(finding.kind),
        "property_id": finding.property_id,
        "sentence": finding.sentence,
        "message": finding.message,
        "headline": make_headline(finding),
        "subjects": subjects_to_json(finding.subjects),
        "differences": [difference_to_json(difference) for difference in finding.differences],
    }


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
        verdict = f"conforms: {path.name}: {result.num_steps:,} recorded steps, "
        return "\n".join([*lines, f"{verdict}{_describe_equivalence(result.equivalence)}"]) + "\n"
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


def _describe_equivalence(equivalence: str) -> str:
    if equivalence == EXACT:
        return "all as the spec has it"
    if equivalence == Safety.name:
        return f"judged by properties alone (equivalence {equivalence})"
    return f"all as the spec has it, up to what is not compared (equivalence {equivalence})"
