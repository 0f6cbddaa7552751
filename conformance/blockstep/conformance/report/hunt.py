"""Reports of `hunt`: text for people, a page for the documentation, JSON for machines."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import replace

from blockstep.conformance.engine import Safety
from blockstep.conformance.protocol.program import WIDTH, describe, describe_config
from blockstep.conformance.report.failure import LINES_MAX, reproduce
from blockstep.conformance.report.finding_text import (
    make_known_lines,
    make_settings_line,
    make_stale_line,
)
from blockstep.conformance.report.headlines import make_headline
from blockstep.conformance.report.jsonform import finding_to_json
from blockstep.conformance.search.defects import Defect, HuntResult, name_of, place_of
from blockstep.conformance.search.suppressions import KnownCause, SuppressionKind, follow
from blockstep.spec.profiles import QUIRKS, STRICT

UNEXPLAINED = "nothing known accounts for it"


def hunt_summary(result: HuntResult) -> str:
    """Return a line with the numbers of defects and events."""
    options, ground = result.options, result.ground
    again = result.num_again.total()
    more = f"; {again:,} more failures like those that nothing known accounts for" if again else ""
    if result.stopped:
        more += f"; ended early: {result.stopped}"
    number, engine = len(result.defects), f"{options.engine} {ground.version}".strip()
    how = ground.facts.equivalence
    held = "" if how in {"", "exact"} else f"equivalence {how}, "
    return (
        f"{number} defect{'s' * (number != 1)} in {result.num_events:,} events (engine {engine}, "
        f"{held}at most {options.max_depth} plan{'s' * (options.max_depth != 1)} in flight, "
        f"seed {options.seed}){more}"
    )


def render_hunt(result: HuntResult) -> str:
    """Return the whole report, with a trailing newline."""
    lines = [f"blockstep hunt: {hunt_summary(result)}", *_declared(result)]
    lines += [f"note: {note}" for note in result.ground.facts.notes]
    settings = result.ground.facts.settings
    lines += [make_settings_line("run", settings)] if settings else []
    for number, defect in enumerate(result.defects, 1):
        lines += ["", f"{number}. {title_of(defect, result)}", *_body(defect, result)]
    for watchpoint, defect in result.policies:
        lines += ["", f"policy: {watchpoint.title} ({watchpoint.upstream})", *_program(defect)]
    return "\n".join(lines) + "\n"


def render_hunt_page(result: HuntResult, command: str) -> str:
    """Return a page of Markdown: a table, then a program for each defect."""
    title = f"{result.options.engine} {result.ground.version}".strip()
    lines = [
        f"# Found in {title}",
        "",
        f"Made by `{command}`: {hunt_summary(result)}.",
        "",
        "| | defect | found by | after events | actions |",
        "|---|---|---|---|---|",
    ]
    for number, defect in enumerate(result.defects, 1):
        found = f"{number} | {title_of(defect, result)} | {name_of(defect.first)}"
        lines.append(f"| {found} | {defect.num_events:,} | {defect.length} |")
    for number, defect in enumerate(result.defects, 1):
        lines += ["", f"## {number}. {title_of(defect, result)}", ""]
        lines += ["```text", *_body(defect, result), "```"]
    if result.policies:
        lines += ["", "## Decisions that may surprise", ""]
        lines += ["Both sides take them, so nothing diverges and no property is broken."]
    for watchpoint, defect in result.policies:
        lines += ["", f"{watchpoint.title} ({watchpoint.upstream}):", ""]
        lines += ["```text", *_program(defect), "```"]
    return "\n".join(lines) + "\n"


def hunt_to_json(result: HuntResult) -> dict[str, object]:
    """Return the result as docs/reference/json.md has it."""
    options, ground = result.options, result.ground
    return {
        "format": "blockstep-hunt",
        "version": 1,
        "engine": options.engine,
        "engine_version": ground.version,
        "equivalence": ground.facts.equivalence,
        "seed": options.seed,
        "depth": options.max_depth,
        "with": list(options.with_features),
        "without": list(options.without_features),
        "num_events": result.num_events,
        "num_again": result.num_again.total(),
        "deviations": {name: result.excused[name] for name in sorted(ground.facts.deviations)},
        "deviations_stale": list(ground.facts.stale),
        "known_programs": result.known_programs,
        "stopped": result.stopped,
        "defects": [_defect_to_json(defect, result) for defect in result.defects],
        "policies": [
            {"name": watchpoint.name, "title": watchpoint.title, "upstream": watchpoint.upstream}
            | _program_to_json(defect)
            for watchpoint, defect in result.policies
        ],
    }


def title_of(defect: Defect, result: HuntResult) -> str:
    """Return the causes of a defect in words, with upstream's number, or else the headline."""
    causes = (_cause_in_words(cause, result) for cause in defect.causes)
    can_be_known = result.ground.is_spared or result.ground.facts.equivalence != Safety().name
    if defect.causes:
        return "; ".join(causes)
    head = make_headline(defect.first)
    return f"{head} ({UNEXPLAINED})" if can_be_known else head


def _cause_in_words(cause: KnownCause, result: HuntResult) -> str:
    if cause.means is SuppressionKind.QUIRK:
        story = next(story for story in QUIRKS if story.quirk == cause.name)
        return f"{story.title} ({story.upstream})"
    return (
        result.ground.workarounds[cause.name]
        if cause.means is SuppressionKind.WORKAROUND
        else cause.name
    )


def reproduce_defect(defect: Defect, result: HuntResult) -> str:
    """Return the command line that reproduces this finding.

    It is a check, unless the adapter declines events or works around defects in a check.
    """
    options = defect.options
    if not result.ground.is_spared:
        quirks = follow(defect.forgiven).quirks
        profile = "+".join((STRICT.name, *sorted(quirks))) if quirks else STRICT.name
        return reproduce(replace(options, profile=profile), defect.episode, defect.loss)
    shown = replace(options, profile=result.options.profile, sentence=None)
    line = reproduce(shown, defect.episode, defect.loss)
    forgiven = (f" --forgive {shlex.quote(str(cause))}" for cause in sorted(defect.forgiven))
    return line.replace("blockstep check", "blockstep hunt", 1) + "".join(forgiven)


def _body(defect: Defect, result: HuntResult) -> list[str]:
    lines = [f"  found by  {name_of(defect.first)}", *_wrap(defect.first.message)]
    lines += [f"  raised in {defect.raised_at}"] if defect.raised_at else []
    for other in defect.also:
        lines += [f"  also      {place_of(other)}"]
        lines += [f"            {reproduce_defect(other, result)}"]
    if defect.behind:
        lines.append(f"  behind    {defect.behind}: seen with the state hidden")
    seen = f", seen {defect.num_seen:,} times" if defect.num_seen > 1 else ""
    lines.append(
        f"  where     after {defect.num_events:,} events, preset {defect.options.preset}{seen}"
    )
    return [*lines, *_program(defect), f"  reproduce {reproduce_defect(defect, result)}"]


def _declared(result: HuntResult) -> list[str]:
    """Return lines about the deviations that the adapter declares, and the known programs."""
    facts, lines = result.ground.facts, []
    for name, summary in sorted(facts.deviations.items()):
        count = result.excused[name]
        lines += [f"known       {name}: {count:,} findings that the adapter declares"]
        lines += _wrap(summary)
    for name in facts.stale:
        lines += [f"stale       {make_stale_line(name, result.excused[name])}"]
    lines += make_known_lines(result.known_programs)
    return lines + [f"left out    {why}" for why in result.untried]


def _wrap(text: str) -> list[str]:
    indent = " " * 12
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _program(defect: Defect) -> list[str]:
    if defect.shrunk is not None:
        program = defect.shrunk.program
        lines = [describe(action) for action in program.actions]
        note = f"(shrunk from {defect.num_actions} actions to {len(lines)})"
        config = describe_config(program.config)
        return [f"  config    {config}", f"  program   {note}", *_number(lines, 0)]
    loss = defect.loss
    if loss is None or not loss.events:
        return []
    first = max(len(loss.events) - LINES_MAX, 0)
    skipped = [f"    and {first} events before"] if first else []
    shown = [f"  config    {loss.config}", "  program   (as it ran, not shrunk)", *skipped]
    return [*shown, *_number(loss.events[first:], first)]


def _number(lines: Iterable[str], before: int) -> list[str]:
    """Return lines with their numbers, counted from `before` + 1."""
    listed = list(lines)
    width = len(str(before + len(listed)))
    return [f"    {number:>{width}}  {line}" for number, line in enumerate(listed, before + 1)]


def _defect_to_json(defect: Defect, result: HuntResult) -> dict[str, object]:
    findings = defect.shrunk.findings if defect.shrunk is not None else ()
    return {
        "title": title_of(defect, result),
        "causes": [{"means": str(cause.means), "name": cause.name} for cause in defect.causes],
        "findings": [finding_to_json(finding) for finding in findings or (defect.first,)],
        "raised_at": defect.raised_at,
        "also": [place_of(other) for other in defect.also],
        "also_reproduce": [reproduce_defect(other, result) for other in defect.also],
        "behind": defect.behind,
        "num_seen": defect.num_seen,
        "num_events": defect.num_events,
        "reproduce": reproduce_defect(defect, result),
    } | _program_to_json(defect)


def _program_to_json(defect: Defect) -> dict[str, object]:
    data: dict[str, object] = {"preset": defect.options.preset, "episode": defect.episode}
    if defect.shrunk is not None:
        program = defect.shrunk.program
        lines = [describe(action) for action in program.actions]
        return data | {"config": describe_config(program.config), "program": lines}
    if defect.loss is not None:
        return data | {"config": defect.loss.config, "program": list(defect.loss.events)}
    return data | {"config": "", "program": []}
