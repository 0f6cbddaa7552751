"""Playing: the tests are collected once; each mutant runs those that execute its lines, in a fork.

Collecting and importing take longer than most mutants. So one session of pytest collects the tests
and runs them once unchanged, which gives the time of each and the lines that it executes. Then a
process is forked for each mutant; it makes the change and runs the tests that execute the changed
line, quick ones first, up to the first that fails, and then the programs of the seeded bugs
(`museum`).
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from benchmarks.judges.listed import get_lists
from benchmarks.judges.museum import Corpus, play_entry
from benchmarks.judges.mutants import Mutant, Source
from benchmarks.judges.patching import CannotPatchError, Reach, plant
from benchmarks.mutation.runner import run_forked

HOUSE = Path(__file__).resolve().parents[2]
TESTS = HOUSE / "tests" / "conformance"
MODULES = (
    *("test_properties", "test_sentences", "test_voices", "test_wiring", "test_worker"),
    *("test_driver", "test_liveness", "test_compare", "test_equivalences", "test_dataplane"),
    *("test_witnesses", "test_deviations", "test_ill_typed"),
)
"""Quick test modules of the checks."""
TEST_SECONDS_MAX = 3.0
"""A test with a longer processor time while its lines are recorded is left out."""
TESTS_SECONDS_MAX = 8.0
"""The most processor time of all quick tests of a mutant, with recording."""
WALL_SECONDS = 600
"""Wall time limit of one mutant."""
UNHARMED_SECONDS = 3600
"""Wall time limit of the measuring run."""
HANG_SECONDS = 8.0
"""The least processor time limit of one test of a mutant."""
SLOWER_MAX = 10
"""The time limit of a test, as a multiple of its own time."""


class UnsoundError(Exception):
    """The unchanged checks fail their tests, so no mutant can be judged."""


class Hang(BaseException):
    """A test takes too long; no handler of errors should catch it, but pytest does."""

    was_raised: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Trial:
    """One test or one program of a seeded bug, as it runs unchanged."""

    name: str
    seconds: float
    lines: Mapping[str, frozenset[int]]
    """The lines that it executes, by module."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutant."""

    killed_by: str
    """`tests`, `museum`, `hang`; `no change` if it could not be made; "" if it survived."""
    detail: str = ""
    """The first test that failed, or the seeded bug."""
    num_trials: int = 0
    """Number of tests and programs chosen for it."""


@dataclass(slots=True)
class Session:
    """A pytest plugin that passes the collected tests to `work` instead of running them."""

    work: Callable[[Session], None]
    items: dict[str, pytest.Item] = field(default_factory=dict)
    failed: str = ""
    error: Exception | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Replace pytest's loop."""
        self.items = {item.nodeid: item for item in session.items}
        try:
            self.work(self)
        except Exception as error:  # pytest would print it and continue
            self.error = error
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record whether a test failed."""
        if report.failed:
            self.failed = self.failed or report.nodeid

    def run(self, name: str, following: str = "") -> bool:
        """Run a test and return whether it passes."""
        self.failed = ""
        item, after = self.items[name], self.items.get(following)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        return not self.failed


def open_session(work: Callable[[Session], None], modules: Sequence[str] = MODULES) -> None:
    """Collect the tests and call `work` with them.

    Raises:
        UnsoundError: there is no such test module, or it cannot be collected.
    """
    files = [TESTS / f"{name}.py" for name in modules]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise UnsoundError(f"no test module {', '.join(missing)} in {TESTS}")
    quiet = ["-qq", "--no-header", "--no-summary", "-s", "-p", "no:cacheprovider"]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the judges are imported already
    session = Session(work)
    code = pytest.main([*quiet, f"--rootdir={HOUSE}", *map(str, files)], [session])
    if session.error is not None:
        raise session.error
    if code != pytest.ExitCode.OK:
        raise UnsoundError(f"the tests could not be collected: pytest says {code!r}")


# Measuring.


def measure(
    session: Session, corpus: Corpus, sources: Mapping[str, Source], jobs: int
) -> dict[str, Trial]:
    """Run every test and every program once, unchanged, and record the lines that they execute.

    A test that fails is reported and, like one that takes too long, left out, since it cannot
    notice a mutant.

    Raises:
        UnsoundError: they do not finish.
    """
    work = partial(_trace, session, corpus, sources)
    ((_, told),) = run_forked([work], jobs, UNHARMED_SECONDS)
    if not isinstance(told, dict):
        raise UnsoundError(f"the unmutated judges end early: {told}; run the tests first")
    for name in told["failed"]:
        print(f"LEFT OUT {name}: it fails unharmed, or where its lines are noted", flush=True)
    return {
        name: Trial(name, seconds, {one: frozenset(seen) for one, seen in lines.items()})
        for name, (seconds, lines) in told["trials"].items()
    }


def _trace(session: Session, corpus: Corpus, sources: Mapping[str, Source]) -> dict[str, Any]:
    """Return times and lines of all tests that pass quickly, and the names of those that fail."""
    _allow(UNHARMED_SECONDS)
    signal.signal(signal.SIGPROF, _give_up)
    files = {source.file: name for name, source in sources.items()}
    trials, failed = {}, []
    names = [*session.items, *corpus]
    for name, following in zip(names, [*names, ""][1:], strict=True):
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, TEST_SECONDS_MAX, TEST_SECONDS_MAX)
        try:
            with Reach(files) as reach:
                is_right = _try(session, corpus, name, following)
        except Hang:
            is_right = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = time.process_time() - started
        if is_right:
            lines = {files[Path(file)]: sorted(seen) for file, seen in reach.lines.items()}
            trials[name] = [seconds, lines]
        elif not Hang.was_raised:
            failed.append(name)
        Hang.was_raised = False
    return {"trials": trials, "failed": failed}


def choose(mutant: Mutant, trials: Mapping[str, Trial], corpus: Corpus) -> list[Trial]:
    """Return the trials of a mutant: tests that execute the changed statement, then programs; quick
    first.
    """
    first, last = mutant.lines
    changed = range(first, last + 1)
    named = _find_readers(mutant) if mutant.edit is None else frozenset()
    met = [
        trial
        for trial in trials.values()
        if not trial.lines.get(mutant.module, frozenset()).isdisjoint(changed)
        or trial.name.partition("::")[0].rpartition("/")[2] in named
    ]
    tests = [trial for trial in met if trial.name not in corpus]
    chosen: list[Trial] = []
    seconds = 0.0
    for trial in sorted(tests, key=lambda trial: trial.seconds):
        seconds += trial.seconds
        if seconds > TESTS_SECONDS_MAX and chosen:
            break
        chosen.append(trial)
    return chosen + [trial for trial in met if trial.name in corpus]


def _find_readers(mutant: Mutant) -> frozenset[str]:
    """Return test modules that name the list or the check: they may read it without a call."""
    words = {name.partition(".")[2] for name in get_lists()} | {mutant.listed[0].split()[-1]}
    return frozenset(
        file.name
        for file in TESTS.glob("test_*.py")
        if words & set(_words(file.read_text(encoding="utf-8")))
    )


def _words(text: str) -> list[str]:
    return "".join(one if one.isalnum() or one == "_" else " " for one in text).split()


# One mutant.


def play(
    session: Session, corpus: Corpus, mutant: Mutant, source: Source, trials: Sequence[Trial]
) -> Outcome:
    """Make the change and run the trials, up to the first that notices.

    It needs a process of its own.
    """
    _allow(WALL_SECONDS)
    try:
        plant(mutant, source)
    except (CannotPatchError, SyntaxError) as error:
        return Outcome("no change", str(error), len(trials))
    signal.signal(signal.SIGPROF, _give_up)
    names = [trial.name for trial in trials]
    for trial, following in zip(trials, [*names, ""][1:], strict=True):
        allowed = max(HANG_SECONDS, SLOWER_MAX * trial.seconds)
        signal.setitimer(signal.ITIMER_PROF, allowed, allowed)
        is_program = trial.name in corpus
        try:
            is_right = _try(session, corpus, trial.name, following)
        except Hang:
            is_right = False
        if not is_right:
            killer = "hang" if Hang.was_raised else "museum" if is_program else "tests"
            return Outcome(killer, trial.name, len(trials))
    return Outcome("", "", len(trials))


def _try(session: Session, corpus: Corpus, name: str, following: str) -> bool:
    """Run a test or a program, and return whether the result is the expected one."""
    if name not in corpus:
        return session.run(name, following)
    try:
        return play_entry(corpus[name])
    except Exception:
        return False


def _give_up(*_: object) -> None:
    Hang.was_raised = True
    raise Hang


def _allow(seconds: float) -> None:
    """Set wider limits than `run_forked`: these processes run many tests, and torch needs
    memory.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.environ["OMP_NUM_THREADS"] = "1"
