"""Separating: which barriers of the kernels order a pair of accesses that nothing else orders.

Two accesses of one place, one of them a store, with exactly one barrier between them: without that
barrier they would be a finding of `Watched`. A barrier without such a pair may go, or was not put
to the test. `python -m benchmarks.barriers` plays drawn programs, with many lanes and with two,
loops without a host, and what is rare in both; it lists every barrier, and exits with 1 if one of
them orders nothing alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.device import layout
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import Numpied, list_files
from blockstep.kernels.numpied import Watched, memory
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    Policy,
    Request,
    RowTokens,
    Schedule,
    SpecMethod,
    Submit,
)

OWN = (__file__, memory.__file__)
EVENTS = 500
"""Events of a run; presets and lanes take turns."""
WATCHING: list[Numpied] = []
"""Launchers of the kernels of the engine under check; the last one is used."""


def make_watched(config: Config) -> DeviceEngine:
    """Return the engine that is under check."""
    return DeviceEngine(config, WATCHING[-1])


def make_narrow(config: Config) -> DeviceEngine:
    """Return the same with two lanes, so that every loop goes round."""
    return DeviceEngine(config, WATCHING[-1], lanes=2)


class Separating(Watched):
    """`Watched`, which also counts for each barrier, `function:line`, the accesses that it alone
    orders."""

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
        """Begin a launch: launches and programs are ordered, whatever barriers they have."""
        self.first += len(self.lines)
        self.lines, self.vectors = [], []
        self.cut, self.last = self.first, ""

    def barrier(self) -> None:
        """Pass a barrier: accesses before the last one are ordered by two barriers from now on."""
        end = self.first + len(self.lines)
        kept = self.cut - self.first
        self.lines, self.vectors = self.lines[kept:], self.vectors[kept:]
        self.first, self.cut, self.last = self.cut, end, _find_barrier()
        self.passed[self.last] += 1

    def _compare(self, kind: str, before: Any, now: int, same: tuple[Any] | None) -> None:
        crossing = before[(before >= self.first) & (before < self.cut)]
        if crossing.size and self.last and self.last not in self.needed:
            for number in {int(one) for one in crossing.ravel()}:
                if same is None or self.vectors[number - self.first] != same[0]:
                    old, new = self.lines[number - self.first], self.lines[now - self.first]
                    self.needed[self.last] = f"{kind} {old} -> {new}"
        super()._compare(kind, before[before >= self.cut], now, same)


def _find_barrier() -> str:
    """Return the barrier that is met, as `file function:line`."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in OWN and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem} {frame.f_code.co_name}:{frame.f_lineno}"


def list_barriers() -> list[str]:
    """Return all barriers in the kernels' source, as `file function:line`."""
    found: list[str] = []
    for file in list_files():
        function = ""
        for number, line in enumerate(file.read_text().splitlines(), 1):
            begins = re.match(r"def (\w+)", line)
            function = begins[1] if begins else function
            if "tl.debug_barrier()" in line:
                found.append(f"{file.stem} {function}:{number}")
    return found


def play_loop(seed: int) -> None:
    """Play a loop without a host, in which requests hit, are preempted, finish, or run
    undisturbed."""
    draw = random.Random(seed)  # noqa: S311
    config = Config(
        num_blocks=draw.choice((8, 20, 90)), block_size=2, max_num_batched_tokens=8,
        max_frames_in_flight=1 + seed % 3, async_scheduling=seed % 3 > draw.randrange(2),
        policy=draw.choice((Policy.FCFS, Policy.PRIORITY)),
    )  # fmt: skip
    engine = DeviceEngine(config, WATCHING[-1], lanes=draw.choice((2, 16)))
    inbox = engine.inbox
    control = inbox.state.control
    control[layout.BUDGET], control[layout.ADMITS] = config.max_num_batched_tokens, 1
    control[layout.PREVIOUS_ID] = layout.NONE
    for step in range(80):
        if step % 8 == 0:
            inbox.reserve_nodes(8 * config.max_num_seqs, config.max_num_seqs)
        if step % 2 == 0 and step < 24:
            prompt = tuple(draw.choices(range(2), k=draw.randint(1, 5)))
            engine.apply(Submit(Request(f"{step}", prompt, max_tokens=draw.choice((6, 30)))))
        s = inbox.state
        place = int(s.control[layout.COMMIT_PLACE])
        s.answer_counts[:] = s.plans[place, layout.ROW_SAMPLES]
        s.answer_tokens[..., 0] = 1
        inbox.launch("loop_kernel")
        for slot in [slot for slot in inbox.requests if inbox.state.birth[slot] == 0]:
            inbox.remove(slot)


def serve(engine: DeviceEngine, *requests: Request) -> None:
    """Serve one request after the other; every draft is accepted."""
    for request in requests:
        engine.apply(Submit(request))
        while engine.inbox.slot_of:
            engine.apply(Schedule())
            is_empty = int(engine.inbox.state.num_rows[0]) == 0
            if len(engine.frames) == engine.inbox.dims.frames or (engine.frames and is_empty):
                frame_id, frame = next(iter(engine.frames.items()))
                rows = (
                    (name, () if x is None else (7, *[7] * len(x)))
                    for name, x in frame.rows.items()
                )
                engine.apply(Commit(frame_id, tuple(RowTokens(*row) for row in rows)))


def play_rare() -> None:
    """Play states that draws seldom reach."""
    # Hits out of the middle of the free queue, until its holes are closed.
    config = Config(num_blocks=16, block_size=2, max_num_batched_tokens=16, max_model_len=12)
    engine = DeviceEngine(config, WATCHING[-1], lanes=2)
    serve(engine, *[Request(f"{number}", (1,) * 9, max_tokens=1) for number in range(12)])
    # A needed node continues one that no block carries and no request has; its parent likewise.
    engine = DeviceEngine(config, WATCHING[-1], lanes=2)
    serve(engine, Request("a", (1,) * 9, max_tokens=1))
    engine.inbox.state.node[[2, 3]] = layout.NONE
    WATCHING[-1]("sweep_kernel", engine.inbox.state, engine.inbox.dims)
    # Two commands of one launch for one request.
    engine = DeviceEngine(Config(num_blocks=9, policy=Policy.PRIORITY), WATCHING[-1])
    engine.apply(Submit(Request("a", (1,))))
    engine.apply(Abort(("a",)))
    engine.inbox.launch("commands_kernel")
    # Outputs that are known contents, and are published when they are verified.
    config = Config(
        num_blocks=20, block_size=2, async_scheduling=True, max_frames_in_flight=2,
        spec_method=SpecMethod.NGRAM, num_speculative_tokens=1,
    )  # fmt: skip
    engine = DeviceEngine(config, WATCHING[-1])
    serve(engine, *[Request(name, (1, 7), max_tokens=9) for name in "ab"])
    # Two requests with the same tokens fill several blocks in one step.
    config = dataclasses.replace(config, block_size=1, num_blocks=60, num_speculative_tokens=2)
    engine = DeviceEngine(config, WATCHING[-1])
    for name in "ab":
        engine.apply(Submit(Request(name, (1, 7), max_tokens=9)))
    serve(engine, Request("c", (1, 7), max_tokens=9))


def play_drawn(run: int, features: tuple[str, ...] = ()) -> None:
    """Play a drawn program that has these features, compared with the specification."""
    make = ("make_watched", "make_narrow")[run // 2 % 2]
    preset = ("tiny", "small")[run % 2]
    options = CheckOptions(
        f"{__name__}:{make}", preset=preset, seed=run // 2, max_events=EVENTS,
        with_features=features,
    )  # fmt: skip
    first = check(options, shrinks=False).first
    if first is not None:
        raise RuntimeError(first)


def separate(num_events: int) -> Separating:
    """Return the pairs of accesses that each barrier orders.

    `num_events` events are drawn with one KV group and as many with several; each run of them is
    followed by one loop without a host.
    """
    watched = Separating()
    WATCHING.append(Numpied(watched))
    for run in range(-(-num_events // EVENTS)):
        play_drawn(run)
        play_drawn(run, ("groups", "async", "drafts") if run % 3 == 2 else ("groups",))
        play_loop(run)
    play_rare()
    if watched.findings:
        raise RuntimeError(watched.findings)
    return watched


def main() -> int:
    """Play, and print each barrier with what it orders alone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--events", type=int, default=4_000)
    num_events = parser.parse_args().events
    watched = separate(num_events)
    counts: Counter[str] = Counter()
    for barrier in list_barriers():
        verdict = "met" if watched.passed[barrier] else "not met"
        verdict = "alone" if barrier in watched.needed else verdict
        counts[verdict] += 1
        print(f"{barrier}: {verdict} {watched.needed.get(barrier, '')}".rstrip())
    print(f"{sum(counts.values())} barriers in {num_events} events: {dict(counts)}")
    return int(counts["alone"] < counts.total())


if __name__ == "__main__":
    sys.exit(main())
