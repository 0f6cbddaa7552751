"""Table of every command on five engines: each cell is run, and works or is refused with a message.

    python -m benchmarks.commands --nano-vllm CHECKOUT --mini-sglang CHECKOUT

Writes benchmarks/results/commands.json, of which `make docs` makes the page. A column whose
checkout is not named keeps its cells of the run before. A checkout needs its history, for bisect.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from benchmarks._pages import make_table
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.program import Answer, Drain, Program
from blockstep.conformance.protocol.program_file import write_program
from blockstep.spec.vocabulary import Abort, Config, Request, Schedule, Submit

HOUSE = Path(__file__).resolve().parents[1]
CELLS = HOUSE / "benchmarks" / "results" / "commands.json"
SUPPORT = HOUSE / "tests" / "support"
WORKS = "works"
ENDS_WELL = {0, 1, 4, 5}
"""Exit codes of a command that has done its work, whatever it found (docs/reference/exit-codes.md).
Of an engine that is clean only 0, and 5 where a short run reached too little."""


@dataclass(frozen=True, slots=True)
class Column:
    """One engine."""

    title: str
    engine: str
    variable: str = ""
    """Environment variable with the path of its checkout."""
    is_clean: bool = True
    """Whether commands must find nothing wrong with it."""
    commits: tuple[str, str] | None = None
    """A good and a bad one of the checkout; of others a repository is made."""

    @property
    def path(self) -> str | None:
        """Return the folder that it is in; None if its checkout is not named."""
        return os.environ.get(self.variable) if self.variable else str(SUPPORT)


COLUMNS = (
    Column("`host`: exact", "host"),
    Column(
        *("`nano_vllm`", "nano_vllm", "BLOCKSTEP_NANO_VLLM"),
        is_clean=False,
        commits=("44a51af", "f64d821"),
    ),
    Column(
        *("`mini_sglang`", "mini_sglang", "BLOCKSTEP_MINI_SGLANG"),
        is_clean=False,
        commits=("7087e14", "c7f800d"),
    ),
    Column("a toy with aborts", "foreign_support.toys:AbortingToy"),
    Column("a toy without", "foreign_support.toys:PlainToy"),
)
LOCAL = tuple(column for column in COLUMNS if not column.variable)
"""Columns that need no checkout."""


@dataclass(frozen=True, slots=True)
class Row:
    """One command, as it is typed; ENGINE and PATH are the engine's, other capitals are files."""

    command: str
    is_slow: bool = False
    """It starts processes, or measures for a second and more."""

    @property
    def name(self) -> str:
        """Return the command without its options."""
        words = self.command.split()
        return " ".join(words[: 2 if words[0] in ("vectors", "bench") else 1])

    @property
    def is_of_history(self) -> bool:
        """Return whether it goes through the commits of a repository."""
        return self.name == "bisect"


AT = "--engine ENGINE --path PATH"
ROWS = (
    Row(f"check {AT} --preset tiny --budget 1500 --in-process"),
    Row(f"check {AT} --episode 1 --in-process --record TRACE"),
    Row(f"check {AT} --program PROGRAM --in-process"),
    Row(f"check {AT} --corpus CORPUS --preset tiny --budget 300 --in-process"),
    Row(f"hunt {AT} --budget 300", is_slow=True),
    Row(f"arms {AT} --workloads 5"),
    Row(f"score {AT} --budget 300", is_slow=True),
    Row(f"replay WORKLOAD {AT} --num-blocks 64"),
    Row(f"replay WORKLOAD {AT} --num-blocks 64 --no-spec"),
    Row(f"replay WORKLOAD {AT} --num-blocks 64 --policy priority"),
    Row(
        "bisect GOOD BAD --engine ENGINE --path REPOSITORY --preset tiny --without async "
        "--budget 2000 --jobs 1",
        is_slow=True,
    ),
    Row("validate TRACE"),
    Row("explain TRACE --at 3"),
    Row(f"explore {AT} --preset loop --max-states 300"),
    Row(f"vectors consume VECTORS {AT}"),
    Row(f"bench profile {AT} --scenario decode -n 1 --steps 4"),
    Row(f"bench profile {AT} --scenario drafts -n 1 --steps 4"),
    Row(f"bench scheduler {AT} --scenario decode -n 1 --steps 4", is_slow=True),
)


def make_files(folder: Path) -> dict[str, str]:
    """Write the files that commands need, and return their paths by placeholder."""
    files = {name: folder / name.lower() for name in ("TRACE", "WORKLOAD", "PROGRAM", "CORPUS")}
    row = '{"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}\n'
    files["WORKLOAD"].write_text(row * 3)
    first, second = Request("A", (1, 2, 3), max_tokens=3), Request("B", (1, 2), max_tokens=3)
    steps = (Submit(first), Submit(second), Schedule(), Answer(), Schedule(), Abort(("B",)))
    config = Config(num_blocks=9, block_size=4, max_model_len=32)
    files["CORPUS"].mkdir(exist_ok=True)
    text = write_program(Program(config, (*steps, Answer(), Drain())))
    files["PROGRAM"] = folder / "program.json"
    for path in (files["PROGRAM"], files["CORPUS"] / "first.json"):
        path.write_text(text)
    files["VECTORS"] = folder / "vectors.jsonl"
    run(["vectors", "fill", str(files["VECTORS"]), "--preset", "loop"])
    return {name: str(path) for name, path in files.items()}


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run a command in this process, and return its exit code and output."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"blockstep {' '.join(words)}: {result.exception!r}")
    return int(result.exit_code), result.output


GOOD_ENGINE = "class Engine({base}):\n    pass\n"
BAD_ENGINE = """
class Engine({base}):
    def apply(self, event):
        seen = super().apply(event)
        return type(seen)(()) if type(event).__name__ == "Commit" else seen
"""
"""Source of an engine that delivers no outputs."""


def make_history(column: Column, folder: Path) -> dict[str, str]:
    """Return a repository with a good and a bad commit of the column's engine, by the words of a
    row."""
    if column.commits is not None:
        assert column.path is not None
        good, bad = column.commits
        return {"REPOSITORY": column.path, "GOOD": good, "BAD": bad, "ENGINE": column.engine}
    module, _, base = column.engine.partition(":")
    source = "from blockstep.impl.host import HostEngine as Host\n"
    if base:
        source = (SUPPORT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    repository = folder / "repository"
    repository.mkdir()
    _git(repository, "init", "--quiet")
    for number, end in enumerate((GOOD_ENGINE, GOOD_ENGINE, BAD_ENGINE)):
        text = f"{source}\n\n{end.format(base=base or 'Host')}# {number}\n"
        (repository / "bisected.py").write_text(text, encoding="utf-8")
        _git(repository, "add", ".")
        _git(repository, "commit", "--quiet", "--message", f"Commit {number}")
    names = {"GOOD": "HEAD~2", "BAD": "HEAD", "ENGINE": "bisected:Engine"}
    return {"REPOSITORY": str(repository), **names}


def has_history(column: Column) -> bool:
    """Return whether there are commits to bisect: of a checkout, unless it is shallow."""
    if column.commits is None or column.path is None:
        return column.commits is None
    try:
        for name in column.commits:
            _git(Path(column.path), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        return False
    return True


def _git(repository: Path, *arguments: str) -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    command = ["git", *identity, "-c", "core.hooksPath=/dev/null", *arguments]
    subprocess.run(  # noqa: S603 - git, with names of ours
        command, cwd=repository, env=env, check=True, capture_output=True
    )


def run_cell(row: Row, column: Column, files: Mapping[str, str]) -> str:
    """Run a command on an engine, and return `WORKS` or the message with which it is refused.

    Raises:
        AssertionError: it crashed, printed more than a line, or found something in a clean engine.
    """
    assert column.path is not None, "its checkout is named"
    given = {"ENGINE": column.engine, "PATH": column.path, **files}
    code, output = run([given.get(word, word) for word in row.command.split()])
    message = f"blockstep {row.command} on {column.engine}: exit code {code}: {output}"
    assert "Traceback" not in output, message
    lines = [line for line in output.splitlines() if line]
    notices = [line for line in lines if line.startswith("blockstep: ") or "NOTHING RAN" in line]
    if code == 2 or (code == 5 and notices):
        assert len(lines) == len(notices) == 1, message
        return _clean(notices[0], given)
    if code == 5 and not any("NO VERDICT (coverage goals" in line for line in lines):
        return _clean(next(line for line in lines if "not " in line.lower()), given)
    assert code in ENDS_WELL, message
    assert not column.is_clean or code in (0, 5), message
    return WORKS


def _clean(sentence: str, given: Mapping[str, str]) -> str:
    """Return the message without the names of this machine's files."""
    for word, value in given.items():
        sentence = sentence.replace(value, word)
    sentence = re.sub(r"^blockstep: ", "", sentence)
    return sentence.replace("|", "\\|")


def run_column(
    column: Column, folder: Path, is_wanted: Callable[[Row], bool] = lambda _row: True
) -> dict[str, str]:
    """Return the cells of a column, by the row's command. Rows come in order: some write for
    others."""
    files, cells = make_files(folder), {}
    for row in filter(is_wanted, ROWS):
        history = make_history(column, folder) if row.is_of_history else {}
        cells[row.command] = run_cell(row, column, files | history)
    return cells


def find_commands() -> dict[str, bool]:
    """Return every command, and whether it takes an engine."""
    found: dict[str, bool] = {}

    def look(group: typer.core.TyperGroup, prefix: str) -> None:
        for name, command in group.commands.items():
            if isinstance(command, typer.core.TyperGroup):
                look(command, f"{prefix}{name} ")
            else:
                options = [option for param in command.params for option in param.opts]
                found[f"{prefix}{name}"] = "--engine" in options

    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    look(group, "")
    return found


def read_cells() -> dict[str, dict[str, str]]:
    """Return the cells of the last run, by the column's title and the row's command."""
    columns: dict[str, dict[str, str]] = json.loads(CELLS.read_text(encoding="utf-8"))
    return columns


def render(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page, from the cells by the column's title and the row's command."""
    titles = [column.title for column in COLUMNS]
    rows = [
        (f"`blockstep {row.command}`", *(columns[title][row.command] for title in titles))
        for row in ROWS
    ]
    others = [name for name, takes_engine in find_commands().items() if not takes_engine]
    lines = [make_table(("", *titles), rows)]
    given = {row.name for row in ROWS}
    plain = ", ".join(f"`{name}`" for name in others if name not in given)
    lines += [f"\nCommands that take no engine: {plain}.\n"]
    lines += ["\nThe pytest plugin (`--blockstep-engine`) and the state machine for Hypothesis "]
    lines += ["(`search.machine`) take all of these engines as well.\n"]
    return "".join(lines)


def main() -> int:
    """Run every cell and write what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nano-vllm", help="a checkout of nano-vllm")
    parser.add_argument("--mini-sglang", help="a checkout of mini-sglang")
    asked = parser.parse_args()
    for variable, folder in zip(
        ("BLOCKSTEP_NANO_VLLM", "BLOCKSTEP_MINI_SGLANG"),
        (asked.nano_vllm, asked.mini_sglang),
        strict=True,
    ):
        if folder is not None:
            os.environ[variable] = str(Path(folder).resolve())
    last, columns = read_cells(), dict[str, Mapping[str, str]]()
    for column in COLUMNS:
        if column.path is None:
            cells = last.get(column.title, {})
            missing = [row.command for row in ROWS if row.command not in cells]
            if missing:
                print(
                    f"{column.title}: {missing[0]!r} is not in {CELLS.name}: name a checkout",
                    file=sys.stderr,
                )
                return 2
            columns[column.title] = cells
            continue
        with tempfile.TemporaryDirectory() as folder:
            columns[column.title] = run_column(column, Path(folder))
    CELLS.write_text(json.dumps(columns, indent=1) + "\n", encoding="utf-8")
    print(CELLS.relative_to(HOUSE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
