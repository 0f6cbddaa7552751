"""Settings: the table `[tool.blockstep]`, engines that packages announce, and names with `@`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from blockstep.conformance.command import engines
from blockstep.conformance.command.main import app
from blockstep.conformance.engine import EngineTraits, Safety, get_equivalence_name
from blockstep.conformance.protocol import registry
from blockstep.conformance.protocol.registry import EngineNotFoundError, SpecEngine, load_engine
from blockstep.conformance.protocol.settings import SettingsError, find_settings
from blockstep.spec.profiles import PROFILES

ENGINES = """
from blockstep.conformance.protocol.registry import SpecEngine

class Tabled(SpecEngine):
    pass
"""


class Safe(SpecEngine):
    """An engine whose traits name its equivalence."""

    traits = EngineTraits(equivalence=Safety())


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an engine of its own, in whose subfolder commands run."""
    (tmp_path / "tabled_engines.py").write_text(ENGINES)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tabled_engines", raising=False)
    return tmp_path


def write(project: Path, *lines: str) -> None:
    table = ['[tool.other]\nengine = "no"', "[tool.blockstep]", *lines]
    (project / "pyproject.toml").write_text("\n".join(table) + "\n")


def check(*args: object) -> dict[str, object]:
    """The JSON of a check."""
    record: dict[str, object] = json.loads(blockstep("check", *args, "--json", "-").stdout)
    return record


def test_the_table_of_a_parent_folder_sets_engine_and_options_of_a_check(project: Path) -> None:
    write(project, 'engine = "tabled_engines:Tabled"', 'preset = "tiny"', 'equivalence = "renamed"')
    record = check("--episode", 1, "--in-process")
    assert record["engine"] == "tabled_engines:Tabled@renamed"
    assert (record["preset"], record["equivalence"], record["exit_code"]) == ("tiny", "renamed", 0)
    assert check("--episode", 1, "--preset", "small", "--in-process")["preset"] == "small"


def test_the_table_names_the_profile_except_for_a_run_that_reproduces(project: Path) -> None:
    write(project, 'engine = "tabled_engines:Tabled"', 'preset = "tiny"', 'profile = "vllm-0.19.1"')
    played = ("--budget", 200, "--jobs", 1, "--in-process")
    assert check(*played)["profile"] == "vllm-0.19.1"
    assert check(*played, "--profile", "strict")["profile"] == "strict"
    assert check("--episode", 1, "--in-process")["profile"] == "strict"


@pytest.mark.parametrize("budget", ["300", '"300"', '"1s"'])
def test_the_table_sets_the_budget(project: Path, budget: str) -> None:
    write(project, 'engine = "tabled_engines:Tabled"', f"budget = {budget}", 'preset = "tiny"')
    record = check("--jobs", 1, "--in-process")
    assert int(str(record["num_events"])) < 20_000


def test_the_table_does_not_apply_to_another_engine(project: Path) -> None:
    write(project, 'engine = "tabled_engines:Tabled"', 'preset = "tiny"', 'corpus = "nowhere"')
    record = check("--engine", "spec", "--episode", 1)
    assert (record["engine"], record["preset"]) == ("spec", "small")
    named = check("--engine", "tabled_engines:Tabled", "--episode", 1, "--in-process")
    assert named["preset"] == "tiny", "it is the same engine, and --episode needs no corpus"


def test_every_other_command_takes_the_engine(project: Path) -> None:
    write(project, 'engine = "tabled_engines:Tabled"')
    commands = {
        "hunt": ("--budget", 1, "--preset", "tiny", "--in-process"),
        "arms": ("--workloads", 1, "--preset", "tiny"),
        "score": ("--budget", 1, "--preset", "tiny"),
    }
    for command, args in commands.items():
        record = json.loads(blockstep(command, *args, "--json", "-").stdout)
        assert record["engine"] == "tabled_engines:Tabled", command
    write(project, 'engine = "host"')
    result = blockstep("bisect", "a", "b", "--path", ".")
    assert (result.exit_code, "--engine host: is one of ours" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['enigne = "host"'], "tool.blockstep.enigne: no such key; one of engine, equivalence, "),
        (['preset = "tiny"'], "tool.blockstep: names no engine"),
        (["engine = 3"], "tool.blockstep.engine: must be a text, not 3"),
        (['engine = "host"', "budget = true"], "tool.blockstep.budget: must be a number of events"),
        (['engine = "host"', 'budget = "long"'], "tool.blockstep.budget 'long': must be a time"),
        (['engine = "host"', 'preset = "huge"'], "tool.blockstep.preset: 'huge': must be one of"),
        (['engine = "host"', 'profile = "old"'], "tool.blockstep.profile 'old': must be one of"),
        (['engine = "host"', 'equivalence = "near"'], "tool.blockstep.equivalence: 'near': must"),
        (['engine = "host"', "= 1"], "cannot be read: "),
        (['engine = "nowhere"'], "engine 'nowhere': neither one of"),
        (['engine = "host"', 'corpus = "no"'], "there is no such folder"),
    ],
)
def test_an_invalid_table_is_rejected_in_one_line(
    project: Path, lines: list[str], message: str
) -> None:
    write(project, *lines)
    result = blockstep("check", "--budget", 1)
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert "Traceback" not in result.output


def test_an_invalid_table_does_not_break_help(project: Path) -> None:
    write(project, 'enigne = "host"')
    assert blockstep("check", "--help").exit_code == 0
    assert blockstep("explain", "P1").exit_code == 0


def test_the_nearest_table_is_read_past_files_without_one(tmp_path: Path) -> None:
    write(tmp_path, 'engine = "outer:make"', 'corpus = "kept"')
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    found = find_settings(inner)
    assert found is not None
    assert (found.engine, found.corpus) == ("outer:make", tmp_path / "kept")
    write(inner, 'engine = "inner:make"')
    assert (nearest := find_settings(inner)) is not None
    assert nearest.engine == "inner:make"
    (inner / "pyproject.toml").write_text("[tool]\nblockstep = 3\n")
    with pytest.raises(SettingsError, match=r"tool.blockstep: must be a table"):
        find_settings(inner)


# Names.


def test_a_name_may_end_with_an_equivalence() -> None:
    assert get_equivalence_name(load_engine("host@plan")) == "plan"
    assert get_equivalence_name(load_engine("host@exact")) == "exact"
    assert get_equivalence_name(load_engine(f"{__name__}:Safe@safety")) == "safety"
    assert get_equivalence_name(load_engine("spec@renamed", PROFILES[-1])) == "renamed"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("host@near", "equivalence 'near': one of exact, renamed, plan, safety"),
        ("host@", "equivalence '': one of exact"),
        (f"{__name__}:Safe@plan", "its traits say equivalence safety, not plan"),
        (f"{__name__}:Safe@exact", "its traits say equivalence safety, not exact"),
    ],
)
def test_an_unknown_or_conflicting_equivalence_is_rejected(name: str, message: str) -> None:
    with pytest.raises(EngineNotFoundError, match=message):
        load_engine(name)


def announce(folder: Path, package: str, *lines: str) -> None:
    """Write the metadata of an installed package that announces engines."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[blockstep.engines]", *lines]) + "\n")


def test_packages_announce_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tabled_engines.py").write_text(ENGINES)
    announce(tmp_path, "one", "tabled = tabled_engines:Tabled", "host = json:loads")
    announce(tmp_path, "two", "broken = no.such.module:make", "twice = json:loads")
    announce(tmp_path, "three", "twice = json:dumps")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tabled_engines", raising=False)
    record = check("--engine", "tabled", "--episode", 1, "--preset", "tiny")
    assert (record["engine"], record["exit_code"]) == ("tabled", 0)
    result = blockstep("check", "--engine", "twice")
    assert result.exit_code == 2
    assert "announced as json:loads and as json:dumps; choose one" in result.output
    few = {"host": registry.KNOWN_ENGINES["host"]}
    monkeypatch.setattr(engines, "KNOWN_ENGINES", few)  # to build them all takes long
    listed = {row["name"]: row for row in json.loads(blockstep("engines", "--json", "-").stdout)}
    assert listed["tabled"]["target"] == "tabled_engines:Tabled"
    assert listed["broken"]["implements"].startswith("cannot be loaded: ")
    assert listed["host"]["target"] == "blockstep.impl.host:HostEngine", "ours keep their names"
