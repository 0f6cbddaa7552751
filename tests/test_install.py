"""Installation of wheel and sdist outside of the checkout, and the GitHub action.

The wheel is installed next to the dependencies of this environment. Installing wheel and sdist with
all their dependencies is a soak, because it downloads them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

HOUSE = Path(__file__).resolve().parents[1]
ACTION = HOUSE / "action.yml"
WORKFLOW = HOUSE / "docs" / "how-to" / "blockstep-workflow.yml"
RIGHT, WRONG = "self.free[needed:]\n", "self.free[needed - 1 :]\n"
"""A line of the page's toy, and a mistake that gives one block to two requests."""
BUILD = """
import sys
from hatchling import build
print(build.build_wheel(sys.argv[1]), build.build_sdist(sys.argv[1]))
"""


@dataclass(frozen=True)
class Installed:
    """An environment with Blockstep in it, and an empty folder to work in."""

    bin: Path
    folder: Path
    env: Mapping[str, str]

    def run(self, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        return subprocess.run(
            [str(self.bin / str(args[0])), *map(str, args[1:])],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("built")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=HOUSE, capture_output=True, text=True, check=True,
    )  # fmt: skip
    wheel, sdist = done.stdout.split()[-2:]
    return folder / wheel, folder / sdist


def make_environment(folder: Path, with_pip: bool) -> Path:
    """Return the folder of programs of a new, empty environment."""
    pip = [] if with_pip else ["--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *pip, str(folder)], check=True)
    return folder / "bin"


def get_clean_environment(bin_folder: Path, home: Path, **env: str) -> dict[str, str]:
    """Return environment variables without anything of the checkout."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("LC_", "PIP_"))}
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOME": str(home), "COLUMNS": "100", **env}


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return an environment with the wheel; other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    bin_folder = make_environment(folder / "env", with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(bin_folder / "python")]
    install = ["install", "-q", "--no-deps", "--no-index", str(built[0])]
    subprocess.run([*pip, *install], cwd=folder, env={**os.environ, "PYTHONPATH": ""}, check=True)
    (folder / "work").mkdir()
    env = get_clean_environment(bin_folder, folder, PYTHONPATH=sysconfig.get_paths()["purelib"])
    return Installed(bin_folder, folder / "work", env)


def list_code(page: str, language: str = "python") -> list[str]:
    """Return the code blocks of a page."""
    text = (HOUSE / "docs" / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def write_toy(folder: Path, text: str = WRONG) -> None:
    """Write the scheduler of the page on adapters, with a planted mistake or another line."""
    (toy,) = (it for it in list_code("how-to/hold-your-engine.md") if "class Toy:" in it)
    assert toy.count(RIGHT) == 1
    (folder / "toy.py").write_text(toy.replace(RIGHT, text))
    (folder / "pyproject.toml").write_text(
        '[tool.blockstep]\nengine = "toy:Toy"\npreset = "tiny"\n'
    )


def play_the_way_in(place: Installed) -> None:
    """Follow the tutorial from an empty folder to the finding fixed in CI.

    The scheduler has a hundred lines. There are nine commands, including the installation; the
    files are those of the tutorial.
    """
    scheduler, adapter = list_code("tutorial/your-engine.md")
    (change,) = list_code("tutorial/your-engine.md", "diff")
    wrong, right = (line[1:].strip() for line in change.splitlines())
    assert 100 <= len(scheduler.splitlines()) <= 110
    assert scheduler.count(wrong) == 1
    shown = place.run(
        "python", "-c", "import blockstep.spec; print(blockstep.spec.__file__)"
    ).stdout
    assert str(place.bin.parent) in shown, "it is not the checkout's"
    (place.folder / "scheduler.py").write_text(scheduler)
    assert place.run("blockstep", "new-adapter", "my_adapter", "--safety").returncode == 0
    check = ("blockstep", "check", "--engine", "my_adapter:make", "--jobs", 1)
    open_yet = place.run(*check, "--budget", 100)
    assert (open_yet.returncode, "is not filled in" in open_yet.stdout) == (1, True), open_yet
    (place.folder / "my_adapter.py").write_text(adapter)
    (place.folder / "corpus").mkdir()
    found = place.run(*check, "--budget", 10_000, "--save", "corpus/preempted.json")
    assert (found.returncode, "CORRUPTION" in found.stdout) == (1, True), found.stdout
    assert place.run("blockstep", "explain", "P3").returncode == 0
    hunted = place.run("blockstep", "hunt", *check[2:], "--budget", 3000)
    assert (hunted.returncode, "1 defect in" in hunted.stdout) == (1, True), hunted.stdout
    plugin = (
        "-q",
        "--blockstep-corpus=corpus",
        "--blockstep-engine=my_adapter:make",
        "-k",
        "corpus",
    )
    tested = place.run("python", "-m", "pytest", *plugin)
    assert (tested.returncode, "1 failed" in tested.stdout) == (1, True), tested.stdout
    (place.folder / "scheduler.py").write_text(scheduler.replace(wrong, right))
    assert place.run("python", "-m", "pytest", *plugin).returncode == 0
    assert place.run(*check, "--budget", 10_000).returncode == 0


def test_the_tutorial_works_from_an_empty_folder(installed: Installed) -> None:
    play_the_way_in(installed)


def test_the_pytest_plugin_adds_no_warning_to_other_projects(
    installed: Installed, tmp_path: Path
) -> None:
    """Otherwise pytest would not start in a project that turns warnings into errors."""
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    done = replace(installed, folder=tmp_path).run("python", "-m", "pytest", "-q", "-W", "error")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(find_spec("crosshair") is None, reason="needs the extra [symbolic]")
def test_laws_have_mutants_without_a_checkout(installed: Installed) -> None:
    done = installed.run("blockstep", "prove", "--law", "allocation.longest_hit", "--jobs", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 of 1 mistakes and 3 of 3 mutants refuted" in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("number", [0, 1], ids=["wheel", "sdist"])
def test_the_tutorial_works_with_all_dependencies_installed(
    built: tuple[Path, Path], number: int, tmp_path: Path
) -> None:
    bin_folder = make_environment(tmp_path / "env", with_pip=True)
    env = get_clean_environment(bin_folder, Path.home())
    place = Installed(bin_folder, tmp_path / "work", env)
    place.folder.mkdir()
    done = place.run("python", "-m", "pip", "install", "-q", built[number], "pytest")
    assert done.returncode == 0, done.stderr
    play_the_way_in(place)


def test_the_sdist_has_the_files_that_users_look_for(built: tuple[Path, Path]) -> None:
    listed = subprocess.run(
        ["tar", "tzf", str(built[1])], capture_output=True, text=True, check=True
    ).stdout
    names = {line.partition("/")[2] for line in listed.splitlines()}
    assert names >= {
        *("LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "action.yml"),
        *("tests/test_install.py", "docs/how-to/blockstep-workflow.yml"),
    }


# The action.


SERVICES = (
    "actions/checkout@",
    "actions/setup-python@",
    "actions/cache@",
    "actions/upload-artifact@",
)
"""Steps that only GitHub can run; all other steps of action and workflow are run here."""
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
OWN = "./.github/actions/blockstep"


def list_steps(path: Path, *keys: str) -> list[dict[str, Any]]:
    value: Any = yaml.safe_load(path.read_text())
    for key in keys:
        value = value[key]
    steps: list[dict[str, Any]] = value["steps"]
    return steps


def get_defaults() -> dict[str, str]:
    """Return the optional inputs of the action with their defaults."""
    inputs: dict[str, dict[str, str]] = yaml.safe_load(ACTION.read_text())["inputs"]
    return {name: entry["default"] for name, entry in inputs.items() if "default" in entry}


def run_action(place: Installed, inputs: Mapping[str, str], summary: Path) -> dict[str, int]:
    """Return the exit code of each step that runs a command, in GitHub's order."""
    given, codes, has_failed = {**get_defaults(), **inputs}, {}, False
    for step in list_steps(ACTION, "runs"):
        if "uses" in step:
            assert step["uses"].startswith(SERVICES)
            continue
        if has_failed and step.get("if") != "always()":
            continue
        assert step["shell"] == "bash"
        env = {
            name: EXPRESSION.sub(lambda found: given[found[1].removeprefix("inputs.")], value)
            for name, value in step.get("env", {}).items()
        }
        assert not EXPRESSION.search(step["run"]), "an input in a script may be anything"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=place.folder,
            env={**place.env, **env, "GITHUB_STEP_SUMMARY": str(summary)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        codes[step["name"]], has_failed = done.returncode, has_failed or done.returncode != 0
        (place.folder / f"{step['name']}.txt").write_text(done.stdout + done.stderr)
    return codes


def test_the_workflow_passes_the_inputs_that_the_action_has(
    installed: Installed, built: tuple[Path, Path], tmp_path: Path
) -> None:
    """The steps of the workflow, including the action, run on a right and on a wrong engine."""
    steps = list_steps(WORKFLOW, "jobs", "check")
    assert all(step.get("uses", OWN).startswith((*SERVICES, OWN)) for step in steps)
    (own,) = (step["with"] for step in steps if step.get("uses") == OWN)
    known = {*get_defaults(), "package"}
    assert own.keys() <= known
    package = Path(own["package"])
    assert re.fullmatch(r"blockstep-[\d.]+-py3-none-any\.whl", package.name)
    place = Installed(installed.bin, tmp_path / "project", {**installed.env, "PIP_NO_INDEX": "1"})
    (place.folder / own["corpus"]).mkdir(parents=True)
    write_toy(place.folder)
    summary = tmp_path / "summary.md"
    fake = tmp_path / "python"  # pip is not in the environment
    fake.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then echo "$@" > installed.txt; exit 0; fi\n'
        f'exec "{installed.bin}/python" "$@"\n'
    )
    fake.chmod(0o755)
    env = {**place.env, "PATH": f"{tmp_path}{os.pathsep}{place.env['PATH']}"}
    place = Installed(place.bin, place.folder, env)
    inputs = {"package": str(built[0]), "budget": "4000", "arguments": "--jobs 1"}
    assert run_action(place, inputs, summary) == {"Install": 0, "Check": 1, "Annotate": 0}
    assert str(built[0]) in (place.folder / "installed.txt").read_text()
    annotation = (place.folder / "Annotate.txt").read_text()
    line = next(n for n, it in enumerate((place.folder / "toy.py").read_text().splitlines(), 1)
                if it.startswith("class Toy"))  # fmt: skip
    assert annotation.startswith(f"::error file=toy.py,line={line},title=Blockstep%3A P2 ")
    assert "1 failure in" in summary.read_text()
    kept = place.folder / "blockstep-results" / "found.json"
    kept.rename(place.folder / own["corpus"] / "found.json")
    write_toy(place.folder, RIGHT)
    inputs |= {"corpus": own["corpus"], "arguments": "--jobs 1 --seed 1"}
    codes = run_action(place, inputs, summary)
    assert codes == {"Install": 0, "Check": 0, "Annotate": 0}, place.folder
    played = json.loads((place.folder / "blockstep-results" / "check.json").read_text())
    assert [row["failure"] for row in played["corpus"]] == [None]
    assert "nothing wrong in" in summary.read_text()


def test_a_tag_needs_the_same_version_in_every_file(tmp_path: Path) -> None:
    """`make tag` rejects a version that the changelog lacks, and uncommitted changes."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    def commit() -> str:
        run("git", "add", "-A")
        run("git", "commit", "-qm", "x")
        return run(str(HOUSE / ".ci" / "tag")).stderr

    run("git", "init", "-q")
    run("git", "config", "user.name", "a")
    run("git", "config", "user.email", "a@b")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    (tmp_path / "CITATION.cff").write_text("version: 1.2.3\n")
    assert "no part '## 1.2.3'" in commit()
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2026-12-01)\n")
    assert "the tree has changes" in run(str(HOUSE / ".ci" / "tag")).stderr
    assert run("git", "tag").stdout == ""
    assert commit() == ""
    assert run("git", "tag").stdout == "v1.2.3\n"
    assert "already exists" in run(str(HOUSE / ".ci" / "tag")).stderr
