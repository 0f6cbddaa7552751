"""Runner: runs parts within their limits, and keeps their results in one file.

The file, `gpu.json`, is written after each part, and a later run continues from it: a part that
passed on the same sources and device is not run again. Raw output is packed into a file next to it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from shutil import which
from typing import Any, Final

from benchmarks.gpu.aims import AIMS, Aim, Verdict, describe, judge, make_table
from benchmarks.gpu.parts import Command, Part

PASSED: Final = "passed"
FAILED: Final = "FAILED"
STOPPED: Final = "STOPPED"
NOT_RUN: Final = "NOT RUN"
LEFT_OUT: Final = "left out"
FILE: Final = "gpu.json"
PACKED: Final = "raw.tgz"
SOURCES: Final = ("spec", "impl", "kernels", "conformance", "tests", "benchmarks")
SECONDS_TO_END: Final = 3.0
"""Seconds between the request to end and the kill."""
SECONDS_MIN: Final = 5.0
"""Least time left for which a part is begun."""
NUM_LINES_MAX: Final = 40
"""Most lines of output that are shown of a part."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a part."""

    status: str
    detail: str = ""
    seconds: float = 0.0
    sources: str = ""
    """`hash_sources` when it ran."""
    ended: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """Figures by command."""
    lines: list[str] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        """Return whether this result makes the whole run fail."""
        return self.status in (FAILED, STOPPED, NOT_RUN)


@dataclass(slots=True)
class Running:
    """A process of a part."""

    part: Part
    command: Command
    process: subprocess.Popen[bytes]
    output: Path
    ends: float
    """Time at which its part reaches its limit."""
    status: int | None = None
    seconds: float = 0.0
    was_stopped: bool = False


def hash_sources(root: Path) -> str:
    """Return a hash of everything that is run; it needs no git."""
    digest = sha256()
    files = [path for folder in SOURCES for path in (root / folder).rglob("*.py")]
    for path in sorted([*files, root / "pyproject.toml"]):
        if path.exists():
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, which share a process group, and nothing else."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        until = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
    process.wait()


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Inside the `with`, a SIGTERM lets `finally` clauses end processes and pack the output."""

    def leave(_number: int, _frame: object) -> None:
        raise SystemExit(1)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Runner:
    """Runs parts.

    Args:
        folder: Folder for `gpu.json` and `raw.tgz`; an existing `gpu.json` lists what has passed.
        about: Machine, written into the file; its `device` must be the same to continue.
        root: Folder of the sources, in which commands run.
        seconds: Time for all parts together.
        aims: Aims for the figures.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        root: Path,
        seconds: float,
        aims: Sequence[Aim] = AIMS,
    ) -> None:
        self.folder, self.about, self.root, self.aims = folder, dict(about), root, aims
        self.sources = hash_sources(root)
        self.deadline = time.monotonic() + seconds
        self.results: dict[str, Result] = {}
        self.kept: set[str] = set()
        """Parts that had passed before."""
        self._raw = Path()

    def run(self, parts: Sequence[Part], *, again: bool = False) -> None:
        """Run parts in their order, those side by side that are not timed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._take_over()
        passed = {name for name, result in self.results.items() if result.status == PASSED}
        self.kept = set() if again else passed & {part.name for part in parts}
        for name in sorted(self.kept):
            print(f"{name}: passed at {self.results[name].ended}, on the same sources; not run")
        with self._open_raw():
            to_run = [part for part in parts if part.name not in self.kept]
            for is_timed, group in groupby(to_run, lambda part: part.is_timed):
                for beside in ([one] for one in group) if is_timed else [list(group)]:
                    self._run_beside(beside)

    def judge(self) -> list[Verdict]:
        """Return a verdict on each aim, from the present results."""
        return judge({name: one.figures for name, one in self.results.items()}, self.aims)

    def save(self) -> None:
        """Write everything known by now, whole or not at all."""
        record = {
            **self.about,
            "sources": self.sources,
            "parts": {name: asdict(result) for name, result in self.results.items()},
            "aims": [describe(verdict) for verdict in self.judge()],
        }
        file = self.folder / FILE
        beside = file.with_suffix(".new")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        beside.replace(file)
        with tarfile.open(self.folder / PACKED, "w:gz") as packed:
            for path in sorted(self._raw.iterdir()):
                packed.add(path, path.name)

    @contextmanager
    def _open_raw(self) -> Iterator[None]:
        """A folder for raw output, with that of the results that were taken over."""
        with tempfile.TemporaryDirectory() as folder:
            self._raw = Path(folder)
            if self.results and (self.folder / PACKED).exists():
                with tarfile.open(self.folder / PACKED) as packed:
                    packed.extractall(folder, filter="data")
            try:
                yield
            finally:
                self.save()

    def _take_over(self) -> None:
        """Take over what an earlier run found of these sources on this device."""
        try:
            before = json.loads((self.folder / FILE).read_text())
            results = {name: Result(**one) for name, one in before["parts"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return
        if before.get("device") != self.about.get("device"):
            print(f"another device: what was found on {before.get('device')} does not count")
            return
        self.results = {
            name: result for name, result in results.items() if result.sources == self.sources
        }
        if len(self.results) < len(results):
            print("other sources: what was found before does not count")

    def _run_beside(self, parts: Sequence[Part]) -> None:
        """Run parts in parallel, and note the result of each."""
        running: list[Running] = []
        for part in parts:
            missing = bool(part.tool) and which(part.tool) is None
            left = self.deadline - time.monotonic()
            if missing:
                status = NOT_RUN if part.is_required else LEFT_OUT
                self._note(part, Result(status, f"there is no {part.tool}"))
            elif left < SECONDS_MIN:
                self._note(part, Result(NOT_RUN, "no time was left; run it again to continue"))
            else:
                ends = time.monotonic() + min(part.limit, left)
                running += [self._start(part, command, ends) for command in part.commands]
        try:
            self._wait(running)
        finally:
            for one in running:
                if one.process.poll() is None:
                    end_group(one.process)
        self.save()

    def _start(self, part: Part, command: Command, ends: float) -> Running:
        output = self._raw / f"{part.name}-{command.name}.txt"
        places = {
            "json": str(output.with_suffix(".json")), "raw": str(self._raw),
            "python": sys.executable,
        }  # fmt: skip
        output.with_suffix(".json").unlink(missing_ok=True)
        argv = [re.sub(r"\{(json|raw|python)\}", lambda m: places[m[1]], a) for a in command.argv]
        print(f"== {part.name}: {command.name}", flush=True)
        with output.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - commands of ours
                argv, cwd=self.root, env={**os.environ, **command.environment},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        return Running(part, command, process, output, ends)

    def _wait(self, running: Sequence[Running]) -> None:
        """Wait until all have ended; a part is noted when its last process has ended."""
        began = time.monotonic()
        left = list(running)
        while left:
            for one in list(left):
                now = time.monotonic()
                one.status = one.process.poll()
                if one.status is None and now > one.ends:
                    end_group(one.process)
                    one.status, one.was_stopped = one.process.returncode, True
                if one.status is None:
                    continue
                one.seconds = now - began
                left.remove(one)
                if all(other.part != one.part for other in left):
                    own = [other for other in running if other.part == one.part]
                    self._note(one.part, self._conclude(one.part, own))
            time.sleep(0.05)

    def _conclude(self, part: Part, running: Sequence[Running]) -> Result:
        """Return the result of a part whose processes have all ended."""
        figures, lines, failed, stopped = {}, [], [], []
        for one in running:
            text = one.output.read_text(errors="replace")
            shown = [line for line in text.splitlines() if re.search(part.lines, line)]
            with suppress(OSError, ValueError):  # it has none, or was ended while it wrote
                figures[one.command.name] = json.loads(one.output.with_suffix(".json").read_text())
            if one.was_stopped:
                stopped.append(f"{one.command.name} after {one.seconds:.0f} s")
            elif one.status:
                failed.append(f"{one.command.name} ({one.status})")
                shown = shown or text.splitlines()[-8:]
            elif part.faults and re.search(part.faults, text):
                failed.append(f"{one.command.name} (its output says so)")
            lines += shown
        if failed:
            status, detail = FAILED, ", ".join([*failed, *(f"{s}: its limit" for s in stopped)])
        elif stopped:
            status, detail = STOPPED, f"limit reached: {', '.join(stopped)}"
        else:
            status, detail = PASSED, ""
        return Result(
            status, detail, max(one.seconds for one in running), self.sources,
            datetime.now(UTC).isoformat(timespec="seconds"), figures, lines[-NUM_LINES_MAX:],
        )  # fmt: skip

    def _note(self, part: Part, result: Result) -> None:
        self.results[part.name] = result
        for line in result.lines:
            print(f"  {line[:160]}")
        print(make_line(part.name, result), flush=True)


def make_line(name: str, result: Result) -> str:
    """Return the result of a part in one line."""
    detail = f": {result.detail}" if result.detail else ""
    took = f" in {result.seconds:.0f} s" if result.seconds else ""
    return f"{name} {result.status}{took}{detail}"


def make_summary(results: Mapping[str, Result], verdicts: Sequence[Verdict]) -> str:
    """Return the table that is printed last: parts, then aims."""
    lines = [make_line(name, result) for name, result in results.items()]
    return "\n".join(["== parts", *lines, "== aims", make_table(verdicts)])


def make_file_name(day: str, device: str) -> str:
    """Return the name under which results are kept in benchmarks/results."""
    words = re.findall("[a-z0-9]+", device.lower())
    return "-".join([day, "gpu", *(word for word in words if word != "nvidia")]) + ".json"
