"""The figures of the scheduler in docs/reference/performance.md, with their plots.

    python benchmarks/scheduler.py [--write] [--engine NAME ...] [--trace FILE] [PART ...]

Runs `blockstep bench scheduler` once for each part of the page. With `--write` it puts tables and
plots into the page and JSON into benchmarks/results; that needs vLLM and matplotlib beside us
(`make vllm`, and pip install matplotlib in its environment). Without, it shows decode only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "performance.md"
RUN = "import sys; sys.argv[0] = 'blockstep'; from blockstep.conformance.cli import main; main()"
PARTS = {
    "steady": "--scenario decode --scenario long --scenario async --scenario drafts "
    "-n 1 -n 64 -n 256 -n 1024 --steps 48",
    "churn": "--scenario mixed --scenario hits --scenario storm --scenario priority "
    "--scenario pool -n 8 -n 64 -n 256 --steps 64",
    "trace": "--limit 2000",
}


def run(arguments: list[str]) -> None:
    """One `blockstep bench scheduler`; what it says is seen. Raises if it fails."""
    command = [sys.executable, "-c", RUN, "bench", "scheduler", *arguments]
    subprocess.run(command, check=True, cwd=ROOT)  # noqa: S603 - our own command


def write_part(part: str, arguments: list[str]) -> None:
    """Measure a part, and put it between its marks on the page."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    files = ["--json", f"benchmarks/results/{date}-scheduler-{part}-2core.json"]
    if part != "trace":
        files += ["--plot", f"docs/reference/scheduler-{part}.svg"]
    markdown = f"benchmarks/results/scheduler-{part}.md"
    run([*arguments, *files, "--markdown", markdown])
    text = (ROOT / markdown).read_text(encoding="utf-8")
    (ROOT / markdown).unlink()
    text = re.sub(r" --markdown [^\s`]+", "", text)
    mark = f"<!-- bench scheduler: {part} -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(mark)
    _, _, after = rest.partition(mark)
    PAGE.write_text(f"{before}{mark}\n\n{text}\n{mark}{after}", encoding="utf-8")


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--engine", action="append")
    parser.add_argument("--trace", help="mooncake_conversation.jsonl.gz, for the part of that name")
    args = parser.parse_args()
    engines = args.engine or (["host", "vllm"] if args.write else ["host"])
    chosen = [option for name in engines for option in ("--engine", name)]
    if not args.write:
        run([*chosen, "--scenario", "decode", "-n", "1", "-n", "64", "-n", "1024"])
        return
    for part in args.parts or [part for part in PARTS if part != "trace" or args.trace]:
        extra = ["--trace", args.trace] if part == "trace" else []
        write_part(part, [*chosen, *extra, *PARTS[part].split()])


if __name__ == "__main__":
    main()
