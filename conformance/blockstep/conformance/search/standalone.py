"""Standalone scripts: a finding told by its engine's adapter as a script of the engine alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from blockstep.conformance.engine import Capability, EngineFactory, get_traits
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.story import Script, Story, UnwritableError
from blockstep.conformance.search.options import CheckOptions, find_profile
from blockstep.conformance.search.suppressions import KnownCause, SuppressingFactory, follow

SECONDS_MAX = 300
"""Time in which a script must end."""
WITHOUT_US = "import sys, runpy; sys.modules['blockstep'] = None; runpy.run_path(sys.argv[1])"
"""Program that runs a script in which `import blockstep` fails."""


def make_script(
    options: CheckOptions,
    make_engine: EngineFactory,
    program: Program,
    title: str,
    forgiven: frozenset[KnownCause] | None = None,
) -> Script | str:
    """Play a program up to its first finding; return the adapter's script, or why there is none.

    `forgiven`: suppressed causes of a hunt; None: the program is one of a check.
    """
    write = get_traits(make_engine).write_script
    if write is None:
        return f"the adapter of {options.engine} writes no scripts"
    profile = find_profile(options.profile)
    if forgiven is not None:
        make_engine, profile = SuppressingFactory(make_engine, forgiven), follow(forgiven)
    run, findings = run_program(program, make_engine, profile)
    if not findings or not run.exchanges:
        return "the program does not fail again"
    last = run.exchanges[-1]
    shows_state = Capability.SNAPSHOT in run.capabilities and last.seen is not None
    is_compared = not run.equivalence
    story = Story(
        title=title,
        version=str(get_traits(make_engine).version),
        finding=findings[0],
        config=program.config,
        events=tuple(exchange.event for exchange in run.exchanges),
        seen=last.seen,
        state=run.engine.snapshot() if shows_state else None,
        unfinished=tuple(sorted(run.live)),
        expected=last.expected if is_compared else None,
        expected_state=run.spec.snapshot() if is_compared else None,
    )
    try:
        script: Script = write(story)
    except UnwritableError as error:
        return str(error)
    return script


def verify(script: Script, folder_of_engine: str | None = None) -> str:
    """Run a script without Blockstep, in the folder of its engine if it has one; return "" if it
    shows its defect, and else what it does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script.source, encoding="utf-8")
        try:
            done = subprocess.run(  # noqa: S603 - it was written by an adapter
                [sys.executable, "-c", WITHOUT_US, str(path)],
                capture_output=True,
                text=True,
                timeout=SECONDS_MAX,
                check=False,
                cwd=folder_of_engine,
            )
        except subprocess.TimeoutExpired:
            return f"the script did not end in {SECONDS_MAX} s"
    output = done.stdout + done.stderr
    if done.returncode == 1 and script.evidence in output:
        return ""
    last = (output.strip().splitlines() or ["nothing"])[-1]
    return (
        f"the script does not show {script.evidence!r}: exit status {done.returncode}, and the end "
        f"of what it prints is {last!r}"
    )
