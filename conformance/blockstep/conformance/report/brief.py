"""Brief: a finding in at most five lines, for logs and the annotations of a CI.

Lines are as long as needed and never wrapped, so that names and the command line can be copied.
Messages and programs are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from blockstep.conformance.explore.consume import Consumed
from blockstep.conformance.explore.tables import format_program
from blockstep.conformance.explore.walk import Walked
from blockstep.conformance.protocol.findings import (
    Difference,
    Finding,
    FindingKind,
    shown,
    shown_apart,
)
from blockstep.conformance.protocol.program import describe, describe_event, describe_request
from blockstep.conformance.recorded.replay_counts import ReplayReport
from blockstep.conformance.recorded.validate import Validation
from blockstep.conformance.report.failure import NOT_AGAIN, headline, reproduce
from blockstep.conformance.report.finding_text import HEADLINES, make_known_lines
from blockstep.conformance.report.hunt import hunt_summary, reproduce_defect, title_of
from blockstep.conformance.report.metamorphic import describe_difference, reproduce_arms
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.defects import Defect, HuntResult, name_of
from blockstep.conformance.search.metamorphic import MetamorphicResult
from blockstep.conformance.search.options import CheckOptions

CHARS_MAX = 160
"""Most characters of a message or a program."""
LINES_MAX = 5
"""Most lines of a finding."""


def format_brief(
    head: str, finding: str, seen: str = "", program: Sequence[str] = (), again: str = ""
) -> str:
    """Return a finding in up to five lines, with a trailing newline.

    Args:
        head: Verdict, number of events and engine.
        finding: Property and check, or another name.
        seen: Message with the wrong values.
        program: Actions, a line each.
        again: Command line that reproduces it.
    """
    parts = {"seen": cut(seen), "program": join(program), "reproduce": again}
    lines = [head, f"  {'finding':<11}{finding}"]
    lines += [f"  {label:<11}{text}" for label, text in parts.items() if text]
    return "\n".join(" ".join(line.splitlines()) for line in lines) + "\n"


def cut(text: str) -> str:
    """Return the text in a line, cut if it is too long."""
    return shown(" ".join(text.split()), CHARS_MAX)


def join(lines: Iterable[str]) -> str:
    """Return the lines of a program in one, or its first ones and the number of the others."""
    flat = [" ".join(line.split()) for line in lines]
    text = "; ".join(flat)
    count = len(flat)
    while len(text) > CHARS_MAX and count > 1:
        count -= 1
        text = f"{'; '.join(flat[:count])}; ... {len(flat) - count} more"
    return shown(text, CHARS_MAX)


def brief_check(result: CheckResult) -> str:
    """Return the first failure of a check."""
    options, failure, loss = result.options, result.failure, result.loss
    assert result.first is not None
    episode = result.failed_episode or 0
    if failure is None:
        assert loss is not None
        head = headline(options, loss.finding, len(loss.events))
        again = reproduce(options, episode, loss)
        return format_brief(head, name_of(loss.finding), loss.message, loss.events, again)
    findings = failure.findings or (result.first,)
    seen = describe_seen(findings[0]) + ("" if failure.findings else f"; {NOT_AGAIN}")
    head = headline(options, findings[0], failure.num_events, failure.equivalence)
    program = [describe(action) for action in failure.program.actions]
    return format_brief(head, describe_names(findings), seen, program, reproduce(options, episode))


def brief_found(result: CheckResult) -> str:
    """Return a failure as it was found; it is shrunk next."""
    first, options, program = result.first, result.options, result.failing_program
    assert first is not None
    episode = result.failed_episode or 0
    where = f"engine {options.engine}, preset {options.preset}, seed {options.seed}"
    head = f"blockstep check: found in episode {episode} ({where}); it is being shrunk"
    lines = [] if program is None else [describe(action) for action in program.actions]
    return format_brief(
        head, name_of(first), describe_seen(first), lines, reproduce(options, episode)
    )


def brief_hunted(defect: Defect) -> str:
    """Return a failure as a hunt found it; it is shrunk and explained next."""
    where = f"preset {defect.options.preset}, episode {defect.episode}"
    head = f"blockstep hunt: found after {defect.num_events:,} events ({where}); it is being shrunk"
    return format_brief(head, name_of(defect.first), describe_seen(defect.first))


def describe_names(findings: Sequence[Finding]) -> str:
    """Return the name of the first finding, and the number of the others."""
    more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"{name_of(findings[0])}{more}"


def describe_seen(finding: Finding) -> str:
    """Return the message of a finding, with the first differing field."""
    sides = "spec", "engine"
    if finding.kind is not FindingKind.DIVERGENCE:
        sides = "expected", "seen"
    where = f"; raised in {finding.frames[-1].partition(': ')[0]}" if finding.frames else ""
    return f"{finding.message}{where}{_describe_first(finding.differences, sides)}"


def _describe_first(differences: Sequence[Difference], sides: tuple[str, str]) -> str:
    if not differences:
        return ""
    first, more = differences[0], len(differences) - 1
    left, right = shown_apart(first.expected, first.seen, CHARS_MAX // 4)
    text = f"; {first.field}: {sides[0]} {left}, {sides[1]} {right}"
    return f"{text} and {more} more" if more else text


def brief_hunt(result: HuntResult) -> str:
    """Return each defect, after a summary line."""
    texts = [f"blockstep hunt: {hunt_summary(result)}\n"]
    texts += [f"{line}\n" for line in make_known_lines(result.known_programs)]
    for number, defect in enumerate(result.defects, 1):
        head = f"{number}. {title_of(defect, result)}"
        again = reproduce_defect(defect, result)
        texts.append(
            format_brief(
                head, name_of(defect.first), describe_seen(defect.first), _program_of(defect), again
            )
        )
    return "".join(texts)


def _program_of(defect: Defect) -> Sequence[str]:
    if defect.shrunk is not None:
        return [describe(action) for action in defect.shrunk.program.actions]
    return () if defect.loss is None else defect.loss.events


def brief_metamorphic(result: MetamorphicResult, options: CheckOptions) -> str:
    """Return a request that two configs answer differently, or what was raised."""
    where = f"engine {options.engine}, preset {options.preset}, seed {options.seed}"
    contrast, fault = result.contrast, result.fault
    if fault is not None:
        requests = [f"submit {describe_request(it)}" for it in fault.requests]
        again = reproduce_arms(options, fault.episode)
        name = f"fault under the change {fault.arm}" if fault.arm else "fault before any change"
        return format_brief(
            f"blockstep arms: FAULT ({where})", name, fault.message, requests, again
        )
    assert contrast is not None
    head = f"blockstep arms: {contrast.request_id} IS ANSWERED DIFFERENTLY ({where})"
    requests = [f"submit {describe_request(it)}" for it in contrast.requests]
    again = reproduce_arms(options, contrast.episode)
    return format_brief(head, f"arm {contrast.arm}", describe_difference(contrast), requests, again)


def brief_walked(walked: Walked, again: str) -> str:
    """Return the first finding of a walk through a small world."""
    program = format_program(walked.path)
    name = f"preset {walked.task.world.name}"
    name = f"engine {walked.task.engine}, {name}" if walked.task.engine else name
    if walked.cycle:
        program += ["and then for ever", *format_program(walked.cycle)]
    first, *others = walked.found
    head = f"blockstep explore: found after {len(walked.path)} events ({name})"
    return format_brief(head, cut(first), "; ".join(map(str.strip, others)), program, again)


def brief_consumed(file: Path, result: Consumed, again: str) -> str:
    """Return the first step of a file of vectors at which an engine fails."""
    kind = FindingKind.DIVERGENCE if result.finding is None else result.finding.kind
    head = f"{file}: {HEADLINES[kind]} in program {result.program}, step {result.step}"
    if result.finding is not None:
        name, seen = name_of(result.finding), describe_seen(result.finding)
    else:
        name = f"{kind}: another answer or state than the vector's"
        seen = _describe_first(result.differences, ("expected", "seen")).removeprefix("; ")
    return format_brief(head, name, seen, [result.event], again)


def brief_replay(report: ReplayReport, engine: str, again: str) -> str:
    """Return the finding that stopped a replay."""
    finding = report.finding
    assert finding is not None
    event = () if report.finding_event is None else (describe_event(report.finding_event),)
    head = f"blockstep replay: {HEADLINES[finding.kind]} at step {report.finding_step}"
    first_line = f"{head} (engine {engine}, equivalence {report.equivalence})"
    return format_brief(first_line, name_of(finding), describe_seen(finding), event, again)


def brief_validation(path: Path, result: Validation, again: str) -> str:
    """Return the first recorded step that is wrong."""
    finding = result.finding
    assert finding is not None
    where = f"step {result.num_agreed + 1} of {result.num_steps} ({path.name})"
    head = f"blockstep validate: {HEADLINES[finding.kind]} at {where}"
    return format_brief(head, name_of(finding), describe_seen(finding), [result.event], again)
