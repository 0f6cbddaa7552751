"""What a hunt found: text for people, a page for the documentation, JSON for machines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from blockstep.conformance.protocol.program import WIDTH, describe, describe_config
from blockstep.conformance.report.jsonform import finding_to_json
from blockstep.conformance.search.hunt import Cause, Defect, HuntResult, Means
from blockstep.spec.profiles import QUIRKS

UNEXPLAINED = "nothing known accounts for it"


def hunt_summary(result: HuntResult) -> str:
    """How many defects there are, in how many events."""
    options = result.options
    again = result.num_again.total()
    more = f"; {again:,} more failures like those that nothing known accounts for" if again else ""
    number, engine = len(result.defects), f"{options.engine} {result.engine_version}".strip()
    return (
        f"{number} defect{'s' * (number != 1)} in {result.num_events:,} events (engine {engine}, "
        f"at most {options.max_depth} plans in flight, seed {options.seed}){more}"
    )


def render_hunt(result: HuntResult, workarounds: Mapping[str, str]) -> str:
    """All of it, a trailing newline included."""
    lines = [f"blockstep hunt: {hunt_summary(result)}"]
    for number, defect in enumerate(result.defects, 1):
        lines += ["", f"{number}. {title_of(defect, workarounds)}", *_body(defect)]
    for lookout, defect in result.policies:
        lines += ["", f"policy: {lookout.title} ({lookout.upstream})", *_program(defect)]
    return "\n".join(lines) + "\n"


def render_hunt_page(result: HuntResult, workarounds: Mapping[str, str], command: str) -> str:
    """A page of Markdown: a table, then a program for each."""
    title = f"{result.options.engine} {result.engine_version}".strip()
    lines = [
        f"# Found in {title}",
        "",
        f"Made by `{command}`: {hunt_summary(result)}.",
        "",
        "| | defect | found by | after events | actions |",
        "|---|---|---|---|---|",
    ]
    for number, defect in enumerate(result.defects, 1):
        found = f"{number} | {title_of(defect, workarounds)} | {_found_by(defect)}"
        lines.append(f"| {found} | {defect.num_events:,} | {_num_actions(defect)} |")
    for number, defect in enumerate(result.defects, 1):
        lines += ["", f"## {number}. {title_of(defect, workarounds)}", ""]
        lines += ["```text", *_body(defect), "```"]
    if result.policies:
        lines += ["", "## Decisions that may surprise", ""]
        lines += ["Both sides take them, so nothing diverges and no property is broken."]
    for lookout, defect in result.policies:
        lines += ["", f"{lookout.title} ({lookout.upstream}):", ""]
        lines += ["```text", *_program(defect), "```"]
    return "\n".join(lines) + "\n"


def hunt_to_json(result: HuntResult, workarounds: Mapping[str, str]) -> dict[str, object]:
    """As docs/reference/json.md has it."""
    options = result.options
    return {
        "format": "blockstep-hunt",
        "version": 1,
        "engine": options.engine,
        "engine_version": result.engine_version,
        "seed": options.seed,
        "depth": options.max_depth,
        "with": list(options.with_features),
        "without": list(options.without_features),
        "num_events": result.num_events,
        "num_again": result.num_again.total(),
        "defects": [_defect_to_json(defect, workarounds) for defect in result.defects],
        "policies": [
            {"name": lookout.name, "title": lookout.title, "upstream": lookout.upstream}
            | _program_to_json(defect)
            for lookout, defect in result.policies
        ],
    }


def title_of(defect: Defect, workarounds: Mapping[str, str]) -> str:
    """What accounts for it, in words, with upstream's number."""
    return "; ".join(_cause_in_words(cause, workarounds) for cause in defect.causes) or UNEXPLAINED


def _cause_in_words(cause: Cause, workarounds: Mapping[str, str]) -> str:
    if cause.means is Means.QUIRK:
        story = next(story for story in QUIRKS if story.quirk == cause.name)
        return f"{story.title} ({story.upstream})"
    return workarounds[cause.name] if cause.means is Means.WORKAROUND else cause.name


def _found_by(defect: Defect) -> str:
    finding = defect.shrunk.findings[0]
    return f"{finding.property_id or finding.kind} {finding.sentence}"


def _num_actions(defect: Defect) -> int:
    return len(defect.shrunk.program.actions)


def _body(defect: Defect) -> list[str]:
    where = f"after {defect.num_events:,} events, preset {defect.preset}"
    told = textwrap.wrap(
        defect.shrunk.findings[0].message,
        WIDTH,
        initial_indent=" " * 12,
        subsequent_indent=" " * 12,
    )
    return [f"  found by  {_found_by(defect)}", *told, f"  where     {where}", *_program(defect)]


def _program(defect: Defect) -> list[str]:
    program = defect.shrunk.program
    width = len(str(len(program.actions)))
    return [
        f"  config    {describe_config(program.config)}",
        f"  program   (shrunk from {defect.num_actions} actions to {len(program.actions)})",
        *(
            f"    {number:>{width}}  {describe(action)}"
            for number, action in enumerate(program.actions, 1)
        ),
    ]


def _defect_to_json(defect: Defect, workarounds: Mapping[str, str]) -> dict[str, object]:
    return {
        "title": title_of(defect, workarounds),
        "causes": [{"means": str(cause.means), "name": cause.name} for cause in defect.causes],
        "findings": [finding_to_json(finding) for finding in defect.shrunk.findings],
        "num_events": defect.num_events,
    } | _program_to_json(defect)


def _program_to_json(defect: Defect) -> dict[str, object]:
    program = defect.shrunk.program
    return {
        "preset": defect.preset,
        "episode": defect.episode,
        "config": describe_config(program.config),
        "program": [describe(action) for action in program.actions],
    }
