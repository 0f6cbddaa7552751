"""Trials: tests, laws, runs in lock-step and seeded bugs, each of which may notice a mutant.

Every trial runs once unchanged, which shows its time and the lines that it executes. A mutant then
meets the trials that execute its statement, quick ones first, up to the first with another result.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest
from benchmarks.mutation.processes import run_forked
from benchmarks.mutation.targets import HOUSE, Mutant, Source, Stage, Target, list_test_files

from blockstep.conformance.engine import Capability, EngineTraits, Safety
from blockstep.conformance.museum import EXHIBITS, build
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.prove.changes import CannotPlantError, plant
from blockstep.conformance.prove.counterexamples import Arguments
from blockstep.conformance.prove.law import Law
from blockstep.conformance.prove.laws import LAWS
from blockstep.conformance.prove.mutants import draw_points, fails
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Config

TRIAL_SECONDS_MAX = 20.0
"""A trial that takes more processor time while its lines are recorded is left out."""
MUTANT_SECONDS = 20.0
"""The processor time of the trials of a mutant, as they run unchanged while recorded."""
WALL_SECONDS = 1_200
"""Wall time limit of one mutant."""
UNCHANGED_SECONDS = 7_200
"""Wall time limit of the unchanged run."""
HANG_SECONDS = 8.0
"""The least processor time limit of a trial of a mutant."""
SLOWER_MAX = 10
"""The time limit of a trial, as a multiple of its own time."""
NUM_LAW_POINTS = 20
BUG_EVENTS = 3_000
"""Events in which a seeded bug must be found at `safety`."""

Runs = Mapping[str, Callable[[], bool]]
"""The trials of a target by name; each returns whether its result is the expected one."""


class UnsoundError(Exception):
    """The unchanged code does not pass, so no mutant can be judged."""


class Hang(BaseException):
    """A trial takes too long; no handler of errors should catch it, but pytest does."""

    was_raised: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial as it runs unchanged."""

    name: str
    seconds: float
    lines: Mapping[str, frozenset[int]]
    """The lines that it executes, by module."""


# Kinds of trials.


@dataclass(slots=True)
class Session:
    """A pytest plugin that passes the collected tests to `work` instead of running them."""

    work: Callable[[Session], None]
    items: dict[str, pytest.Item] = field(default_factory=dict)
    failed: str = ""
    error: Exception | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replace pytest's loop."""
        self.items = {f"test {item.nodeid}": item for item in session.items}
        try:
            self.work(self)
        except Exception as error:  # pytest would print it and continue
            self.error = error
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record whether a test failed."""
        if report.failed:
            self.failed = report.nodeid

    def run(self, name: str) -> bool:
        """Run a test and return whether it passes."""
        self.failed = ""
        item = self.items[name]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self.failed


def open_session(
    target: Target, only: Sequence[str], work: Callable[[Mapping[str, Callable[[], bool]]], None]
) -> None:
    """Collect the trials of a target whose names begin with one of `only`, and call `work`.

    Raises:
        UnsoundError: no trial begins so, or the tests cannot be collected.
    """
    others = {name: run for name, run in list_runs(target, only).items() if _is_chosen(name, only)}
    files = [file for file in list_test_files(target) if _is_chosen(f"test {file}", only)]

    def start(session: Session) -> None:
        chosen = [name for name in session.items if _is_chosen(name, only)]
        begin({name: partial(session.run, name) for name in chosen} | others)

    def begin(runs: Mapping[str, Callable[[], bool]]) -> None:
        for one in only:
            if not any(name.startswith(one) for name in runs):
                raise UnsoundError(f"--trials {one!r}: no trial begins so")
        work(runs)

    if not files:
        begin(others)
        return
    quiet = ["-qq", "--no-header", "--no-summary", "-s", "-p", "no:cacheprovider", "--quick"]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the judges are imported already
    quiet += ["-W", "ignore:the host engine runs as plain Python:RuntimeWarning"]
    session = Session(start)
    code = pytest.main(
        [*quiet, f"--rootdir={HOUSE}", *(str(HOUSE / one) for one in files)], [session]
    )
    if session.error is not None:
        raise session.error
    if code != pytest.ExitCode.OK:
        raise UnsoundError(f"the tests could not be collected: pytest says {code!r}")


def _is_chosen(name: str, only: Sequence[str]) -> bool:
    return not only or any(name.startswith(one) or one.startswith(name) for one in only)


def list_runs(target: Target, only: Sequence[str] = ()) -> dict[str, Callable[[], bool]]:
    """Return the trials of a target that are no tests."""
    runs: dict[str, Callable[[], bool]] = {}
    for law in LAWS.values() if target.has_laws else ():
        if not law.is_slow and _is_chosen(f"law {law.name}", only):
            points = draw_points(law, number=NUM_LAW_POINTS)
            runs[f"law {law.name}"] = partial(_holds, law, points)
    for stage in target.stages:
        load_engine(stage[0])  # a change is made in functions that are imported already
        runs[f"play {stage[0]} {stage[1]}"] = partial(play, stage)
    for name in EXHIBITS if target.has_bugs else ():
        for is_hidden in (False, True):
            kind = "hidden" if is_hidden else "shown"
            runs[f"bug {name} {kind}"] = partial(find_bug, name, is_hidden)
    if target.has_bugs:
        runs["play host at safety"] = partial(_play_at_safety)
    return runs


def _holds(law: Law, points: Sequence[Arguments]) -> bool:
    return not any(fails(law, point) for point in points)


def play(stage: Stage) -> bool:
    """Return whether a run in lock-step has no finding."""
    engine, drawn, num_events = stage
    preset, *features = drawn.split()
    options = CheckOptions(engine=engine, preset=preset, with_features=tuple(features))
    return not _finds(options, load_engine(engine), num_events)


def _finds(options: CheckOptions, make_engine: Callable[[Config], Any], num_events: int) -> bool:
    """Return whether an episode of the first `num_events` events has a finding."""
    played = index = 0
    while played < num_events:
        episode = run_episode(options, index, make_engine)
        if episode.first is not None:
            return True
        played, index = played + episode.num_events, index + 1
    return False


def _play_at_safety() -> bool:
    make_engine = _make_judged(load_engine("host"), is_hidden=False)
    return all(run_episode(CheckOptions(), index, make_engine).first is None for index in range(4))


def find_bug(name: str, is_hidden: bool) -> bool:
    """Return whether a seeded bug is found at `safety`, with its state hidden or shown."""
    make_engine = _make_judged(build(name), is_hidden)
    return _finds(CheckOptions(engine=name, preset="tiny"), make_engine, BUG_EVENTS)


def _make_judged(made: Any, is_hidden: bool) -> Callable[[Config], Any]:
    class Judged(made):  # type: ignore[misc]
        traits = EngineTraits(equivalence=Safety())

        def capabilities(self) -> frozenset[str]:
            has: frozenset[str] = super().capabilities()
            return has - {Capability.SNAPSHOT} if is_hidden else has

        def snapshot(self) -> Any:
            return None if is_hidden else super().snapshot()

    return Judged


# Unchanged runs.


class Reach:
    """Records which lines of some files run: `lines` by file. At most one at a time."""

    def __init__(self, files: Collection[Path]) -> None:
        self._files = {str(file) for file in files}
        self._left: dict[CodeType, set[int] | None] = {}
        """Lines of a code object that were not seen yet; None for another file."""
        self.lines: dict[str, set[int]] = {}

    def __enter__(self) -> Reach:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        left = self._left.get(code, self._left)
        if left is self._left:
            left = None
            if code.co_filename in self._files:
                left = {line for *_, line in code.co_lines() if line}
            self._left[code] = left
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            code = frame.f_code
            left = self._left[code]
            if left and frame.f_lineno in left:
                left.discard(frame.f_lineno)
                self.lines.setdefault(code.co_filename, set()).add(frame.f_lineno)
        return self._line


def measure(runs: Runs, sources: Sequence[Source], jobs: int) -> tuple[dict[str, Trial], list[str]]:
    """Run every trial once, unchanged; return those with the expected result, and the names of the
    others.

    Raises:
        UnsoundError: they do not finish, or none has the expected result.
    """
    ((_, trace),) = run_forked([partial(_trace, runs, sources)], jobs, UNCHANGED_SECONDS)
    if not isinstance(trace, dict) or not trace["trials"]:
        raise UnsoundError(f"no unchanged trial passes: {trace}; run the tests first")
    trials = {
        name: Trial(name, seconds, {one: frozenset(seen) for one, seen in lines.items()})
        for name, (seconds, lines) in trace["trials"].items()
    }
    return trials, trace["failed"]


def _trace(runs: Runs, sources: Sequence[Source]) -> dict[str, Any]:
    _allow(UNCHANGED_SECONDS)
    files = {str(source.file): source.module for source in sources}
    trials, failed = {}, []
    for name, run in runs.items():
        started = time.process_time()
        with Reach([Path(file) for file in files]) as reach:
            is_right = _try(run, TRIAL_SECONDS_MAX)
        seconds = time.process_time() - started
        if is_right:
            lines = {files[file]: sorted(seen) for file, seen in reach.lines.items()}
            trials[name] = [seconds, lines]
        elif not Hang.was_raised:
            failed.append(name)
    return {"trials": trials, "failed": failed}


def choose(
    mutant: Mutant, trials: Mapping[str, Trial], seconds_max: float = MUTANT_SECONDS
) -> list[Trial]:
    """Return the trials that execute the changed statement, quick ones first, within a time."""
    first, last = mutant.change.lines
    changed = range(first, last + 1)
    chosen: list[Trial] = []
    seconds = 0.0
    for trial in sorted(trials.values(), key=lambda trial: trial.seconds):
        if trial.lines.get(mutant.source.module, frozenset()).isdisjoint(changed):
            continue
        seconds += trial.seconds
        if seconds > seconds_max and chosen:
            break
        chosen.append(trial)
    return chosen


# One mutant.


def play_mutant(mutant: Mutant, trials: Sequence[Trial], runs: Runs) -> dict[str, Any]:
    """Make the change and run the trials; return the name of the first that notices.

    It needs a process of its own.
    """
    _allow(WALL_SECONDS)
    result = {"killed_by": "", "num_trials": len(trials)}
    source = mutant.source
    try:
        plant(mutant.change, source.text, str(source.file))
    except CannotPlantError:
        return {**result, "killed_by": "not made"}
    for trial in trials:
        if not _try(runs[trial.name], max(HANG_SECONDS, SLOWER_MAX * trial.seconds)):
            return {**result, "killed_by": "hang" if Hang.was_raised else trial.name}
    return result


def _try(run: Callable[[], bool], seconds_max: float) -> bool:
    """Run a trial and return whether its result is the expected one; an error is none."""
    Hang.was_raised = False
    signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, seconds_max, seconds_max)
    try:
        is_right = run()
    except (Exception, Hang):
        is_right = False
    signal.setitimer(signal.ITIMER_PROF, 0)
    return is_right and not Hang.was_raised


def _give_up(*_: object) -> None:
    Hang.was_raised = True
    raise Hang


def _allow(seconds: int) -> None:
    signal.alarm(seconds)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.environ["OMP_NUM_THREADS"] = "1"
