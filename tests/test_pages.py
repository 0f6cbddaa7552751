"""The documentation is true: commands on pages exist, and quick ones give the output shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.report.verdict import TITLE, verdict_text
from blockstep.conformance.search.check import CheckResult
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.verdict_requirements import run_canary

HOUSE = Path(__file__).parent.parent
PAGES = {
    path.relative_to(HOUSE).as_posix(): path.read_text()
    for path in [HOUSE / "README.md", HOUSE / "CONTRIBUTING.md", *(HOUSE / "docs").rglob("*.md")]
}
OUTSIDE = {
    "pip": "installs",
    "g++": "compiles",
    "git": "fetches",
    "coverage": "measures another program",
    "for": "shell",
    "done": "shell",
    "cd": "shell",
    "export": "shell",
    "sh": "shell",
    "ray": "starts workers",
    "python": "runs code that the page shows, which has its own test",
}
"""Programs of console blocks that are not ours."""
COMMAND = typer.main.get_command(app)


def list_console_lines(page: str) -> Iterator[str]:
    """Yield the commands of fenced console blocks, with continued lines joined."""
    for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        joined = re.sub(r"\\\n(> )?", "", block)
        for line in joined.splitlines():
            if line.startswith(("$ ", "> ")):
                yield line[2:].strip()


def list_inline(page: str) -> Iterator[str]:
    """Yield the `blockstep` commands in running text."""
    yield from re.findall(r"`(blockstep [a-z][^`]*)`", page)


def find_problem(line: str) -> str:
    """Return why a command cannot be given like this, or ""."""
    words = shlex.split(line.replace("...", "x"), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return ""
    program, args = Path(words[0]).name, words[1:]
    if program == "coverage" and "run" in args:
        return ""
    if program == "blockstep":
        return find_problem_of_ours(COMMAND, args)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (HOUSE / "Makefile").read_text(), re.MULTILINE))
        wanted = [word for word in args if "=" not in word]
        return "" if targets.issuperset(wanted) else f"no such target: {wanted}"
    if program == "pytest":
        plugin = HOUSE / "conformance/blockstep/conformance/pytest_plugin/__init__.py"
        known = plugin.read_text()
        options = [word.partition("=")[0] for word in args if word.startswith("--blockstep")]
        unknown = [option for option in options if f'{option}"' not in known]
        return f"no such options: {unknown}" if unknown else ""
    return "" if program in OUTSIDE else f"{program}: whose program is that?"


def find_problem_of_ours(command: Any, args: list[str]) -> str:
    """Return why a `blockstep` command is wrong by its declaration, or ""; nothing is run."""
    if hasattr(command, "commands"):
        if not args or args[0].startswith("-"):
            return ""
        if args[0] not in command.commands:
            return f"no such command: {args[0]}"
        return find_problem_of_ours(command.commands[args[0]], args[1:])
    options = {
        name: param
        for param in command.params
        for name in (*param.opts, *param.secondary_opts)
        if param.param_type_name == "option"
    }
    options["--help"] = None
    rest = list(args)
    while rest:
        word, _, value = rest.pop(0).partition("=")
        if not word.startswith("-") or word == "-":
            continue
        if word not in options:
            return f"no such option: {word}"
        option = options[word]
        if option is not None and not option.is_flag and not value:
            if not rest:
                return f"{word}: needs a value"
            rest.pop(0)
    return ""


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_valid(page: str) -> None:
    problems = {line: find_problem(line) for line in list_console_lines(PAGES[page])}
    for line in list_inline(PAGES[page]):  # a sentence may speak of an option and not give it
        problem = find_problem(line)
        problems[line] = "" if problem.endswith("needs a value") else problem
    assert {line: problem for line, problem in problems.items() if problem} == {}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("blockstep chekc", "no such command: chekc"),
        ("blockstep vectors eat x", "no such command: eat"),
        ("blockstep check --engin host", "no such option: --engin"),
        ("blockstep check --seed", "--seed: needs a value"),
        ("make nothing", "no such target: ['nothing']"),
        ("pytest --blockstep-nothing=3", "no such options: ['--blockstep-nothing']"),
        ("rm -rf /", "rm: whose program is that?"),
    ],
)
def test_an_invalid_command_is_noticed(line: str, problem: str) -> None:
    assert find_problem(line) == problem


def test_commands_are_found_on_pages() -> None:
    assert sum(len(list(list_console_lines(page))) for page in PAGES.values()) > 40
    assert sum(len(list(list_inline(page))) for page in PAGES.values()) > 40


NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ENGINE = "from blockstep.conformance.protocol.registry import SpecEngine as make\n"
RUN = {
    "docs/tutorial/first-run.md": {
        ".venv/bin/blockstep check --episode 2 --preset tiny --record run.jsonl": 0,
        ".venv/bin/blockstep validate run.jsonl": 0,
        ".venv/bin/blockstep explain run.jsonl --at 12": 0,
    },
    "docs/how-to/hold-your-engine.md": {
        "blockstep check --engine mypkg.adapter:make --preset small --seed 0 --episode 17 "
        "--in-process": 0
    },
    "docs/reference/vectors.md": {
        "blockstep vectors fill pair.jsonl --preset pair": 0,
        "blockstep vectors consume pair.jsonl --engine mypkg.adapter:make": 0,
    },
}
"""Commands of consoles that are run here, in their order, and how they end.

Not run: what takes more than a few seconds (`check` without an episode, `hunt`, `arms`, `explore`,
`prove`), what needs what is not here (a trace from the net, a checkpoint, a released engine, numba)
and what installs (`make`).
"""


def run(line: str) -> Result:
    args = shlex.split(line)[1:]
    jobs = ("--jobs", "1") if args[0] == "check" else ()  # a process costs more than they do
    return CliRunner().invoke(app, [*args, *jobs], env={"COLUMNS": "100"})


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.soak) if page.endswith("vectors.md") else page
        for page in RUN
    ],
)
def test_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "adapter.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = list(list_console_lines(PAGES[page]))
    for line, code in RUN[page].items():
        assert line in shown
        result = run(line)
        assert result.exit_code == code, result.output


def test_the_tutorial_shows_the_last_lines_of_a_run() -> None:
    page = PAGES["docs/tutorial/first-run.md"]
    canary = run_canary(CheckOptions())
    result = CheckResult(CheckOptions(), num_events=1, seconds=1.0, canary_killed_after=canary)
    lines = verdict_text(result).splitlines()
    (shown,) = re.findall(r"```text\n(conforms: \.\.\. events.*?)```", page, re.DOTALL)
    first, reached, canary_line, last = shown.splitlines()
    assert lines[0] == first.replace("...", "1")
    assert reached.split(" ... ")[1] in lines[1]
    assert canary_line == lines[2]
    assert lines[-1].startswith(last.removesuffix(" ..."))
    assert "explain NAME" in TITLE


def test_the_tutorial_counts_the_actions_of_its_failure() -> None:
    """The command is that of a report in a snapshot."""
    page = PAGES["docs/tutorial/first-run.md"]
    assert ".venv/bin/blockstep check --engine museum:leak-on-abort --preset tiny" in page
    kept = (HOUSE / "tests/conformance/command/__snapshots__/test_command_output.ambr").read_text()
    report = kept.partition("engine museum:leak-on-abort, preset tiny")[2]
    found = re.search(r"shrunk from (\d+) actions to (\d+)", report)
    assert found is not None
    before, after = (NUMBERS[int(number)] for number in found.groups())
    assert f"{after} actions are left of {before}" in " ".join(page.split())


USER_WORDS_MAX = 10_000


def list_user_pages() -> list[str]:
    """Return the pages in the first section of the contents, "Use it", and the front page."""
    (listed,) = re.findall(r":caption: Use it\n\n(.*?)```", PAGES["docs/index.md"], re.DOTALL)
    return ["docs/index.md", *(f"docs/{name}.md" for name in listed.split())]


def test_user_pages_have_few_words() -> None:
    """Code and output do not count."""
    pages = [re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL) for name in list_user_pages()]
    assert sum(len(page.split()) for page in pages) <= USER_WORDS_MAX


def test_the_finding_in_five_lines_is_the_output_of_its_command() -> None:
    """The finding is reproduced by its last line, which is faster than finding it."""
    for name in ("docs/index.md", "docs/how-to/run-in-ci.md"):
        (shown,) = re.findall(
            r"```text\n(blockstep check: VIOLATION.*?)```", PAGES[name], re.DOTALL
        )
        again = shown.splitlines()[-1].split("reproduce", 1)[1].strip()
        result = run(f"{again} --brief")
        assert result.exit_code == 1
        assert result.stdout.strip() == shown.strip()


def test_the_explained_report_is_the_output_of_its_command() -> None:
    page = PAGES["docs/how-to/read-a-finding.md"]
    (command,), (shown, *_) = (
        re.findall(r"```console\n\$ (blockstep check --engine museum:.*?)\n```", page),
        re.findall(r"```text\n(.*?)```", page, re.DOTALL),
    )
    result = run(command)
    assert result.exit_code == 1
    assert result.stdout.split() == shown.split()
