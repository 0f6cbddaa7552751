"""Throughput of the lock-step at several commits, on the same programs, with all checks on.

    python -m benchmarks.commits COMMIT... [--engine NAME] [--programs N] [--rounds N] [--json FILE]
    python -m benchmarks.commits COMMIT... --recording FILE [--rounds N] [--json FILE]

The first commit records programs of both presets, so that they ask for nothing that it lacks. Each
commit then replays them in a process of its own; a commit called `.` is the working tree. The
processes take turns program by program, since the speed of a machine varies over time. Two
processes that do the same also differ by several per cent, depending on their memory layout, so
each round has new ones. Of each program its quickest run counts. Prints microseconds of processor
time per event.

With `--recording` the specification alone is timed, by profile: each event of a recording of
`benchmarks.digest`, and the snapshot after it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import read_program, write_program
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import Config
from blockstep.spec.profiles import get_profile

ROOT = Path(__file__).parent.parent
PRESETS = ("tiny", "small")


@dataclass
class Figures:
    """Figures of one commit with one preset, or with one profile of a recording."""

    commit: str
    group: str
    events: int
    us_per_event: float


def record(folder: Path, engine: str, num_programs: int) -> None:
    """Write programs of both presets into `folder`. Runs in the tree of the first commit."""
    make_engine = load_engine(engine)
    for preset in PRESETS:
        options = CheckOptions(engine=engine, preset=preset)
        for index in range(1, num_programs + 1):
            _, program, findings = play_episode(options, index, make_engine)
            assert not findings, findings
            (folder / f"{preset}-{index}.json").write_text(write_program(program))


def replay(engine: str) -> None:
    """For each line of the input, a program's file: nanoseconds and events of its quickest run."""
    make_engine = load_engine(engine)
    known: dict[Path, Program] = {}
    for line in sys.stdin:
        path = Path(line.strip())
        program = known[path] = known.get(path) or read_program(path)
        spent = []
        for _ in range(3):  # the other processes have left nothing of ours in the caches
            start = time.process_time_ns()
            run, findings = run_program(program, make_engine)
            spent.append(time.process_time_ns() - start)
            assert not findings, findings
        print(min(spent), run.num_events, flush=True)


def replay_recording(file: Path) -> None:
    """For each line of the input, a run's number: nanoseconds and events of the specification in
    the quickest of three runs, with a snapshot after each event.
    """
    runs = pickle.loads(file.read_bytes())  # noqa: S301 - a recording of one's own
    gc.collect()
    gc.freeze()  # what is recorded is not looked through while the specification runs
    for line in sys.stdin:
        name, values, events = runs[int(line)]
        profile = get_profile(name)
        assert profile is not None, name
        spent = []
        for _ in range(3):
            engine = SpecEngine(Config(**values), profile)
            start = time.process_time_ns()
            for event in events:
                engine.apply(event)
                engine.snapshot()
            spent.append(time.process_time_ns() - start)
        print(min(spent), len(events), flush=True)


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder of their own; `.`: those of the working tree."""
    if commit == ".":
        yield ROOT
        return
    with TemporaryDirectory(prefix="blockstep-") as folder:
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=True)  # noqa: S603
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)  # noqa: S603


def start(tree: Path, *args: str) -> subprocess.Popen[str]:
    """Start this very file with the packages of a tree."""
    wings = [str(tree / wing) for wing in ("spec", "impl", "kernels", "conformance")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(wings), "PYTHONHASHSEED": "0"}
    # -P: else numba would take the folder `benchmarks/coverage` for the package of that name.
    command = [sys.executable, "-P", __file__, *args]
    return subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def ask(process: subprocess.Popen[str], item: object) -> tuple[int, int]:
    """Nanoseconds and events of one program, once."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(item, file=process.stdin, flush=True)
    spent, num_events = process.stdout.readline().split()
    return int(spent), int(num_events)


def measure(commits: list[str], engine: str, num_programs: int, num_rounds: int) -> list[Figures]:
    """Return all commits over the programs that the first of them records."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="blockstep-")))
        trees = [stack.enter_context(tree_of(commit)) for commit in commits]
        recorder = start(trees[0], "--record", str(folder), engine, str(num_programs))
        recorder.communicate()
        assert recorder.returncode == 0, f"{commits[0]} records no programs"
        paths = sorted(folder.glob("*.json"))
        groups = {str(path): path.name.partition("-")[0] for path in paths}
        return compute_figures(commits, trees, ("--replay", engine), groups, num_rounds)


def measure_recording(commits: list[str], file: Path, num_rounds: int) -> list[Figures]:
    """Return the specification of all commits over the runs of a recording, by profile."""
    runs = pickle.loads(file.read_bytes())  # noqa: S301 - a recording of one's own
    groups = {str(number): name for number, (name, _, _) in enumerate(runs)}
    with ExitStack() as stack:
        trees = [stack.enter_context(tree_of(commit)) for commit in commits]
        task = ("--replay-recording", str(file.resolve()))
        return compute_figures(commits, trees, task, groups, num_rounds)


def compute_figures(
    commits: list[str],
    trees: list[Path],
    task: tuple[str, ...],
    groups: dict[str, str],
    num_rounds: int,
) -> list[Figures]:
    """Return the figures of each commit in each group of items; `task` is what a process does.

    `groups`: for each item, which is a line of the processes' input, the name of its group.
    """
    rounds = [replay_round(trees, task, list(groups)) for _ in range(num_rounds)]
    found = []
    for group in dict.fromkeys(groups.values()):
        chosen = [index for index, name in enumerate(groups.values()) if name == group]
        for number, commit in enumerate(commits):
            runs = [[one[index][number] for one in rounds] for index in chosen]
            nanoseconds = sum(min(spent for spent, _ in of_one) for of_one in runs)
            count = sum(of_one[0][1] for of_one in runs)
            found.append(Figures(commit, group, count, round(nanoseconds / count / 1e3, 1)))
    return found


def replay_round(
    trees: list[Path], task: tuple[str, ...], items: list[str]
) -> list[list[tuple[int, int]]]:
    """Nanoseconds and events of each item, once in a new process of each tree, by turns."""
    with ExitStack() as stack:
        processes = [stack.enter_context(start(tree, *task)) for tree in trees]
        found = [[ask(each, item) for each in processes] for item in items]
        for process in processes:
            process.communicate()
    return found


def main() -> None:
    """Measure the commits, or do one's part in it."""
    if sys.argv[1:2] == ["--record"]:
        return record(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    if sys.argv[1:2] == ["--replay"]:
        return replay(sys.argv[2])
    if sys.argv[1:2] == ["--replay-recording"]:
        return replay_recording(Path(sys.argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    parser.add_argument("--engine", default="host")
    parser.add_argument("--programs", type=int, default=60, help="of each preset")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recording", type=Path, help="the specification alone, on these events")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, a process for each commit")
    if args.recording is None:
        figures = measure(args.commits, args.engine, args.programs, args.rounds)
    else:
        figures = measure_recording(args.commits, args.recording, args.rounds)
    for row in figures:
        print(f"{row.group:<11} {row.commit:<10} {row.us_per_event:6.1f} us/event  {row.events:,}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in figures], indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
