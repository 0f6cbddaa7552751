"""Times of a scheduler's step, for the page on performance.

    python benchmarks/scheduler.py                              a quick look at decode
    python benchmarks/scheduler.py --write --trace FILE         measures all parts
    python benchmarks/scheduler.py --write [--trace FILE] PART  measures one part again

Each part is one `blockstep bench`; it writes its JSON into benchmarks/results. `make docs` makes
the tables and the plot from the newest JSON of each part. Measuring all parts takes about 20
minutes, and needs vLLM 0.19.1 and numba: `make vllm`, then pip install numba in its environment;
part `other` needs another release.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from blockstep.conformance.bench.measure import Measurement, Reading, get_slope
from blockstep.conformance.bench.profile import Profile, to_lines
from blockstep.conformance.bench.report import (
    YARDSTICK,
    format_machine,
    get_ratio,
    make_markdown,
    make_pipes,
)
from blockstep.conformance.bench.scenarios import TRACE

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks/results")
RUN = (
    "import sys; sys.argv[0] = 'blockstep'; "
    "from blockstep.conformance.command.main import main; main()"
)
ENGINES = ("host", YARDSTICK)
PARTS = {
    "steady": "scheduler --apply --scenario decode --scenario long --scenario async "
    "--scenario drafts " + 9 * "-n 1 " + 3 * "-n 8 " + 3 * "-n 64 " + "-n 256 -n 1024 -n 4096",
    "groups": "scheduler --scenario window --scenario recurrent -n 8 -n 64 -n 1024",
    "churn": "scheduler --scenario mixed --scenario hits --scenario storm --scenario waves "
    "--scenario priority --scenario pool -n 8 -n 64 -n 256",
    "other": "scheduler --scenario decode -n 1 -n 8 -n 64 -n 256 -n 1024 -n 4096",
    "trace": "scheduler --limit 2000",
    "profile-steady": "profile --scenario decode -n 1024",
    "profile-churn": "profile --scenario mixed --scenario hits -n 256",
}
"""Options of `blockstep bench`, by the name of the section of the page that has the output.
Scenarios of a few microseconds are measured several times, in turn with others of that size."""
GOALS_SECTION = "goals"
OTHER = "other"
"""The part with another release of vLLM; goals are about the release of the other parts."""
NUM_LINES = 6
"""Functions of a profile that the page shows."""

# Goals.

Reader: TypeAlias = Callable[[Sequence[Measurement], str], float | None]
"""The figure of an engine; None if it was not measured."""
SENSES = {"at least": operator.ge, "at most": operator.le, "below": operator.lt}


@dataclass(frozen=True, slots=True)
class Goal:
    """Bound for a figure."""

    what: str
    sense: str
    bound: float
    unit: str
    read: Reader

    def judge(self, measurements: Sequence[Measurement], engine: str) -> str:
        """Return the figure, and whether it is within its bound."""
        value = self.read(measurements, engine)
        if value is None:
            return "not measured"
        verdict = "met" if SENSES[self.sense](value, self.bound) else "**missed**"
        return f"{value:,.4g}{self.unit}, {verdict}"


def find(
    measurements: Sequence[Measurement],
    scenario: str,
    running: int | None,
    engine: str,
    reading: str,
) -> tuple[Measurement, Reading] | None:
    """Return one engine in one reading; a `running` of None is any."""
    for entry in measurements:
        if entry.scenario == scenario and running in (None, entry.num_running):
            for found in entry.readings:
                if (found.engine, found.reading) == (engine, reading):
                    return entry, found
    return None


def times(scenario: str, running: int, reading: str = "arrays") -> Reader:
    """Return a reader of how many steps take as long as one of the yardstick, by their p50."""

    def read(measurements: Sequence[Measurement], engine: str) -> float | None:
        found = find(measurements, scenario, running, engine, reading)
        return None if found is None else get_ratio(*found)

    return read


def times_all_steps(measurements: Sequence[Measurement], engine: str) -> float | None:
    """Return the same of the whole trace."""
    found = find(measurements, TRACE, None, engine, "arrays")
    return None if found is None else get_ratio(*found, "mean")


def slope_of_decode(measurements: Sequence[Measurement], engine: str) -> float | None:
    """Nanoseconds."""
    entries = [entry for entry in measurements if entry.scenario == "decode"]
    return get_slope(entries, engine, "arrays")


def long_by_short(measurements: Sequence[Measurement], engine: str) -> float | None:
    """Return the p50 of one request with a long context, in that of one with a short context."""
    long = find(measurements, "long", 1, engine, "arrays")
    short = find(measurements, "decode", 1, engine, "arrays")
    return None if long is None or short is None else long[1].step.p50 / short[1].step.p50


MATERIALISED = times("decode", 1024, "materialised")
THROUGH_APPLY = times("decode", 1024, "protocol")
WINDOW, STATES = times("window", 1024), times("recurrent", 1024)
GOALS = (
    Goal("decode, 1,024 running, arrays", "at least", 100, "x", times("decode", 1024)),
    Goal("decode, full and window, 1,024 running, arrays", "at least", 80, "x", WINDOW),
    Goal("decode, full and recurrent, 1,024 running, arrays", "at least", 60, "x", STATES),
    Goal("decode, 1,024 running, materialised", "at least", 35, "x", MATERIALISED),
    Goal("decode, 1,024 running, through apply", "at least", 12, "x", THROUGH_APPLY),
    Goal("decode, 64 running, arrays", "at least", 20, "x", times("decode", 64)),
    Goal("decode, 8 running, arrays", "at least", 5, "x", times("decode", 8)),
    Goal("decode, one running request more, arrays", "below", 120, " ns", slope_of_decode),
    Goal("100,000 tokens of context by 512, arrays", "at most", 1.1, "", long_by_short),
    Goal("mixed, 256 running, arrays", "at least", 25, "x", times("mixed", 256)),
    Goal("hits, 256 running, arrays", "at least", 25, "x", times("hits", 256)),
    Goal("storm of preemptions, 256 running, arrays", "at least", 25, "x", times("storm", 256)),
    Goal("waves: all admitted, all end, 256, arrays", "at least", 25, "x", times("waves", 256)),
    Goal("Mooncake, 2,000 requests, all steps, arrays", "at least", 30, "x", times_all_steps),
)


def make_goals(measurements: Sequence[Measurement]) -> list[str]:
    """Return the table of goals, one column for each engine that is compared with the yardstick."""
    seen = dict.fromkeys(f.engine for entry in measurements for f in entry.readings)
    engines = [name for name in seen if name != YARDSTICK]
    rows = [
        [goal.what, f"{goal.sense} {goal.bound:g}{goal.unit}"]
        + [goal.judge(measurements, name) for name in engines]
        for goal in GOALS
    ]
    return make_pipes(("what", "goal", *engines), rows)


# The sections of the page.


def find_newest(part: str, folder: Path = RESULTS) -> Path | None:
    """Return the newest result of a part: names begin with the date."""
    return max(folder.glob(f"*-scheduler-{part}-*core.json"), default=None)


def make_sections(folder: Path = RESULTS) -> dict[str, str]:
    """Return the tables of each part that has results, and those of the goals."""
    measurements: list[Measurement] = []
    files: list[str] = []
    sections: dict[str, str] = {}
    for part in PARTS:
        file = find_newest(part, folder)
        if file is None:
            continue
        plain = json.loads(file.read_text(encoding="utf-8"))
        if "profiles" in plain:
            sections[part] = make_profiles(plain)
        else:
            entries = msgspec.convert(plain["measurements"], list[Measurement])
            sections[part] = make_markdown(entries, plain, None)
            if part == OTHER:
                continue
            measurements += entries
            files.append(f"`{(RESULTS / file.name).as_posix()}`")
    goals = [*make_goals(measurements), "", f"Computed from {', '.join(files)}."]
    return {**sections, GOALS_SECTION: "\n".join(goals)}


def list_step_lines(folder: Path = RESULTS) -> dict[str, list[tuple[int, float]]]:
    """Return microseconds per running request of a decode step, by number of running requests: for
    each reading of our engine and for each measured release of vLLM, by label."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for part in ("steady", OTHER):
        file = find_newest(part, folder)
        if file is None:
            continue
        plain = json.loads(file.read_text(encoding="utf-8"))
        for entry in msgspec.convert(plain["measurements"], list[Measurement]):
            for found in entry.readings if entry.scenario == "decode" else ():
                is_vllm = found.engine == YARDSTICK
                label = f"vLLM {plain['vllm']}" if is_vllm else found.reading
                if is_vllm or part != OTHER:
                    point = (entry.num_running, found.step.p50 / entry.num_running)
                    lines.setdefault(label, []).append(point)
    return lines


def make_profiles(plain: Mapping[str, Any]) -> str:
    """Return a block for each engine in each scenario."""
    found = msgspec.convert(plain["profiles"], list[Profile])
    profile_lines = [to_lines(entry)[: 2 + NUM_LINES] for entry in found]
    blocks = ["\n".join(["```text", *lines, "```"]) for lines in profile_lines]
    return "\n\n".join([f"`{plain['command']}`", format_machine(plain["machine"]), *blocks])


# Measuring.


def run(arguments: Sequence[str]) -> None:
    """One `blockstep bench`; what it says is seen. Raises if it fails."""
    command = [sys.executable, "-c", RUN, "bench", *arguments]
    settings = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0", **os.environ}
    subprocess.run(command, check=True, env=settings)  # noqa: S603 - our own command


def measure_part(part: str, engines: Sequence[str], trace: Path | None) -> None:
    """Measure a part into a file of today."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    file = RESULTS / f"{date}-scheduler-{part}-{os.cpu_count()}core.json"
    with_yardstick = not part.startswith("profile")
    chosen = [name for name in engines if name != YARDSTICK or with_yardstick]
    options = [option for name in chosen for option in ("--engine", name)]
    command, *rest = PARTS[part].split()
    if part == TRACE and trace is not None:
        rest += ["--trace", str(trace)]
    run([command, *options, *rest, "--json", file.as_posix()])
    if trace is not None:  # where it lies says nothing to others
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(shlex.quote(str(trace)), trace.name), encoding="utf-8")


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}: all")
    parser.add_argument("--write", action="store_true", help="measure parts and write the results")
    parser.add_argument("--engine", action="append", help=f"with --write: {', '.join(ENGINES)}")
    parser.add_argument("--trace", type=Path, help="mooncake_conversation.jsonl.gz, for its part")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"PART {min(unknown)!r}: must be one of {', '.join(PARTS)}")
    if not args.write:
        chosen = [option for name in args.engine or ["host"] for option in ("--engine", name)]
        run(["scheduler", *chosen, "--scenario", "decode", "-n", "1", "-n", "64", "-n", "1024"])
        return
    parts = args.parts or list(PARTS)
    if TRACE in parts and args.trace is None:
        parser.error(f"part {TRACE}: needs --trace FILE; name the other parts to leave it out")
    trace = args.trace and args.trace.resolve()
    os.chdir(ROOT)
    for part in parts:
        measure_part(part, args.engine or ENGINES, trace)


if __name__ == "__main__":
    main()
