"""Isolation: a check, or one program, in a process of its own, which may hang or die.

    parent  -- jobs ---------------->  child: spec, worker and properties beside a watched engine
            <- messages, JSON lines -
            <- journal, a text file -         every event, before the engine is given it

The engine has control while the last line of the journal has no end. A child whose engine keeps
control for too long is killed, and what the journal says is the program so far. Spec and engine
share the child, so that nothing but text crosses a border and a run is as fast as without it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, TextIO, TypeAlias

from rich.console import Console

from blockstep.conformance.check import CheckOptions, CheckResult, ExitCode, check, find_profile
from blockstep.conformance.driver import LockStep, run_program
from blockstep.conformance.engine import Engine, EngineFactory
from blockstep.conformance.findings import Finding, FindingKind
from blockstep.conformance.program import Program, describe, describe_event
from blockstep.conformance.registry import EngineNotFoundError, load_engine
from blockstep.conformance.report.failure import (
    HEADLINES,
    NOT_AGAIN,
    WIDTH,
    describe_config,
    render_failure,
    reproduce,
)
from blockstep.conformance.report.jsonform import check_to_json, finding_to_json
from blockstep.conformance.report.verdict import render_verdict
from blockstep.conformance.shrink import Shrunk
from blockstep.spec.profiles import STRICT
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    ConfigError,
    Drafts,
    Event,
    Observation,
    Snapshot,
)

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

EVENT_SECONDS = 10.0
"""An engine may keep control for so long, unless told otherwise."""
BUILD_SECONDS = 120.0
"""The same while it is imported or built, which may bring half of a framework."""
LINES_MAX = 60
"""Events of a program that was not shrunk that are shown, at most; the last ones."""
LAST_WORDS_MAX = 12
"""Lines of the child's standard error that are shown, at most."""
DUMPS = ("Fatal Python error", "Windows fatal exception", "Current thread", "Stack (most")
"""How faulthandler begins to say where a thread is."""
WATCHED = "blockstep_watched_engine"
"""Name of the module, made in the child, that holds the factory of the watched engine."""
INDENT = " " * 14
ASIDE = "("
"""How a line of the journal begins that is not an event."""

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check came to: its JSON (docs/reference/json.md) and its words for people."""

    check: Json
    text: str


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What one program came to."""

    text: str
    """What is wrong; "" if nothing."""
    skipped: dict[str, int]
    """Actions not tried, by the capability that the engine lacks."""


@dataclass(frozen=True, slots=True)
class CheckJob:
    """To be done in the child: a check."""

    options: CheckOptions


@dataclass(frozen=True, slots=True)
class ProgramJob:
    """To be done in the child: one program."""

    engine: str
    program: Program
    profile: str = STRICT.name


class HarnessError(Exception):
    """The child failed for a reason that is not the engine's."""


# The child.


class Journal:
    """What the engine is doing, written before it does it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.num_runs = 0
        """Engines whose state was asked for: what `is_async` builds is never run."""

    def clear(self) -> None:
        """Another job."""
        os.ftruncate(self._file, 0)
        self.num_runs = 0

    def begin(self, config: Config) -> None:
        """Forget the last engine; another one is about to be built."""
        os.ftruncate(self._file, 0)
        self._write(json.dumps([self.num_runs + 1, describe_config(config)]) + "\n")

    def enter(self, what: str) -> None:
        """The engine gets control."""
        self._write(what.replace("\n", " "))

    def leave(self) -> None:
        """The engine gave it back."""
        self._write("\n")

    def _write(self, text: str) -> None:
        os.write(self._file, text.encode(errors="replace"))


class WatchedEngine:
    """An engine whose every call is in the journal before it is made.

    A call that ends otherwise than by returning or raising an `Exception` never leaves.
    """

    def __init__(self, engine: Engine, watched: WatchedFactory) -> None:
        self._engine = engine
        self._watched = watched
        self._is_running = False

    def apply(self, event: Event) -> Observation:
        """As the engine does."""
        with self._watched.calling(say(event)):
            return self._engine.apply(event)

    def snapshot(self) -> Snapshot | None:
        """As the engine does; the first one counts the run."""
        self._watched.journal.num_runs += not self._is_running
        self._is_running = True
        with self._watched.calling("(showing its state)"):
            return self._engine.snapshot()

    def capabilities(self) -> frozenset[str]:
        """As the engine does."""
        with self._watched.calling("(naming its capabilities)"):
            return self._engine.capabilities()


class WatchedFactory:
    """A factory of watched engines; declares whatever equivalence the engine's own declares."""

    def __init__(self, make_engine: EngineFactory, journal: Journal) -> None:
        self._make_engine = make_engine
        self.journal = journal
        self.error: Exception | None = None
        """What the engine raised last."""
        if hasattr(make_engine, "equivalence"):
            self.equivalence = make_engine.equivalence

    def __call__(self, config: Config) -> WatchedEngine:
        """Build one."""
        self.journal.begin(config)
        with self.calling("(being built)"):
            return WatchedEngine(self._make_engine(config), self)

    def calling(self, what: str) -> _Call:
        """Around a call of the engine."""
        return _Call(self, what)


class _Call:
    """A context manager without a generator: it is entered twice for every event."""

    __slots__ = ("_watched", "_what")

    def __init__(self, watched: WatchedFactory, what: str) -> None:
        self._watched = watched
        self._what = what

    def __enter__(self) -> None:
        self._watched.journal.enter(self._what)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            self._watched.error = error
        elif error is not None:
            return
        self._watched.journal.leave()


def say(event: Event) -> str:
    """One line for an event as the engine gets it, however malformed."""
    try:
        return describe_event(event) if isinstance(event, Commit | Drafts) else describe(event)
    except Exception:  # describe() trusts a request to be one
        return repr(event)[:100]


def serve(folder: str) -> None:
    """Do jobs from standard input until it ends; in the child only, and never returns.

    The engine's own output goes to standard error, and its standard input is empty.
    """
    jobs: queue.SimpleQueue[CheckJob | ProgramJob] = queue.SimpleQueue()
    source = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123 - until the end
    os.dup2(sys.stdin.fileno(), 0)
    os.dup2(2, 1)
    faulthandler.enable(all_threads=False)
    if sys.platform != "win32":
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_take_jobs, args=(source, jobs), daemon=True).start()
    journal = Journal(Path(folder) / "journal")
    try:
        while True:
            _send(answers, _do(jobs.get(), journal, answers))
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _take_jobs(source: BinaryIO, jobs: queue.SimpleQueue[CheckJob | ProgramJob]) -> None:
    """A thread, so that the child ends with its parent even while its engine hangs."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.put(pickle.load(source))  # noqa: S301 - written by our own parent
    os._exit(0)


def _send(answers: TextIO, message: Json) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _do(job: CheckJob | ProgramJob, journal: Journal, answers: TextIO) -> Json:
    """The last message about a job."""
    journal.clear()
    watched: WatchedFactory | None = None
    try:
        engine = job.options.engine if isinstance(job, CheckJob) else job.engine
        journal.enter("(being imported)")
        make_engine = load_engine(engine)
        journal.leave()
        watched = WatchedFactory(make_engine, journal)
        if isinstance(job, ProgramJob):
            return _do_program(job, watched)
        return _do_check(job, watched, answers)
    except EngineNotFoundError as error:
        return {"kind": "not found", "message": str(error)}
    except ConfigError as error:
        return {"kind": "config", "message": str(error)}
    except Exception as error:
        if watched is None or error is watched.error:
            traceback.print_exc()
            return {"kind": "raised", "message": f"{type(error).__name__}: {error}"}
        return {"kind": "harness", "message": traceback.format_exc()}


def _do_check(job: CheckJob, watched: WatchedFactory, answers: TextIO) -> Json:
    module = ModuleType(WATCHED)
    vars(module)["make"] = watched
    sys.modules[WATCHED] = module

    def tell(result: CheckResult) -> None:
        plain = replace(result, options=job.options)
        told = {
            "kind": "progress",
            "check": check_to_json(plain),
            "runs": watched.journal.num_runs,
            "failed_episode": result.failed_episode,
            "first": None if result.first is None else finding_to_json(result.first),
        }
        _send(answers, told)
        if result.first is not None:
            outcome = _to_outcome(_with_program_as_it_is(result, watched), job)
            _send(answers, told | {"check": outcome.check, "text": outcome.text})

    result = check(replace(job.options, engine=f"{WATCHED}:make"), tell)
    if result.first is not None and result.failure is None:
        result = _with_program_as_it_is(result, watched)
    outcome = _to_outcome(result, job)
    return {"kind": "result", "check": outcome.check, "text": outcome.text}


def _with_program_as_it_is(result: CheckResult, watched: WatchedFactory) -> CheckResult:
    """The result with a failure in it that was not shrunk.

    Shrinking may end this process. And it finds nothing to shrink if the engine failed once and
    will not again.
    """
    assert result.first is not None
    assert result.failing_program is not None
    program = result.failing_program
    run, findings = run_program(program, watched, find_profile(result.options.profile))
    return replace(result, failure=Shrunk(program, run, findings, 0))


def _to_outcome(result: CheckResult, job: CheckJob) -> Outcome:
    options = replace(result.options, engine=job.options.engine)
    result = replace(result, options=options)
    failure, program = result.failure, result.failing_program
    if failure is None or program is None:
        words = StringIO()
        render_verdict(result, Console(file=words, width=100, highlight=False))
        _, canary, rest = words.getvalue().rpartition("\ncanary ")
        return Outcome(check_to_json(result), f"{canary.lstrip()}{rest}")
    assert result.first is not None
    note = "" if failure.findings else f"\n  {NOT_AGAIN}\n"
    failure = replace(failure, findings=failure.findings or [result.first])
    result = replace(result, failure=failure)
    text = render_failure(failure, options, result.failed_episode or 0, len(program.actions))
    return Outcome(check_to_json(result), text + note)


def _do_program(job: ProgramJob, watched: WatchedFactory) -> Json:
    run, findings = run_program(job.program, watched, find_profile(job.profile))
    text = render_program(job.engine, job.program, run, findings) if findings else ""
    return {"kind": "program", "text": text, "skipped": run.skipped}


def render_program(engine: str, program: Program, run: LockStep, findings: list[Finding]) -> str:
    """The face of a failure of a program that somebody wrote: no preset, no seed, not shrunk."""
    options = CheckOptions(engine=engine)
    shrunk = Shrunk(program, run, findings, 0)
    lines = render_failure(shrunk, options, 0, len(program.actions)).splitlines()
    headline = HEADLINES[findings[0].kind]
    lines[0] = f"blockstep: {headline} at event {run.num_events} (engine {engine})"
    lines = ["  program" if line.startswith("  program ") else line for line in lines]
    return "\n".join(lines[:-2]) + "\n"


# The parent.


@dataclass(frozen=True, slots=True)
class _Loss:
    """What became of a child, or of an engine that could not even be built."""

    message: str
    run: int = 0
    """Number of the run in its job, from 1; 0 before the first."""
    config: str = ""
    events: tuple[str, ...] = ()
    last_words: tuple[str, ...] = ()


class _LostError(Exception):
    """The child is gone, or its engine is of no use."""

    def __init__(self, loss: _Loss) -> None:
        super().__init__(loss.message)
        self.loss = loss


class Isolation:
    """A child that does one job after another; a new one follows where it had to be killed."""

    def __init__(self, event_seconds: float = EVENT_SECONDS, path: Sequence[str] = ()) -> None:
        """`path` is looked in first for the engine, then where this process looks."""
        self._event_seconds = event_seconds
        self._path = [*path, *sys.path]
        self._folder = tempfile.TemporaryDirectory(prefix="blockstep-")
        self._journal = Path(self._folder.name) / "journal"
        self._errors = Path(self._folder.name) / "stderr"
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._progress: Json | None = None

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and forget everything about it."""
        self._stop()
        self._folder.cleanup()

    def check(self, options: CheckOptions) -> Outcome:
        """Check an engine, as `check.check` does; all in one child, so `jobs` is 1.

        Raises:
            EngineNotFoundError: if the engine cannot be loaded.
            HarnessError: if the check itself failed.
        """
        try:
            message = self._ask(CheckJob(replace(options, jobs=1)))
        except _LostError as lost:
            return _outcome_of_loss(options, lost.loss, self._progress)
        return Outcome(message["check"], message["text"])

    def run(self, engine: str, program: Program, profile: str = STRICT.name) -> ProgramOutcome:
        """Run one program, as `driver.run_program` does.

        Raises:
            EngineNotFoundError: if the engine cannot be loaded.
            ValueError: if the engine cannot be built with the config of the program.
            HarnessError: if the run itself failed.
        """
        try:
            message = self._ask(ProgramJob(engine, program, profile))
        except _LostError as lost:
            return ProgramOutcome(_face("blockstep", f"engine {engine}", lost.loss), {})
        return ProgramOutcome(message["text"], message["skipped"])

    def _ask(self, job: CheckJob | ProgramJob) -> Json:
        """The last message about a job."""
        self._progress = None
        try:
            child = self._child or self._start()
            assert child.stdin is not None
            with contextlib.suppress(OSError):  # a dead child answers nothing, and that is noticed
                pickle.dump(job, child.stdin)
                child.stdin.flush()
            while (message := self._next_message(child))["kind"] == "progress":
                self._progress = message
        except BaseException:
            self._stop()
            raise
        match message["kind"]:
            case "not found":
                raise EngineNotFoundError(message["message"])
            case "config":
                raise ValueError(message["message"])
            case "harness":
                raise HarnessError(message["message"])
            case "raised":
                raise _LostError(self._read_loss(f"the engine raised {message['message']}"))
        return message

    def _start(self) -> subprocess.Popen[bytes]:
        """A fresh interpreter, not a fork: nothing of this process is in the engine's way."""
        code = (
            f"import sys; sys.path[:] = {self._path!r}; "
            f"from blockstep.conformance.isolation import serve; serve({self._folder.name!r})"
        )
        self._journal.unlink(missing_ok=True)
        with self._errors.open("wb") as errors:
            child = subprocess.Popen(  # noqa: S603 - our own interpreter, our own code
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._lines = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read_lines, args=(child, self._lines), daemon=True)
        self._reader.start()
        self._child = child
        return child

    def _next_message(self, child: subprocess.Popen[bytes]) -> Json:
        """The next message; raises `_LostError` if none can be waited for any more."""
        since, before = time.monotonic(), self._look()
        while True:
            has_ended = child.poll() is not None
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=min(0.2, self._event_seconds / 10))
                if line is not None:
                    message: Json = json.loads(line)
                    return message
                has_ended = True
            if has_ended:
                raise _LostError(self._read_loss(_say_how_it_ended(child.wait())))
            if (now := self._look()) != before:
                since, before = time.monotonic(), now
                continue
            seconds = self._get_limit(_last_line(now[1]))
            if seconds is not None and time.monotonic() - since > seconds:
                self._ask_where(child)
                raise _LostError(self._read_loss(f"the engine gave no answer within {seconds:g} s"))

    def _look(self) -> tuple[int, bytes]:
        """When the journal was written last, and how it ends."""
        try:
            with self._journal.open("rb") as journal:
                state = os.fstat(journal.fileno())
                journal.seek(max(state.st_size - 4096, 0))
                return state.st_mtime_ns, journal.read()
        except FileNotFoundError:
            return 0, b""

    def _get_limit(self, line: str | None) -> float | None:
        """For how long the engine may do this; None if it does nothing."""
        if line is None:
            return None
        is_slow = line in {"(being imported)", "(being built)"}
        return max(self._event_seconds, BUILD_SECONDS) if is_slow else self._event_seconds

    def _ask_where(self, child: subprocess.Popen[bytes]) -> None:
        """Have a hanging child write where it is to its standard error."""
        if sys.platform != "win32":
            child.send_signal(signal.SIGUSR1)
            time.sleep(0.2)

    def _read_loss(self, how: str) -> _Loss:
        text = self._journal.read_text(errors="replace") if self._journal.is_file() else ""
        last_words = _find_last_words(self._errors.read_text(errors="replace"))
        header, _, rest = text.partition("\n")
        if not header.startswith("["):
            where = header.rstrip()
            return _Loss(f"{how}{_say_where(where)}", last_words=last_words)
        run, config = json.loads(header)
        lines = rest.split("\n")
        where = lines[-1] or (lines[-2] if "raised" in how and len(lines) > 1 else "")
        events = tuple(line for line in lines if line and not line.startswith(ASIDE))
        return _Loss(f"{how}{_say_where(where)}", run, config, events, last_words)

    def _stop(self) -> None:
        """Kill the child with all that it has started."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                child.kill()
            else:
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        if self._reader is not None:
            self._reader.join()
        child.stdout.close()


def _read_lines(child: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def _last_line(text: bytes) -> str | None:
    """The unfinished last line: what the engine is doing; None if it does nothing."""
    line = text.rpartition(b"\n")[2]
    return line.decode(errors="replace") if line else None


def _find_last_words(errors: str) -> tuple[str, ...]:
    """What standard error says about the end: the engine's own frames, or else its last lines."""
    lines = [line for line in errors.splitlines() if line.strip()]
    dumps = [number for number, line in enumerate(lines) if line.startswith(DUMPS)]
    if not dumps:
        return tuple(lines[-LAST_WORDS_MAX:])
    words = lines[dumps[0] :]
    ours = [number for number, line in enumerate(words) if f'"{__file__}"' in line]
    return tuple(words[: min([LAST_WORDS_MAX, *ours])])


def _say_how_it_ended(code: int) -> str:
    if code >= 0:
        return f"the engine's process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"the engine's process was ended by {name}"


def _say_where(line: str) -> str:
    if not line:
        return " between two calls"
    if line.startswith(ASIDE):
        return f" while {line[1:-1]}"
    return f" at: {' '.join(line.split())}"


def _outcome_of_loss(options: CheckOptions, loss: _Loss, progress: Json | None) -> Outcome:
    """A finding of kind FAULT; behind what had been found already, if anything had."""
    told = finding_to_json(
        Finding(FindingKind.FAULT, "", "engine_answers_every_call", loss.message)
    )
    base: Json = check_to_json(CheckResult(options)) if progress is None else progress["check"]
    base |= {"exit_code": int(ExitCode.FAILED), "conforms": False}
    if progress is not None and base["failure"] is not None:
        base["failure"]["findings"].append(told)
        text = f"{progress['text']}\n  then, while this was being shrunk: {loss.message}\n"
        return Outcome(base, text)
    first = None if progress is None else progress["first"]
    episode = _find_episode(loss, progress)
    again = reproduce(options, episode)
    base["num_events"] += len(loss.events)
    base["failure"] = {
        "episode": episode,
        "event": len(loss.events),
        "findings": [told] if first is None else [first, told],
        "config": loss.config,
        "program": list(loss.events),
        "num_shrink_runs": 0,
        "reproduce": again,
    }
    where = f"engine {options.engine}, preset {options.preset}, seed {options.seed}"
    text = _face("blockstep check", where, loss)
    if first is not None:
        name = f"{first['property'] or first['kind']} {first['sentence']}"
        text += f"\n  seen in the same episode before: {name}: {first['message']}\n"
    return Outcome(base, f"{text}\n  reproduce  {again}\n")


def _find_episode(loss: _Loss, progress: Json | None) -> int:
    """The episode in which a child was lost: each is one run, until something is found."""
    if progress is None:
        return max(loss.run - 1, 0)
    if progress["failed_episode"] is not None:
        return int(progress["failed_episode"])
    return int(progress["check"]["num_episodes"] + max(loss.run - progress["runs"] - 1, 0))


def _face(command: str, where: str, loss: _Loss) -> str:
    """The face of a failure (see `report.failure`) that nobody lived to shrink."""
    headline = HEADLINES[FindingKind.FAULT]
    lines = [
        f"{command}: {headline} at event {len(loss.events)} ({where})",
        "",
        "  fault       engine_answers_every_call",
        *textwrap.wrap(loss.message, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT),
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
    return "\n".join(line.rstrip() for line in lines) + "\n"


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a lock that all processes of this machine know by its path, and that dies with us.

    Without `wait`, whether it could be had is said, and nothing is held if not.
    """
    with path.open("ab") as file:
        while not (is_held := _lock(file.fileno())) and wait:
            time.sleep(0.1)
        yield is_held


def _lock(file: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
