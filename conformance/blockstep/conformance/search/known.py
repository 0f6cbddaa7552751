"""Known findings: saved programs whose failures a check or a hunt suppresses.

Each program is played at the start. A program that does not fail any more is reported.
A later failure is freed of the means that it can do without and shrunk. It is known if one of the
programs accounts for it (`KnownProgram.accounts_for`). After `PATIENCE` known failures in a row of
one message that need the same client actions, a further one counts as known and is not shrunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import SUFFIX, read_program
from blockstep.conformance.protocol.trace_lines import TraceError
from blockstep.conformance.search import hunt_jobs
from blockstep.conformance.search.call import Call
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.dedup import (
    FailureSignature,
    Symptoms,
    describe_crash,
    describe_failure,
)
from blockstep.conformance.search.defects import Defect, group_failures
from blockstep.conformance.search.episodes import EpisodeResult, Loss
from blockstep.conformance.search.isolation import LostError, RefusedError
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.suppressions import KnownCause
from blockstep.spec.profiles import Quirk
from blockstep.spec.vocabulary import ConfigError


def find_programs(folder: Path) -> list[Path]:
    """Return the program files of a folder and its subfolders, sorted by name.

    Raises:
        TraceError: there is no such folder, or no program in it.
    """
    found = sorted(folder.rglob(f"*{SUFFIX}"))
    if not found:
        what = "no program in it" if folder.is_dir() else "there is no such folder"
        rule = f"a corpus is a folder of programs, files that end in {SUFFIX}"
        fix = "put files of check --save there, or name none until there is one"
        raise TraceError(folder, 0, what, rule, fix)
    return found


PATIENCE = 6
"""Known failures in a row, of one message and the same client actions, after which the next is not
shrunk."""


def read_known(path: Path) -> dict[str, Program]:
    """Return the programs of a file or a folder, folders in it included, by the name of their file.

    Raises:
        TraceError: a file holds no program, or there is none.
    """
    files = [path] if path.is_file() else find_programs(path)
    return {str(file): read_program(file) for file in files}


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A known program and its defect."""

    name: str
    defect: Defect | None
    """None if it does not fail."""
    why_untried: str = ""
    """Why it could not be played on this engine; "" if it was."""

    def accounts_for(self, found: Defect) -> bool:
        """Return whether a failure is this program's defect: the same one by its mark, or its
        symptom."""
        if self.defect is None:
            return False
        mine, mark = self.defect.symptoms, found.symptoms.own
        if mine.own.is_like(mark):
            onward = {it.message for it in mine.onward | mine.beside}
            return mine.own.accounts_for(mark) or mark.message in onward - {mine.own.message}
        return len(group_failures([self.defect, found])) == 1

    def is_one_of(self, defects: Sequence[Defect]) -> bool:
        """Return whether its failure is one of `defects`, or has the same causes as one of them."""
        mine = self.defect
        return mine is not None and any(
            it is mine or (bool(it.causes) and it.causes == mine.causes) for it in defects
        )


def play_known(
    options: CheckOptions,
    call: Call,
    programs: Mapping[str, Program],
    forgiven: frozenset[KnownCause] | None = None,
    quirks: Sequence[Quirk] = (),
) -> list[KnownProgram]:
    """Play known programs and return the results; other arguments as of
    `hunt_jobs.analyse_failure`."""
    played = []
    for name, program in programs.items():
        asked = replace(options, program=name)
        try:
            dug = call(hunt_jobs.dig_program, asked, forgiven, quirks, program)
        except LostError as lost:
            played.append(KnownProgram(name, describe(asked, loss=lost.loss)))
        except (ConfigError, RefusedError) as error:
            played.append(KnownProgram(name, None, str(error)))
        else:
            why = dug if isinstance(dug, str) else ""
            found = describe(asked, dug) if isinstance(dug, hunt_jobs.FailureAnalysis) else None
            played.append(KnownProgram(name, found, why))
    return played


def describe(
    options: CheckOptions, dug: hunt_jobs.FailureAnalysis | None = None, loss: Loss | None = None
) -> Defect:
    """Return a failure as a defect for `group_failures`; `loss` is given if the engine was lost."""
    if dug is None:
        assert loss is not None
        symptoms = Symptoms(FailureSignature(describe_crash(loss.message)))
        return Defect((), loss.finding, options, 0, 0, len(loss.events), symptoms, loss=loss)
    symptoms = dug.symptoms or Symptoms(FailureSignature(describe_failure(dug.first)))
    length = len(dug.shrunk.program.actions)
    found = Defect(dug.causes, dug.first, options, 0, length, dug.shrunk.num_events, symptoms)
    return replace(found, shrunk=dug.shrunk, raised_at=dug.raised_at)


def count_by_file(
    played: Sequence[KnownProgram], counts: Mapping[str, int]
) -> dict[str, int | None]:
    """Return the number of failures of the defect of each program, by its file; None if the program
    does not fail."""
    return {
        it.name: None if it.defect is None else counts.get(it.name, 0)
        for it in played
        if not it.why_untried
    }


def list_untried(played: Sequence[KnownProgram]) -> list[str]:
    """Return the programs that could not be played, each with the reason."""
    return [f"{it.name}: {it.why_untried}" for it in played if it.why_untried]


class KnownFindings:
    """The known programs of one check, and the number of failures of each one's defect."""

    def __init__(self, options: CheckOptions, call: Call, programs: Mapping[str, Program]) -> None:
        self._call = call
        self.played = play_known(options, call, programs)
        self.counts: Counter[str] = Counter()
        """Suppressed failures, by the name of the program."""
        self._in_a_row: Counter[tuple[str, frozenset[str]]] = Counter()
        """Known failures in a row, by their message and the acts that they need."""
        self._last: dict[tuple[str, frozenset[str]], str] = {}
        """The known program of the last failure of each message and acts."""

    def conclude(self, result: CheckResult) -> None:
        """Put into a result the suppressed failures of each program, and why programs were not
        played."""
        result.known_programs = count_by_file(self.played, self.counts)
        result.skipped.update(list_untried(self.played))

    def pass_over(self, options: CheckOptions, episode: EpisodeResult) -> EpisodeResult:
        """Return a failed episode as passed if a known program accounts for it; else the failure to
        report. A known failure is counted."""
        acts = frozenset[str]()
        if episode.loss is None:
            with suppress(LostError):
                episode, acts = self._call(hunt_jobs.relax_failure, options, episode)
        kind = _get_message(episode), acts
        is_taken_for_known = self._in_a_row[kind] >= PATIENCE
        name = self._last[kind] if is_taken_for_known else self._find(options, episode)
        if name is None:
            self._in_a_row[kind] = 0
            return episode
        self._in_a_row[kind] += 1
        self._last[kind] = name
        self.counts[name] += 1
        return replace(episode, first=None, program=None, loss=None)

    def shows(self, result: CheckResult) -> bool:
        """Return whether the failure that a result shows is that of a known program."""
        if result.loss is not None or result.failure is None or result.first is None:
            return False
        program, first = result.failure.program, result.first
        shown = EpisodeResult(0, 0, {}, {}, {}, {}, True, program=program, first=first)
        return self._find(result.options, shown) is not None

    def _find(self, options: CheckOptions, episode: EpisodeResult) -> str | None:
        if episode.loss is not None:
            found = describe(options, loss=episode.loss)
        else:
            try:
                dug = self._call(hunt_jobs.analyse_failure, options, None, (), episode)
            except LostError as lost:
                found = describe(options, loss=lost.loss)
            else:
                found = describe(options, dug)
        return next((it.name for it in self.played if it.accounts_for(found)), None)


def _get_message(episode: EpisodeResult) -> str:
    if episode.loss is not None:
        return describe_crash(episode.loss.message)
    assert episode.first is not None
    return describe_failure(episode.first)
