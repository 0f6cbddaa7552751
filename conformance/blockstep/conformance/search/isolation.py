"""Isolation: an engine in a process of its own, which may hang or die.

    parent  -- jobs, pickled ------->  child: spec, worker and properties beside a watched engine
            <- answers, pickled -----
            <- journal, a text file -         every event, before the engine is given it

The engine has control while the last line of the journal has no end. A child whose engine keeps
control for too long is killed, and what the journal says is the program so far. Spec and engine
share the child, so that no event crosses a border and a run is as fast as without it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias, TypeVar, TypeVarTuple, cast

from blockstep.conformance.engine import Engine, EngineFactory, get_declines, get_judged, get_traits
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Program, describe, describe_event
from blockstep.conformance.protocol.registry import EngineNotFoundError
from blockstep.conformance.recorded.traces import TraceError, write_trace
from blockstep.conformance.report.failure import (
    HEADLINES,
    WIDTH,
    describe_config,
    render_failure,
    reproduce,
    tell_failure,
)
from blockstep.conformance.report.jsonform import failure_to_json, finding_to_json
from blockstep.conformance.search.check import CheckResult, search, see_again, shrink_first
from blockstep.conformance.search.episodes import EpisodeResult, Told, record_episode, run_episode
from blockstep.conformance.search.floor import Facts, look
from blockstep.conformance.search.options import CheckOptions, find_profile, load
from blockstep.conformance.search.shrink import Shrunk
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
"""The same while it is imported or built, which may bring half of a framework.

And between two calls, where no engine has any business, but may have left something that hangs.
"""
LINES_MAX = 60
"""Events of a program that was not shrunk that are shown, at most; the last ones."""
LAST_WORDS_MAX = 12
"""Lines of the child's standard error that are shown, at most."""
JOURNAL_BYTES = 1 << 16
"""Length of a journal at first."""
LOOKS_PER_SECOND = 5.0
"""How often a journal is looked at, at least."""
DUMPS = ("Fatal Python error", "Windows fatal exception", "Current thread", "Stack (most")
"""How faulthandler begins to say where a thread is."""
INDENT = " " * 14
ASIDE = "("
"""How a line of the journal begins that is not an event."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Job: TypeAlias = tuple[Callable[..., object], CheckOptions, tuple[object, ...]]
"""To be done in a child: a function, and what it is given beside the engine."""
Answer: TypeAlias = tuple[str, Any]
"""`done` and a value, or what went wrong and how it is said."""


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What one program came to."""

    text: str
    """What is wrong; "" if nothing."""
    skipped: dict[str, int]
    """Actions not tried, by the capability that the engine lacks."""


class HarnessError(Exception):
    """The child failed for a reason that is not the engine's."""


class RefusedError(ValueError):
    """Bad input, in the words of who refused it in the child."""


# The child.


class Journal:
    """What the engine is doing, written before it does it.

    The file is mapped into memory, so that a line costs no call of the system, and is there for
    the parent all the same when this process is killed. Behind its end are zeros.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._num_begun = 0
        self._end = 0
        self._grow(JOURNAL_BYTES)

    def begin(self, header: str = "") -> None:
        """Forget all there is: another job, or another engine, of which this is the config.

        The number makes two beginnings differ, however alike they are.
        """
        self._map[: self._end] = bytes(self._end)
        self._end = 0
        self._num_begun += 1
        self._write(json.dumps([self._num_begun, header]) + "\n")

    def enter(self, what: str) -> None:
        """The engine gets control."""
        self._write(what.replace("\n", " "))

    def leave(self) -> None:
        """The engine gave it back."""
        self._write("\n")

    def _write(self, text: str) -> None:
        told = text.encode(errors="replace")
        end = self._end + len(told)
        if end > len(self._map):
            self._grow(2 * end)
        self._map[self._end : end] = told
        self._end = end

    def _grow(self, num_bytes: int) -> None:
        os.ftruncate(self._file, num_bytes)
        self._map = mmap.mmap(self._file, num_bytes)


class WatchedEngine:
    """An engine whose every call is in the journal before it is made.

    A call that ends otherwise than by returning or raising an `Exception` never leaves.
    """

    def __init__(self, engine: Engine, watched: WatchedFactory) -> None:
        self._engine = engine
        self._watched = watched
        self.judges = watched.call("(naming what it judges)", get_judged, engine)
        self._declines = get_declines(engine)

    def declines(self, event: Event) -> str | None:
        """As the engine does."""
        if self._declines is None:
            return None
        return self._watched.call("(saying what it declines)", self._declines, event)

    def apply(self, event: Event) -> Observation:
        """As the engine does."""
        return self._watched.call(say(event), self._engine.apply, event)

    def snapshot(self) -> Snapshot | None:
        """As the engine does."""
        return self._watched.call("(showing its state)", self._engine.snapshot)

    def capabilities(self) -> frozenset[str]:
        """As the engine does."""
        return self._watched.call("(naming its capabilities)", self._engine.capabilities)


class WatchedFactory:
    """A factory of watched engines; says of them what the engine's own says."""

    def __init__(self, make_engine: EngineFactory, journal: Journal) -> None:
        self._make_engine = make_engine
        self.traits = get_traits(make_engine)
        self.journal = journal
        self.error: Exception | None = None
        """What the engine raised last."""

    def __call__(self, config: Config) -> WatchedEngine:
        """Build one."""
        self.journal.begin(describe_config(config))
        return WatchedEngine(self.call("(being built)", self._make_engine, config), self)

    def call(self, what: str, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """What a function of the engine returns, or raises."""
        self.journal.enter(what)
        try:
            value = function(*args)
        except Exception as error:
            self.error = error
            self.journal.leave()
            raise
        self.journal.leave()
        return value


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
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    source = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
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
            for answer in _do(jobs.get(), journal):
                answers.write(pickle.dumps(answer))
                answers.flush()
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _take_jobs(source: BinaryIO, jobs: queue.SimpleQueue[Job]) -> None:
    """A thread, so that the child ends with its parent even while its engine hangs."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.put(pickle.load(source))  # noqa: S301 - written by our own parent
    os._exit(0)


def _do(job: Job, journal: Journal) -> Iterator[Answer]:
    """The answers to a job, of which the last one is no `part`."""
    function, options, args = job
    os.ftruncate(2, 0)
    journal.begin()
    watched: WatchedFactory | None = None
    try:
        journal.enter("(being imported)")
        make_engine = load(options)
        journal.leave()
        watched = WatchedFactory(make_engine, journal)
        value = function(options, watched, *args)
        if isinstance(value, Iterator):
            for part in value:
                yield "part", part
            value = None
        yield "done", value
    except EngineNotFoundError as error:
        yield "not found", str(error)
    except (ConfigError, TraceError) as error:
        yield "refused", str(error)
    except Exception as error:
        if watched is None or error is watched.error:
            traceback.print_exc()
            yield "raised", f"{type(error).__name__}: {error}"
        else:
            yield "harness", traceback.format_exc()


def _play(
    options: CheckOptions, make_engine: EngineFactory, indices: Sequence[int]
) -> Iterator[EpisodeResult]:
    for index in indices:
        episode = run_episode(options, index, make_engine)
        yield replace(episode, skipped=_plain(episode.skipped))
        if episode.first is not None:
            return


def _plain(skipped: dict[str, int]) -> dict[str, int]:
    """Counts by names that are nothing but text: an engine may name a defect with a type of its."""
    return {str(name): count for name, count in skipped.items()}


def _shrink(_options: CheckOptions, make_engine: EngineFactory, result: CheckResult) -> CheckResult:
    shrink_first(result, make_engine)
    return _tell(result)


def _see_again(
    _options: CheckOptions, make_engine: EngineFactory, result: CheckResult
) -> CheckResult:
    see_again(result, make_engine)
    return _tell(result)


def _tell(result: CheckResult) -> CheckResult:
    """The result with its failure as words: the run behind it is of no use elsewhere."""
    failure = failure_to_json(result)
    assert failure is not None
    return replace(result, failure=None, told=Told(failure, tell_failure(result)))


def _record(options: CheckOptions, make_engine: EngineFactory, path: Path) -> None:
    write_trace(path, *record_episode(options, make_engine))


def _run(options: CheckOptions, make_engine: EngineFactory, program: Program) -> ProgramOutcome:
    run, findings = run_program(program, make_engine, find_profile(options.profile))
    text = render_program(options.engine, program, run, findings) if findings else ""
    return ProgramOutcome(text, _plain(run.skipped))


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
class Loss:
    """What became of a child, or of an engine that could not even be built."""

    message: str
    config: str = ""
    events: tuple[str, ...] = ()
    last_words: tuple[str, ...] = ()

    @property
    def finding(self) -> Finding:
        """A finding of kind FAULT."""
        return Finding(FindingKind.FAULT, "", "engine_answers_every_call", self.message)


class LostError(Exception):
    """The child is gone, or its engine is of no use."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.message)
        self.loss = loss


class Isolation:
    """A place (see `check.Place`) of children: each does one job after another.

    There are as many as there were threads that asked at once, and a new one follows where one had
    to be killed.
    """

    def __init__(self, event_seconds: float = EVENT_SECONDS, path: Sequence[str] = ()) -> None:
        """`path` is looked in first for the engine, then where this process looks."""
        self._event_seconds = event_seconds
        self._path = [*path, *sys.path]
        self._folder = tempfile.TemporaryDirectory(prefix="blockstep-")
        self._idle: list[_Child] = []
        self._busy: list[_Child] = []

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the children and forget everything about them."""
        while self._idle:
            self._idle.pop().stop()
        self._folder.cleanup()

    def check(
        self,
        options: CheckOptions,
        on_progress: Callable[[CheckResult], None] = lambda _result: None,
    ) -> CheckResult:
        """Check an engine, as `check.check` does; whatever becomes of it is in the result.

        Raises:
            EngineNotFoundError: if the engine cannot be loaded.
            RefusedError: if the engine cannot be built with a config that was drawn.
            HarnessError: if the check itself failed.
        """
        started = time.perf_counter()
        try:
            result = search(options, self, on_progress)
        except LostError as lost:  # nobody could even be asked
            episode = options.episode or 0
            result = CheckResult(options, first=lost.loss.finding, failed_episode=episode)
            result.told = self._tell_loss(options, episode, lost.loss)
        if result.first is not None and result.told is None:
            result = self._shrink(result)
        result.seconds = time.perf_counter() - started
        return result

    def _shrink(self, result: CheckResult) -> CheckResult:
        """The result with its failure told: shrunk, or else as it was, or else what is known."""
        try:
            return self._call(_shrink, result.options, result)
        except LostError as lost:
            loss = lost.loss
        try:
            told = self._call(_see_again, result.options, result).told
            assert told is not None
            findings = cast("list[object]", told.failure["findings"])
            failure = {**told.failure, "findings": [*findings, finding_to_json(loss.finding)]}
            again = f"\n  then, while this was being shrunk: {loss.message}\n"
            told = Told(failure, told.text + again)
        except LostError as lost:
            assert result.failed_episode is not None
            told = self._tell_loss(result.options, result.failed_episode, lost.loss, result.first)
        return replace(result, told=told)

    def record(self, options: CheckOptions, path: Path) -> None:
        """Write an episode as a trace.

        Raises:
            LostError: if the engine did not live to its end.
            RefusedError: if the file cannot be written.
        """
        self._call(_record, options, path.resolve())

    def run(self, engine: str, program: Program, profile: str = STRICT.name) -> ProgramOutcome:
        """Run one program, as `driver.run_program` does.

        Raises:
            EngineNotFoundError: if the engine cannot be loaded.
            RefusedError: if the engine cannot be built with the config of the program.
            HarnessError: if the run itself failed.
        """
        try:
            return self._call(_run, CheckOptions(engine, profile=profile), program)
        except LostError as lost:
            return ProgramOutcome(_face("blockstep", f"engine {engine}", lost.loss), {})

    def look(self, options: CheckOptions) -> Facts:
        """What the engine says of itself."""
        return self._call(look, options)

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        """Some episodes in a row, stopping at the first that fails, or is not survived."""
        results: list[EpisodeResult] = []
        try:
            self._call(_play, options, range(start, start + count), on_part=results.append)
        except LostError as lost:
            results.append(self._lose_episode(options, start + len(results), lost.loss))
        return results

    def _lose_episode(self, options: CheckOptions, index: int, loss: Loss) -> EpisodeResult:
        return EpisodeResult(
            index=index,
            num_events=len(loss.events),
            witnesses={},
            skipped={},
            known={},
            has_snapshot=True,
            first=loss.finding,
            told=self._tell_loss(options, index, loss),
        )

    @contextlib.contextmanager
    def open_pool(self, jobs: int) -> Iterator[Executor]:
        """A thread for each child that may be busy."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                yield pool
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in tuple(self._busy):
                    child.kill()

    def _call(
        self,
        function: Callable[[CheckOptions, EngineFactory, *Ts], T],
        options: CheckOptions,
        *args: *Ts,
        on_part: Callable[[Any], None] = lambda _part: None,
    ) -> T:
        """What the function comes to in a child, where it is given the watched engine.

        What it yields goes to `on_part` as it comes.
        """
        child = self._take_child()
        self._busy.append(child)
        try:
            value = child.ask((function, options, args), on_part)
        except (EngineNotFoundError, RefusedError):
            self._idle.append(child)
            raise
        except BaseException:
            child.stop()
            raise
        else:
            self._idle.append(child)
            return cast("T", value)
        finally:
            self._busy.remove(child)

    def _take_child(self) -> _Child:
        with contextlib.suppress(IndexError):
            while True:
                child = self._idle.pop()
                if not child.is_killed:
                    return child
                child.stop()
        folder = tempfile.mkdtemp(dir=self._folder.name)
        return _Child(Path(folder), self._path, self._event_seconds)

    def _tell_loss(
        self, options: CheckOptions, episode: int, loss: Loss, first: Finding | None = None
    ) -> Told:
        """The failure of an engine that was lost; behind what had been found already, if it was."""
        again = reproduce(options, episode)
        if self._event_seconds != EVENT_SECONDS:
            again += f" --event-seconds {self._event_seconds:g}"
        where = f"engine {options.engine}, preset {options.preset}, seed {options.seed}"
        text = _face("blockstep check", where, loss)
        if first is not None:
            name = f"{first.property_id or first.kind} {first.sentence}"
            text += f"\n  seen in the same episode before: {name}: {first.message}\n"
        findings = [loss.finding] if first is None else [first, loss.finding]
        failure = {
            "episode": episode,
            "event": len(loss.events),
            "findings": [finding_to_json(finding) for finding in findings],
            "config": loss.config,
            "program": list(loss.events),
            "num_shrink_runs": 0,
            "reproduce": again,
        }
        return Told(failure, f"{text}\n  reproduce  {again}\n")


class _Child:
    """A process that does one job after another, until it is lost."""

    def __init__(self, folder: Path, path: Sequence[str], event_seconds: float) -> None:
        """A fresh interpreter, not a fork: nothing of this process is in the engine's way."""
        self.is_killed = False
        self._event_seconds = event_seconds
        self._journal = folder / "journal"
        self._errors = folder / "stderr"
        code = (
            f"import sys; sys.path[:] = {list(path)!r}; "
            f"from blockstep.conformance.search.isolation import serve; serve({str(folder)!r})"
        )
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own code
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs = self._process.stdin
        self._output = self._process.stdout
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()

    def ask(self, job: Job, on_part: Callable[[Any], None]) -> object:
        """What the job comes to.

        Raises:
            LostError: if nothing will come of it; then the child is to be stopped.
            EngineNotFoundError, RefusedError, HarnessError: as was said in the child.
        """
        with contextlib.suppress(OSError):  # a dead child answers nothing, and that is noticed
            pickle.dump(job, self._jobs)
            self._jobs.flush()
        while (answer := self._wait_for_answer())[0] == "part":
            on_part(answer[1])
        kind, value = answer
        match kind:
            case "not found":
                raise EngineNotFoundError(value)
            case "refused":
                raise RefusedError(value)
            case "harness":
                raise HarnessError(value)
            case "raised":
                self._lose(f"the engine raised {value}", has_raised=True)
        return cast("object", value)

    def _read_answers(self) -> None:
        try:
            while True:
                self._answers.put(_Unpickler(self._output).load())
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # it ended, or was stopped
            self._answers.put(None)
        except Exception as error:
            self._answers.put(("harness", f"the answer of the child cannot be read: {error}"))

    def _wait_for_answer(self) -> Answer:
        """The next answer; raises `LostError` if none can be waited for any more."""
        since, before = time.monotonic(), None
        while True:
            has_ended = self._process.poll() is not None
            with contextlib.suppress(queue.Empty):
                seconds = min(1 / LOOKS_PER_SECOND, self._event_seconds / 10)
                answer = self._answers.get(timeout=seconds)
                if answer is not None:
                    return answer
                has_ended = True
            if has_ended:
                self._lose(self._say_how_it_ended())
            if (now := self._look()) != before:
                since, before = time.monotonic(), now
                continue
            seconds = self._get_limit(now.rpartition("\n")[2])
            if time.monotonic() - since > seconds:
                self._ask_where()
                self._lose(f"the engine gave no answer within {seconds:g} s")

    def _look(self) -> str:
        """The journal; "" before there is one."""
        if not self._journal.is_file():
            return ""
        return self._journal.read_bytes().rstrip(b"\0").decode(errors="replace")

    def _get_limit(self, doing: str) -> float:
        """For how long the engine may do this, or we whatever we do while it does nothing, ""."""
        is_slow = doing in {"", "(being imported)", "(being built)"}
        return max(self._event_seconds, BUILD_SECONDS) if is_slow else self._event_seconds

    def _ask_where(self) -> None:
        """Have a hanging child write where it is to its standard error."""
        if sys.platform != "win32":
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)

    def _lose(self, how: str, has_raised: bool = False) -> NoReturn:
        header, *lines = self._look().split("\n")
        if has_raised:
            while lines and not lines[-1]:
                lines.pop()
        where = lines[-1] if lines else ""
        events = tuple(line for line in lines if line and not line.startswith(ASIDE))
        last_words = _find_last_words(self._errors.read_text(errors="replace"))
        config = json.loads(header)[1] if header else ""
        raise LostError(Loss(f"{how}{_say_where(where)}", config, events, last_words))

    def _say_how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the engine closed the files of its process"
        if code >= 0:
            return f"the engine's process ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the engine's process was ended by {name}"

    def kill(self) -> None:
        """End the process with all that it has started, at once."""
        self.is_killed = True
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """The same, and wait for its end."""
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._jobs.close()
        self._reader.join(timeout=1.0)
        if not self._reader.is_alive():  # else a process that got away holds the other end
            self._output.close()


class _Unpickler(pickle.Unpickler):
    """Reads what a child has written, and imports nothing for it: that could be the engine."""

    def find_class(self, module: str, name: str) -> Any:
        """A class, if its module is here already."""
        if module not in sys.modules:
            raise HarnessError(f"{module}.{name} is of no module of ours")
        return super().find_class(module, name)


def _find_last_words(errors: str) -> tuple[str, ...]:
    """What standard error says about the end: the engine's own frames, or else its last lines."""
    lines = [line for line in errors.splitlines() if line.strip()]
    dumps = [number for number, line in enumerate(lines) if line.startswith(DUMPS)]
    if not dumps:
        return tuple(lines[-LAST_WORDS_MAX:])
    words = lines[dumps[0] :]
    ours = [number for number, line in enumerate(words) if f'"{__file__}"' in line]
    return tuple(words[: min([LAST_WORDS_MAX, *ours])])


def _say_where(line: str) -> str:
    if not line:
        return " between two calls"
    if line.startswith(ASIDE):
        return f" while {line[1:-1]}"
    return f" at: {' '.join(line.split())}"


def _face(command: str, where: str, loss: Loss) -> str:
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
