"""Reports of `bisect`: the first bad commit, as text and JSON."""

from __future__ import annotations

import shlex
from typing import Any

from blockstep.conformance.protocol.program import describe, describe_config
from blockstep.conformance.report.failure import show_options, show_path
from blockstep.conformance.report.finding_text import render_finding
from blockstep.conformance.report.jsonform import finding_to_json
from blockstep.conformance.search.bisect import Bisection, Commit, Mark, Step


def render_step(step: Step) -> str:
    """Return one line for a commit that was tried."""
    why = f"\n        {step.why}" if step.why else ""
    return f"  {step.mark:<5} {step.commit.short}  {step.commit.subject}{why}"


def render_question(found: Bisection) -> str:
    """Return the finding, config and program that are bisected."""
    program = found.question.program
    width = len(str(len(program.actions)))
    actions = enumerate(program.actions, 1)
    lines = [
        *render_finding(found.question.finding),
        "",
        f"  config    {describe_config(program.config)}",
        "  program",
        *(f"    {number:>{width}}  {describe(action)}" for number, action in actions),
    ]
    return "\n".join(lines)


def render_bisection(found: Bisection) -> str:
    """Return the whole report, with a trailing newline."""
    where = f"engine {found.options.engine}, {found.options.path}"
    tried = len(found.steps)
    skipped = sum(step.mark is Mark.SKIP for step in found.steps)
    between = f"{found.good.short} (good) and {found.bad.short} (bad): {tried} commits tried"
    head, is_found = "FIRST BAD COMMIT", len(found.suspects) == 1
    if not is_found:
        head = f"ONE OF {len(found.suspects)} COMMITS"
    lines = [f"blockstep bisect: {head} ({where})", ""]
    for commit in found.suspects:
        lines += [f"  commit    {commit.sha}", f"            {_about(commit)}"]
    lines += ["", f"  between   {between}, {skipped} skipped", render_question(found)]
    if not is_found:
        lines += ["", "  The others between them could not be tried, so none of these is cleared."]
    lines += ["", f"  reproduce  {_reproduce(found)}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _reproduce(found: Bisection) -> str:
    """Return the command line that reproduces the result."""
    options = found.options
    given = f"blockstep bisect --engine {shlex.quote(options.engine)}{show_path(options)}"
    if options.program is not None:
        given += f" --program {shlex.quote(options.program)}"
    else:
        budget = options.max_events or f"{options.max_seconds:g}s"
        given += f" --preset {options.preset} --seed {options.seed} --budget {budget}"
    return f"{given}{show_options(options)} {found.good.short} {found.bad.short}"


def _about(commit: Commit) -> str:
    return f"{commit.date}, {commit.author}: {commit.subject}"


def bisection_to_json(found: Bisection) -> dict[str, Any]:
    """Return the result as JSON types; the schema is in docs/reference/json.md."""
    program = found.question.program
    return {
        "format": "blockstep-bisect",
        "version": 1,
        "engine": found.options.engine,
        "path": found.options.path,
        "exit_code": int(found.exit_code),
        "good": _commit_to_json(found.good),
        "bad": _commit_to_json(found.bad),
        "finding": finding_to_json(found.question.finding),
        "config": describe_config(program.config),
        "program": [describe(action) for action in program.actions],
        "steps": [
            {**_commit_to_json(step.commit), "mark": str(step.mark), "why": step.why}
            for step in found.steps
        ],
        "suspects": [_commit_to_json(commit) for commit in found.suspects],
    }


def _commit_to_json(commit: Commit) -> dict[str, str]:
    return {
        "commit": commit.sha,
        "date": commit.date,
        "author": commit.author,
        "subject": commit.subject,
    }
