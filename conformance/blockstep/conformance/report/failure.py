"""Report of a failure: property, minimal program, state diff, and how to reproduce it.

It is plain text, since it is read in CI logs, pasted into issues, and compared by snapshot tests.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.draw.presets import MAX_DEPTH
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import WIDTH, describe, describe_config
from blockstep.conformance.report.finding_text import (
    HEADLINES,
    make_first_line,
    make_known_lines,
    make_settings_line,
    render_divergence,
    render_finding,
)
from blockstep.conformance.report.headlines import make_headline
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.episodes import Loss
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.shrink import Shrunk
from blockstep.spec.profiles import STRICT

LINES_MAX = 60
"""Most events shown of a program that was not shrunk; the last ones."""
NOT_AGAIN = (
    "this was seen once, and not when the program ran again: the engine is not deterministic"
)
"""Note on a finding that could not be reproduced."""


def render_first_failure(result: CheckResult) -> str:
    """Return the whole report of the first failure of a check, with a trailing newline."""
    failure, loss = result.failure, result.loss
    notes = "".join(f"\n  note       {note}\n" for note in result.notes)
    notes += "".join(f"\n  {line}\n" for line in make_known_lines(result.known_programs))
    if result.settings:
        notes += f"\n  {make_settings_line('run', result.settings)}\n"
    if failure is None:
        assert loss is not None
        return _render_lost_check(result, loss) + notes
    assert result.first is not None
    assert result.failing_program is not None
    note = "" if failure.findings else f"\n  {NOT_AGAIN}\n"
    if loss is not None:
        note += f"\n  then, while this was being shrunk: {loss.message}\n"
    shrunk = replace(failure, findings=failure.findings or (result.first,))
    before = len(result.failing_program.actions)
    return render_failure(shrunk, result.options, result.failed_episode or 0, before) + note + notes


def render_failure(
    shrunk: Shrunk, options: CheckOptions, episode: int, num_actions_before: int
) -> str:
    """Return the whole report of one failure, with a trailing newline."""
    note = f"  (shrunk from {num_actions_before} actions to {len(shrunk.program.actions)})"
    note = "" if options.program is not None else note
    again = f"  reproduce  {reproduce(options, episode)}"
    head = headline(options, shrunk.findings[0], shrunk.num_events, shrunk.equivalence)
    return _join([head, "", *_body(shrunk, note), "", again])


def headline(
    options: CheckOptions, finding: Finding, num_events: int, equivalence: str = ""
) -> str:
    """Return the first line: verdict, number of events, cause and engine."""
    how = f"equivalence {equivalence}, " if equivalence else ""
    where = f"engine {options.engine}, {how}{_drawn_from(options)}"
    return make_first_line("blockstep check", finding, num_events, where)


def _drawn_from(options: CheckOptions) -> str:
    if options.program is not None:
        return f"program {options.program}"
    return f"preset {options.preset}, seed {options.seed}"


def render_program(shrunk: Shrunk, engine: str) -> str:
    """Return the report of a failure of a user's own program: no preset, no seed, not shrunk."""
    first = shrunk.findings[0]
    head = make_first_line("blockstep", first, shrunk.num_events, f"engine {engine}")
    return _join([head, "", *_body(shrunk, "")])


def render_outcome(outcome: CheckResult, engine: str) -> str:
    """Return the report of a user's own program, or of a lost process; "" if nothing is wrong."""
    if outcome.loss is not None:
        return render_loss("blockstep", f"engine {engine}", outcome.loss)
    return "" if outcome.failure is None else render_program(outcome.failure, engine)


def _body(shrunk: Shrunk, note: str) -> list[str]:
    """Return the findings, the program, the last answers, and the differing fields."""
    actions = shrunk.program.actions
    width = len(str(len(actions)))
    return [
        *(line for finding in shrunk.findings for line in render_finding(finding)),
        "",
        f"  config    {describe_config(shrunk.program.config)}",
        f"  program {note}",
        *(f"    {number:>{width}}  {describe(it)}" for number, it in enumerate(actions, 1)),
        *_render_answers(shrunk),
        *render_divergence(shrunk.findings),
    ]


def _join(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"


# Processes that died before the failure was shrunk.


def _render_lost_check(result: CheckResult, loss: Loss) -> str:
    """Return the report of a failure that is known only from the journal of a process."""
    options, first = result.options, result.first
    where = f"engine {options.engine}, {_drawn_from(options)}"
    text = render_loss("blockstep check", where, loss)
    if first is not None and first != loss.finding:
        name = f"{first.property_id or first.kind} {first.sentence}"
        text += f"\n  seen in the same episode before: {name}: {first.message}\n"
    return f"{text}\n  reproduce  {reproduce(options, result.failed_episode or 0, loss)}\n"


def render_loss(command: str, where: str, loss: Loss) -> str:
    """Return the report of an engine whose process died or hung."""
    lines = [
        make_first_line(command, loss.finding, len(loss.events), where),
        "",
        *render_finding(loss.finding),
    ]
    if loss.config:
        lines += ["", f"  config    {loss.config}"]
    if loss.events:
        count, width = len(loss.events), len(str(len(loss.events)))
        first = max(count - LINES_MAX, 0)
        lines += ["  program   (as it ran, not shrunk)"]
        lines += [f"    and {first} events before"] if first else []
        for number, event in enumerate(loss.events[first:], first + 1):
            lines.append(f"    {number:>{width}}  {event}")
    if loss.last_words:
        lines += ["", "  the end of its standard error"]
        lines += [f"    {line}" for line in loss.last_words]
    return _join(lines)


def render_served(findings: Sequence[Finding], num_events: int) -> str:
    """Return the findings while an engine served (`CheckFailedError`), and the number of events."""
    first = findings[0]
    head = f"blockstep generate: {HEADLINES[first.kind]} at event {num_events}"
    rendered = [line for finding in findings for line in render_finding(finding)]
    lines = [f"{head}: {make_headline(first)}", "", *rendered]
    return "\n".join([*lines, *render_divergence(findings)])


def reproduce(options: CheckOptions, episode: int, loss: Loss | None = None) -> str:
    """Return the command line that reproduces the failure."""
    path = show_path(options)
    engine = shlex.quote(options.engine)
    policy = f" --policy {options.policy}" if options.policy else ""
    sentence = f" --sentence {options.sentence}" if options.sentence else ""
    patience = ""
    if loss is not None and loss.event_seconds is not None:
        patience = f" --event-seconds {loss.event_seconds:g}"
    if options.program is not None:
        drawn = replace(options, max_depth=MAX_DEPTH, with_features=(), without_features=())
        file = f"{path} --program {shlex.quote(options.program)}{show_options(drawn)}"
        return f"blockstep check --engine {engine}{file}{patience}"
    return (
        f"blockstep check --engine {engine}{path} --preset {options.preset}{policy}"
        f"{show_options(options)} --seed {options.seed} --episode {episode}{sentence}{patience}"
    )


def show_path(options: CheckOptions) -> str:
    """Return the option for the folder of the engine, after a space and quoted for a shell."""
    return f" --path {shlex.quote(options.path)}" if options.path else ""


def show_options(options: CheckOptions) -> str:
    """Return the options of a search that differ from their defaults, each after a space."""
    parts = [f" --profile {options.profile}"] if options.profile != STRICT.name else []
    parts += [f" --depth {options.max_depth}"] if options.max_depth != MAX_DEPTH else []
    parts += [" --hide-state"] if options.hide_state else []
    parts += [f" --with {name}" for name in options.with_features]
    parts += [f" --without {name}" for name in options.without_features]
    return "".join(parts)


def _render_answers(shrunk: Shrunk) -> list[str]:
    """Return the answers of both sides to the last event."""
    last = shrunk.last
    if last is None:
        return []
    seen = "it raised" if last.seen is None else last.seen
    if shrunk.equivalence:
        return ["", *_wrapped(f"answer to {last.event}: {seen}")]
    if last.are_alike:
        return ["", *_wrapped(f"answer to {last.event}, both sides alike: {last.expected}")]
    return [
        "",
        *_wrapped(f"spec's answer to {last.event}: {last.expected}"),
        *_wrapped(f"engine's answer: {seen}"),
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
