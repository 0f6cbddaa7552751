"""Standalone scripts: each kept finding is shown by a script that needs only the engine."""

from __future__ import annotations

import contextlib
import io
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_support.installed import quiet

from blockstep.conformance.command.main import app
from blockstep.conformance.engine import EngineFactory, get_traits
from blockstep.conformance.engines.adapters import nano_vllm_script
from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import read_program
from blockstep.conformance.protocol.story import Script, Story, UnwritableError, show_call
from blockstep.conformance.search.options import CheckOptions, find_profile, load
from blockstep.conformance.search.standalone import make_script, verify
from blockstep.conformance.search.suppressions import KnownCause, SuppressionKind
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import Quirk

FOLDER = Path(__file__).parent / "issues"
"""Programs of findings, by engine and release."""
RELEASE = "0.33.0"
VLLM = sorted((FOLDER / f"vllm-{RELEASE}").glob("*.json"))
TRANSFORMERS = sorted((FOLDER / "transformers-5.24.0").glob("*.json"))
OF_VLLM_ALONE = 10
"""Least number of kept findings."""
pytestmark = [quiet, pytest.mark.filterwarnings("ignore::FutureWarning")]


def require(package: str, release: str) -> None:
    """Skip the test unless this release of a package is installed."""
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"needs {package} {release}, which is not installed")
    if installed != release:
        pytest.skip(f"needs {package} {release}; {installed} is installed")


def shows(script: Script) -> bool:
    """Return whether a script exits with status 1 and prints its evidence, in this process."""
    stream, status = io.StringIO(), None
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            exec(compile(script.source, "script", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code
    return int(status or 0) == 1 and script.evidence in stream.getvalue()


def get_forgiven(path: Path, make_engine: EngineFactory) -> frozenset[KnownCause]:
    """Return all known defects of the release but those that name a file."""
    own = set(path.stem.split("-"))
    quirks = find_profile(f"vllm-{RELEASE}").quirks - own
    workarounds = get_traits(make_engine).workarounds.keys() - own
    return frozenset(
        {KnownCause(SuppressionKind.QUIRK, name) for name in quirks}
        | {KnownCause(SuppressionKind.WORKAROUND, name) for name in workarounds}
    )


def write(path: Path, engine: str, forgiven: frozenset[KnownCause] | None = None) -> Script:
    options = CheckOptions(engine=engine)
    program: Program = read_program(path)
    script = make_script(options, load(options), program, "TITLE", forgiven)
    assert isinstance(script, Script), script
    assert "blockstep" not in script.source.lower()
    return script


def test_at_least_ten_findings_of_vllm_are_kept_and_four_of_transformers() -> None:
    assert len(VLLM) >= OF_VLLM_ALONE
    assert {path.stem for path in VLLM} & set(Quirk)
    assert len(TRANSFORMERS) == 4


def test_the_page_lists_findings_that_are_unknown_upstream() -> None:
    page = (FOLDER.parents[3] / "docs/how-to/report-a-defect.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert listed <= {path.stem for path in VLLM}
    unknown = {path.stem for path in VLLM if "not found upstream" in path.read_text()}
    assert unknown <= listed
    assert all(f"`{path.stem}`" in page for path in TRANSFORMERS)


@pytest.mark.parametrize("path", VLLM, ids=lambda path: path.stem)
def test_a_finding_shows_with_vllm_alone(path: Path) -> None:
    require("vllm", RELEASE)
    make_engine = load(CheckOptions(engine="vllm"))
    assert shows(write(path, "vllm", get_forgiven(path, make_engine)))


@pytest.mark.parametrize("path", TRANSFORMERS, ids=lambda path: path.stem)
def test_a_finding_shows_with_transformers_alone(path: Path) -> None:
    require("transformers", "5.24.0")
    is_async = read_program(path).config.async_scheduling
    assert shows(write(path, "transformers_async" if is_async else "transformers"))


def make_story(property_id: str, event: v.Event) -> Story:
    """Return the story of a finding after one event, of an engine that is not compared."""
    finding = Finding(FindingKind.PROPERTY, property_id, "a_check", "a message")
    config = v.Config(num_blocks=4, block_size=2)
    events = (v.Submit(v.Request("A", (1, 2, 3))), v.Schedule(), event)
    return Story("TITLE", "1", finding, config, events, None, None, ("A",), None, None)


def test_a_script_of_nano_vllm_shows_wrong_kv() -> None:
    commit = v.Commit(0, (v.RowTokens("A", (7,)),))
    script = nano_vllm_script.write_script(make_story("P3", commit))
    compile(script.source, "script", "exec")
    assert script.source.startswith('"""TITLE')
    assert "submit('A', [1, 2, 3], 16)\nschedule()\nanswer({'A': 7})\n" in script.source
    assert "blockstep" not in script.source


@pytest.mark.parametrize(
    ("story", "why"),
    [
        (make_story("P13", v.Schedule()), "neither wrong KV nor an exception"),
        (make_story("P3", v.Abort(("A",))), "no call for Abort"),
    ],
    ids=["finding", "event"],
)
def test_a_story_that_no_script_can_show_is_reported(story: Story, why: str) -> None:
    with pytest.raises(UnwritableError, match=why):
        nano_vllm_script.write_script(story)


def test_check_writes_a_script_that_has_shown_the_finding(tmp_path: Path) -> None:
    require("transformers", "5.24.0")
    path, script = FOLDER / "transformers-5.24.0/late_cancel.json", tmp_path / "repro.py"
    given = f"check --engine transformers --in-process --program {path} --save {script}"
    result = CliRunner().invoke(app, [*given.split(), "--standalone"])
    assert result.exit_code == 4
    assert "LIVENESS: request A never finishes" in script.read_text()


def test_no_script_is_written_by_an_adapter_that_has_none(tmp_path: Path) -> None:
    script = tmp_path / "repro.py"
    given = f"check --engine museum:forward-frees --preset tiny --budget 20000 --save {script}"
    result = CliRunner().invoke(app, [*given.split(), "--standalone"])
    assert result.exit_code == 1
    assert "no script: the adapter of museum:forward-frees writes no scripts" in result.output
    assert not script.exists()


@pytest.mark.parametrize("given", ["check", "check --save repro.json", "hunt"])
def test_a_script_needs_a_file(given: str) -> None:
    result = CliRunner().invoke(app, [*given.split(), "--engine", "host", "--standalone"])
    assert result.exit_code == 2
    assert "--standalone: needs --save" in result.output


def test_a_script_that_shows_nothing_is_rejected() -> None:
    why = verify(Script("print('all is well')\n", "seen"))
    assert why == (
        "the script does not show 'seen': exit status 0, and the end of what it prints is "
        "'all is well'"
    )
    assert "blockstep" in verify(Script("import blockstep\n", "seen"))
    assert not verify(Script("import sys\nprint('seen')\nsys.exit(1)\n", "seen"))


def test_a_long_call_is_wrapped() -> None:
    assert show_call("f", "1", a="2", b=None) == "f(1, a=2)"
    wrapped = show_call("f", *(f"argument_{n}" for n in range(20)))
    assert len(wrapped.splitlines()) > 1
    assert max(map(len, wrapped.splitlines())) <= 100
