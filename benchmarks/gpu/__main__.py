"""Everything that is worth running on a GPU, in parts.

    python -m benchmarks.gpu [PART ...] [--again] [--results FOLDER] [-- OPTIONS OF PYTEST]

`.ci/gpu` and `make gpu` call this with the Python that has torch for the GPU. Without the name of a
part all are run, in the order of their worth, each even if one before it failed. A part that passed
on the same sources and device is not run again without `--again`. FOLDER gets `gpu.json` (machine,
parts, figures, aims) and `raw.tgz` (what each command printed).

Exit status: 0 all passed, 1 something failed, was stopped at its limit or could not be run, 2
nothing was run. With `--strict` it is 1 unless every aim is met.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from benchmarks._pages import get_commit
from benchmarks.gpu.aims import AIMS, Aim
from benchmarks.gpu.parts import Part, list_parts
from benchmarks.gpu.runner import (
    FILE,
    LEFT_OUT,
    NOT_RUN,
    PACKED,
    Runner,
    ending_at_sigterm,
    make_file_name,
    make_summary,
)

ROOT = Path(__file__).resolve().parents[2]
CUDA = Path("/usr/local/cuda/bin")
"""Folder of CUDA's tools, if they are not on the path."""


def find_tool(name: str) -> str:
    """Return the path of a tool in CUDA's folder, or its name if it is not there."""
    there = CUDA / name
    return str(there) if name and "/" not in name and there.exists() else name


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--again", action="store_true", help="run what has passed, too")
    parser.add_argument("--results", type=Path, default=ROOT / ".gpu-results", metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=360, help="for all parts together")
    parser.add_argument("--strict", action="store_true", help="fail unless every aim is met")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="empty: left out")
    parser.add_argument("--about", type=json.loads, default={}, help="the machine, as JSON")
    parser.add_argument("--list", action="store_true", help="only print the parts")
    return parser


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments before `--`, and those behind it, which are the pytest's."""
    before, behind = list(arguments), []
    if "--" in before:
        place = before.index("--")
        before, behind = before[:place], before[place + 1 :]
    return before, behind


def main(
    arguments: Sequence[str],
    make_parts: Callable[..., list[Part]] = list_parts,
    aims: Sequence[Aim] = AIMS,
) -> int:
    """Run the named parts, print what became of each and the aims; return the exit status."""
    own, for_pytest = split_options(arguments)
    parser = make_parser()
    options = parser.parse_args(own)
    known = make_parts(
        for_pytest, find_tool(options.sanitizer), find_tool("ncu"), find_spec("xdist") is not None
    )
    names = [part.name for part in known]
    if options.list:
        for part in known:
            print(f"{part.name:<18} {part.limit:4.0f} s  {part.about}")
        return 0
    unknown = [name for name in options.parts if name not in names]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(names)}")
    parts = [part for part in known if not options.parts or part.name in options.parts]
    about = {**options.about, "commit": get_commit()}
    runner = Runner(options.results, about, ROOT, options.seconds, aims)
    with ending_at_sigterm():
        runner.run(parts, again=options.again)
    verdicts = runner.judge()
    in_order = {name: runner.results[name] for name in names if name in runner.results}
    print(make_summary(in_order, verdicts))
    kept = make_file_name(datetime.now(UTC).date().isoformat(), about.get("device", "none"))
    print(f"written: {options.results / FILE}, {options.results / PACKED}")
    print(f"to keep it: cp {options.results / FILE} benchmarks/results/{kept}")
    results = [runner.results[part.name] for part in parts]
    if all(result.status in (NOT_RUN, LEFT_OUT) for result in results):
        return 2
    is_short = options.strict and any(verdict.word != "met" for verdict in verdicts)
    return int(is_short or any(result.is_failure for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
