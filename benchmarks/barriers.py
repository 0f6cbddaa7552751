"""Separating: which barriers of the kernels order a pair of accesses that nothing else orders.

Two accesses of one place, one of them a store, with exactly one barrier between them: without that
barrier they would be a finding of `Watched`. A barrier without such a pair may go, or was not put
to the test. `python -m benchmarks.barriers` plays drawn programs and lists every barrier.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import Numpied, list_files
from blockstep.kernels.numpied import Watched, memory
from blockstep.spec.vocabulary import Config

OWN = (__file__, memory.__file__)
EVENTS = 500
"""Of a run; presets take turns."""
WATCHING: list[Numpied] = []
"""Who runs the kernels of the engine under check."""


def make_watched(config: Config) -> DeviceEngine:
    """The engine that is under check."""
    return DeviceEngine(config, WATCHING[-1])


class Separating(Watched):
    """As `Watched`; and counts for each barrier, `function:line`, what it orders alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.passed: Counter[str] = Counter()
        """Times that each barrier was met."""
        self.needed: dict[str, str] = {}
        """By barrier: the first pair that it alone orders."""
        self.cut = self.first
        """The number of the first access after the last barrier; `first` is one barrier back."""
        self.last = ""

    def start(self) -> None:
        """Launches and programs are ordered, whatever barriers they have."""
        self.first += len(self.lines)
        self.lines, self.vectors = [], []
        self.cut, self.last = self.first, ""

    def barrier(self) -> None:
        """What was before the last barrier is ordered by two from now on."""
        end = self.first + len(self.lines)
        kept = self.cut - self.first
        self.lines, self.vectors = self.lines[kept:], self.vectors[kept:]
        self.first, self.cut, self.last = self.cut, end, _find_barrier()
        self.passed[self.last] += 1

    def _compare(self, kind: str, before: Any, now: int, vector: Any, *, in_place: bool) -> None:
        crossing = before[(before >= self.first) & (before < self.cut)]
        if crossing.size and self.last and self.last not in self.needed:
            for number in {int(one) for one in crossing.ravel()}:
                if not (in_place and self.vectors[number - self.first] == vector):
                    old, new = self.lines[number - self.first], self.lines[now - self.first]
                    self.needed[self.last] = f"{kind} {old} -> {new}"
        super()._compare(kind, before[before >= self.cut], now, vector, in_place=in_place)


def _find_barrier() -> str:
    """The barrier that is met, as `function:line`."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in OWN and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem} {frame.f_code.co_name}:{frame.f_lineno}"


def list_barriers() -> list[str]:
    """All that stand in the kernels' source, as `file function:line`."""
    found: list[str] = []
    for file in list_files():
        function = ""
        for number, line in enumerate(file.read_text().splitlines(), 1):
            begins = re.match(r"def (\w+)", line)
            function = begins[1] if begins else function
            if "tl.debug_barrier()" in line:
                found.append(f"{file.stem} {function}:{number}")
    return found


def main() -> None:
    """Play, and print each barrier with what it orders alone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--events", type=int, default=2_000)
    num_events = parser.parse_args().events
    watched = Separating()
    WATCHING.append(Numpied(watched))
    for run in range(-(-num_events // EVENTS)):
        play = CheckOptions(
            f"{__name__}:make_watched", preset=("tiny", "small")[run % 2], seed=run // 2,
            max_events=EVENTS,
        )  # fmt: skip
        first = check(play, shrinks=False).first
        if first is not None or watched.findings:
            raise RuntimeError(f"{first} {watched.findings}")
    counts: Counter[str] = Counter()
    for barrier in list_barriers():
        verdict = "met" if watched.passed[barrier] else "not met"
        verdict = "alone" if barrier in watched.needed else verdict
        counts[verdict] += 1
        print(f"{barrier}: {verdict} {watched.needed.get(barrier, '')}".rstrip())
    print(f"{sum(counts.values())} barriers in {num_events} events: {dict(counts)}")


if __name__ == "__main__":
    main()
