"""Throughput of the lock-step at several commits, on the same programs, with all checks on.

    python -m benchmarks.commits COMMIT... [--engine NAME] [--programs N] [--rounds N] [--json FILE]

The first commit records programs of both presets, so that they ask for nothing that it lacks. Each
commit then replays them in a process of its own; a commit called `.` is the working tree. The
processes take turns program by program, since the speed of a machine varies over time. Two
processes that do the same also differ by several per cent, depending on their memory layout, so
each round has new ones. Of each program its quickest run counts. Prints microseconds of processor
time per event.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from blockstep.conformance.lockstep.runs import run_program
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import read_program, write_program
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions

ROOT = Path(__file__).parent.parent
PRESETS = ("tiny", "small")


@dataclass
class Figures:
    """Figures of one commit with one preset."""

    commit: str
    preset: str
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


def ask(process: subprocess.Popen[str], path: Path) -> tuple[int, int]:
    """Nanoseconds and events of one program, once."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(path, file=process.stdin, flush=True)
    spent, num_events = process.stdout.readline().split()
    return int(spent), int(num_events)


def measure(commits: list[str], engine: str, num_programs: int, num_rounds: int) -> list[Figures]:
    """Return all commits over the programs that the first of them records."""
    found = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="blockstep-")))
        trees = [stack.enter_context(tree_of(commit)) for commit in commits]
        recorder = start(trees[0], "--record", str(folder), engine, str(num_programs))
        recorder.communicate()
        assert recorder.returncode == 0, f"{commits[0]} records no programs"
        paths = sorted(folder.glob("*.json"))
        rounds = [replay_round(trees, engine, paths) for _ in range(num_rounds)]
    for preset in PRESETS:
        chosen = [index for index, path in enumerate(paths) if path.name.startswith(preset)]
        for number, commit in enumerate(commits):
            runs = [[one[index][number] for one in rounds] for index in chosen]
            nanoseconds = sum(min(spent for spent, _ in of_one) for of_one in runs)
            count = sum(of_one[0][1] for of_one in runs)
            found.append(Figures(commit, preset, count, round(nanoseconds / count / 1e3, 1)))
    return found


def replay_round(trees: list[Path], engine: str, paths: list[Path]) -> list[list[tuple[int, int]]]:
    """Nanoseconds and events of each program, once in a new process of each tree, by turns."""
    with ExitStack() as stack:
        processes = [stack.enter_context(start(tree, "--replay", engine)) for tree in trees]
        found = [[ask(each, path) for each in processes] for path in paths]
        for process in processes:
            process.communicate()
    return found


def main() -> None:
    """Measure the commits, or do one's part in it."""
    if sys.argv[1:2] == ["--record"]:
        return record(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    if sys.argv[1:2] == ["--replay"]:
        return replay(sys.argv[2])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    parser.add_argument("--engine", default="host")
    parser.add_argument("--programs", type=int, default=60, help="of each preset")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, a process for each commit")
    figures = measure(args.commits, args.engine, args.programs, args.rounds)
    for row in figures:
        print(f"{row.preset:<6} {row.commit:<10} {row.us_per_event:6.1f} us/event  {row.events:,}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in figures], indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
