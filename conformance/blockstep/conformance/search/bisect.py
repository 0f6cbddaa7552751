"""Bisect: finds the first commit of a checkout at which a program fails as it does at a bad one.

Git chooses the commits (`git bisect`), in a clone in a temporary folder: the user's checkout is
only read. At each commit the program runs in a process of its own. A commit at which it fails in
another way, or cannot be imported, tells nothing about the defect: it is skipped.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.isolation import EVENT_SECONDS, Isolation, RefusedError
from blockstep.conformance.search.options import CheckOptions, ExitCode


class Mark(StrEnum):
    """Verdict on a commit for `git bisect`."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of the checkout."""

    sha: str
    date: str
    author: str
    subject: str

    @property
    def short(self) -> str:
        """Return the first ten digits of its hash."""
        return self.sha[:10]


@dataclass(frozen=True, slots=True)
class Step:
    """Commit that was tried."""

    commit: Commit
    mark: Mark
    why: str = ""
    """Reason why it was skipped."""


@dataclass(frozen=True, slots=True)
class Question:
    """Program, and its failure at the bad commit."""

    program: Program
    finding: Finding

    def mark(self, result: CheckResult) -> tuple[Mark, str]:
        """Return the verdict on a commit with this result, and the reason if it is skipped."""
        loss, first = result.loss, result.first
        if loss is not None and not loss.config:
            return Mark.SKIP, loss.message
        if first is None:
            ran = result.num_events > 0
            return (Mark.GOOD, "") if ran else (Mark.SKIP, "nothing of the program can be played")
        if _name_of(first) == _name_of(self.finding):
            return Mark.BAD, ""
        return Mark.SKIP, f"it fails otherwise: {name_finding(first)}"


@dataclass(slots=True)
class Bisection:
    """Result of a bisection."""

    options: CheckOptions
    question: Question
    good: Commit
    bad: Commit
    steps: list[Step] = field(default_factory=list)
    """Tried commits, in order."""
    suspects: tuple[Commit, ...] = ()
    """The first bad commit; or, if too many were skipped, the commits one of which is the first bad
    one."""

    @property
    def exit_code(self) -> ExitCode:
        """Return the exit code: one suspect, or more."""
        return ExitCode.CONFORMS if len(self.suspects) == 1 else ExitCode.HARNESS


def name_finding(finding: Finding) -> str:
    """Return the property or kind of a finding, and its check."""
    return f"{finding.property_id or finding.kind} {finding.sentence}"


def _name_of(finding: Finding) -> tuple[FindingKind, str, tuple[str, ...]]:
    """Return what equal findings have in common: the kind, the check, and the type of an
    exception."""
    raised = tuple(it.seen for it in finding.differences if it.field == "exception")
    return finding.kind, finding.sentence, raised


class Clone:
    """A clone of a repository, for `git bisect` to walk through."""

    def __init__(self, repository: Path, folder: Path) -> None:
        """Clone into a folder. Raises UsageError: there is no repository, or git fails."""
        self.path = folder / repository.resolve().name
        self._source = repository
        self._order: list[str] = []
        """Commits that may be the first bad one, each after its parents."""
        _git(repository, "rev-parse", "--git-dir")
        clone = ("clone", "--quiet", "--shared", "--no-checkout")
        _git(repository, *clone, str(repository.resolve()), str(self.path))

    def find(self, name: str) -> Commit:
        """Return the commit of a branch, a tag or a hash. Raises UsageError."""
        try:
            sha = _git(
                self._source, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}"
            )
        except UsageError:
            rule = f"must be a commit of {self._source}; name a hash, a tag or a branch"
            raise UsageError(f"commit {name!r}: {rule}") from None
        return self.describe(sha.strip())

    def describe(self, sha: str) -> Commit:
        """Return hash, date, author and subject of a commit."""
        log = _git(self.path, "log", "-1", "--date=short", "--format=%H%n%ad%n%an%n%s", sha)
        return Commit(*log.splitlines())

    def check_out(self, commit: Commit) -> None:
        """Bring the folder to this commit, as clean as after a clone."""
        _git(self.path, "checkout", "--quiet", "--force", commit.sha)
        self._clean()

    def _clean(self) -> None:
        # Python takes bytecode for current if its source has the same time and size, which commits
        # may.
        _git(self.path, "clean", "--quiet", "-ffdx")

    def require_order(self, good: Commit, bad: Commit) -> None:
        """Raise UsageError unless the bad commit follows the good one."""
        base = _git(self.path, "merge-base", good.sha, bad.sha).strip()
        if base != good.sha or good == bad:
            rule = "must come before the bad one in its history"
            raise UsageError(f"good commit {good.short}: {rule} ({bad.short})")

    def start(self, good: Commit, bad: Commit) -> tuple[Commit, ...]:
        """Begin between two commits; return as `mark` does."""
        between = _git(self.path, "rev-list", "--reverse", "--topo-order", f"{good.sha}..{bad.sha}")
        self._order = between.split()
        return self._read(_git(self.path, "bisect", "start", bad.sha, good.sha))

    def mark(self, mark: Mark) -> tuple[Commit, ...]:
        """Mark the commit that is checked out; return the suspects, or () if the search
        continues."""
        self._clean()
        return self._read(_git(self.path, "bisect", str(mark), allowed=2))

    @property
    def head(self) -> Commit:
        """Return the commit that is checked out."""
        return self.describe("HEAD")

    def _read(self, text: str) -> tuple[Commit, ...]:
        for number, line in enumerate(text.splitlines()):
            if line.endswith("is the first bad commit"):
                return (self.describe(line.split()[0]),)
            if line.startswith("The first bad commit could be any of"):
                names = set(text.splitlines()[number + 1 :])
                return tuple(self.describe(name) for name in self._order if name in names)
        return ()


def _git(folder: Path, *arguments: str, allowed: int = 0) -> str:
    """Return the output of git. Raises UsageError if the exit code is neither 0 nor `allowed`."""
    # The output is parsed, so it must be English, and without the user's hooks and variables.
    env = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    env |= {"LC_ALL": "C", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false"]
    try:
        done = subprocess.run(  # noqa: S603 - git, with names that it checks itself
            [*command, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UsageError(f"git cannot be run in {folder}: {error.strerror}; is it there?") from None
    if done.returncode not in (0, allowed):
        output = " ".join((done.stderr or done.stdout).split())
        raise UsageError(f"{folder}: git {arguments[0]} says: {output}")
    return done.stdout


def bisect(
    options: CheckOptions,
    names: tuple[str, str],
    program: Program | None = None,
    event_seconds: float = EVENT_SECONDS,
    on_progress: Callable[[CheckResult], None] = lambda _result: None,
    on_step: Callable[[Step], None] = lambda _step: None,
) -> Bisection:
    """Find the first bad commit of the repository at `options.path` between two named commits.

    Without a program, a check with these options finds one at the bad commit; `on_progress` is
    called with its results, `on_step` with each commit that was tried.

    Raises:
        UsageError: no such repository or commits, or the program does not distinguish them.
        HarnessError: if a check itself failed.
    """
    assert options.path is not None
    with tempfile.TemporaryDirectory(prefix="blockstep-bisect-") as folder:
        clone = Clone(Path(options.path), Path(folder))
        good, bad = clone.find(names[0]), clone.find(names[1])
        clone.require_order(good, bad)
        place = replace(options, path=str(clone.path))
        clone.check_out(bad)
        with Isolation(event_seconds) as isolation:
            question = _ask(isolation, place, bad, program, on_progress)
        found = Bisection(options, question, good, bad)
        clone.check_out(good)
        mark, why = _try(place, question, event_seconds)
        if mark is not Mark.GOOD:
            what = why or f"it is bad already: {name_finding(question.finding)}"
            raise UsageError(f"good commit {good.short}: {what}; name an earlier or another one")
        found.suspects = clone.start(good, bad)
        while not found.suspects:
            step = Step(clone.head, *_try(place, question, event_seconds))
            found.steps.append(step)
            on_step(step)
            found.suspects = clone.mark(step.mark)
    return found


def _ask(
    isolation: Isolation,
    options: CheckOptions,
    bad: Commit,
    program: Program | None,
    on_progress: Callable[[CheckResult], None],
) -> Question:
    """Return the program and its failure at the bad commit, which is checked out."""
    try:
        if program is not None:
            result = isolation.run(options, program)
        else:
            result = isolation.check(options, on_progress)
    except (EngineNotFoundError, RefusedError) as error:
        raise UsageError(f"bad commit {bad.short}: {error}") from None
    first, failure = result.first, result.failure
    if first is None:
        fix = "give a longer --budget, or a program that fails there (--program)"
        fix = fix if program is None else "give a program that fails there"
        raise UsageError(f"bad commit {bad.short}: nothing is wrong there; {fix}")
    if failure is not None:
        return Question(failure.program, (failure.findings or (first,))[0])
    program = program or result.failing_program
    if program is None:
        fix = "give a program that shows it (--program)"
        raise UsageError(f"bad commit {bad.short}: {first.message}, in no program; {fix}")
    return Question(program, first)


def _try(options: CheckOptions, question: Question, seconds: float) -> tuple[Mark, str]:
    """Return the verdict on the commit that is checked out, and the reason if it is skipped."""
    with Isolation(seconds) as isolation:
        try:
            return question.mark(isolation.run(options, question.program))
        except (EngineNotFoundError, RefusedError) as error:
            return Mark.SKIP, str(error)
