"""The pytest plugin, run by an inner pytest on engines that are right, wrong or crash."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from blockstep.conformance.judge.checks import PROPERTIES
from blockstep.conformance.pytest_plugin.fixture import Bench
from blockstep.conformance.report.per_property import ASPECTS, verdict_on
from blockstep.conformance.search.isolation import RefusedError
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Config

pytest_plugins = ["pytester"]

NUM_ITEMS = len(PROPERTIES) + len(ASPECTS)

ENGINES = '''
import os
from dataclasses import replace
from blockstep.conformance.engine import EngineTraits
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.protocol.registry import SpecEngine

class Bad(SpecEngine):
    """Loses a free block whenever the pool is half used."""
    def snapshot(self):
        snapshot = super().snapshot()
        if 2 * len(snapshot.free_queue) >= self.state.config.num_usable_blocks:
            return snapshot
        return replace(snapshot, free_queue=snapshot.free_queue[1:])

class Crashing(SpecEngine):
    count = 0
    def apply(self, event):
        Crashing.count += 1
        if Crashing.count == 30:
            os._exit(3)
        return super().apply(event)

class Silent(SpecEngine):
    """Shows no state."""
    def snapshot(self):
        return None
    def capabilities(self):
        return super().capabilities() - {"snapshot"}

class Seen(SpecEngine):
    """Writes down that a run of it has begun. No coverage goal can be reached."""
    traits = EngineTraits(out_of_reach=frozenset(WITNESSES))
    def snapshot(self):
        if not getattr(self, "is_running", False):
            self.is_running = True
            with open("runs", "a") as file:
                file.write("x")
        return super().snapshot()

class SeenBad(Bad, Seen):
    pass
'''

PROGRAM = """
from blockstep.conformance.protocol.program import Answer, Drain, Program
from blockstep.spec.vocabulary import Config, Request, Schedule, Submit

CONFIG = Config(num_blocks=4, block_size=2)
ACTIONS = (Submit(Request("A", (1, 2, 3), max_tokens=2)), Schedule(), Answer(), Drain())

def test_run(blockstep):
    blockstep.run(ACTIONS, config=CONFIG)
    blockstep.run(Program(CONFIG, ACTIONS))

def test_walk(blockstep):
    walk = blockstep.lockstep(CONFIG)
    walk.perform(*ACTIONS[:2])
    assert [row.request_id for row in walk.run.last_plan.rows] == ["A"]
    walk.perform(*ACTIONS[2:])
    assert not walk.run.live
"""


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]")
    pytester.makepyfile(plugged_engines=ENGINES)
    return pytester


def run(inner: pytest.Pytester, engine: str, *args: str) -> pytest.RunResult:
    """Run pytest in this process, or in a process of its own if warnings are errors."""
    name = engine if ":" in engine or engine == "spec" else f"plugged_engines:{engine}"
    options = (f"--blockstep-engine={name}", "--blockstep-event-seconds=2", "-p", "no:randomly")
    if "error" in args:
        return inner.runpytest_subprocess(*options, *args, timeout=150)
    return inner.runpytest_inprocess(*options, *args)


def read(inner: pytest.Pytester, name: str) -> Any:
    return json.loads((inner.path / name).read_text())


# Without an engine.


def test_without_an_engine_the_plugin_collects_and_imports_nothing(
    inner: pytest.Pytester,
) -> None:
    inner.makepyfile(
        """
        import sys
        def test_imports():
            ours = [name for name in sys.modules if name.startswith("blockstep.")]
            tools = "blockstep.conformance"
            light = ["protocol", "protocol.settings", "pytest_plugin"]  # it reads the table
            assert sorted(ours) == [tools, *(f"{tools}.{it}" for it in light)]
        def test_fixture(blockstep):
            raise AssertionError("unreachable")
        """
    )
    result = inner.runpytest_subprocess("-rs", "--strict-markers", "-W", "error")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["*no engine: name one with --blockstep-engine, or in *tool.blockstep*"]
    )


def write_table(inner: pytest.Pytester, *lines: str) -> None:
    (inner.path / "pyproject.toml").write_text("\n".join(["[tool.blockstep]", *lines]) + "\n")


def test_own_programs_are_played_on_the_engine_of_pyproject(inner: pytest.Pytester) -> None:
    """Tests of properties and presets are added by an option only."""
    write_table(inner, 'engine = "spec"')
    inner.makepyfile(PROGRAM)
    inner.runpytest_subprocess("--strict-config", "-W", "error").assert_outcomes(passed=2)


def test_the_table_sets_what_is_tested(inner: pytest.Pytester) -> None:
    write_table(inner, 'engine = "plugged_engines:Bad"', 'preset = "tiny"', "budget = 300")
    names = ("--collect-only", "-q", "--blockstep")
    result = inner.runpytest_inprocess(*names)
    assert len([line for line in result.outlines if "blockstep::tiny::" in line]) == NUM_ITEMS
    assert not [line for line in result.outlines if "blockstep::small::" in line]
    write_table(inner, 'engine = "plugged_engines:Bad"', 'profile = "vllm-9"')
    result = inner.runpytest_inprocess(*names)
    result.stderr.fnmatch_lines(["ERROR: *tool.blockstep.profile 'vllm-9': must be one of *"])
    result = inner.runpytest_inprocess(*names, "--blockstep-engine=spec")
    assert any("blockstep::small::" in line for line in result.outlines), "it is another engine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('engine = "spec"\npreset = "huge"', "*tool.blockstep.preset: 'huge': must be one of *"),
        ("enigne = 3", "*tool.blockstep.enigne: no such key; one of engine, *"),
        ('engine = "spec"\nknown = "no"', "--blockstep-known *no: there is no such folder*"),
        (None, "--blockstep: no pyproject.toml has a table *"),
    ],
)
def test_a_wrong_table_in_pyproject_is_a_usage_error(
    inner: pytest.Pytester, line: str | None, message: str
) -> None:
    if line is not None:
        write_table(inner, line)
    result = inner.runpytest_inprocess("--blockstep")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_pytest_does_not_warn_if_the_plugin_is_imported_already(inner: pytest.Pytester) -> None:
    name = "blockstep.conformance.pytest_plugin"
    inner.makepyfile("def test_nothing():\n    pass\n")
    code = f"import sys, pytest, {name}; sys.exit(pytest.main(['-W', 'error']))"
    assert inner.run(sys.executable, "-c", code).ret == 0


# Items.


def test_a_right_engine_passes_in_every_preset_under_xdist(inner: pytest.Pytester) -> None:
    """Each preset is checked once, whichever workers get its tests."""
    args = ("-n", "2", "--blockstep-budget=1000", "--blockstep-seed=11", "-v", "-W", "error")
    files = ("--blockstep-json=out.json", "--junitxml=out.xml")
    result = run(inner, "Seen", *args, *files, "--strict-markers")
    result.assert_outcomes(passed=2 * NUM_ITEMS)
    result.stdout.fnmatch_lines(
        [
            "*PASSED blockstep::tiny::P1 pool conservation*",
            "tiny: conforms: engine plugged_engines:Seen, equivalence exact, *",
            "small: conforms: engine plugged_engines:Seen, equivalence exact, *",
        ]
    )
    runs = read(inner, "out.json")["runs"]
    assert [entry["preset"] for entry in runs] == ["tiny", "small"]
    assert all(entry["check"]["conforms"] for entry in runs)
    num_episodes = sum(entry["check"]["num_episodes"] for entry in runs)
    assert len((inner.path / "runs").read_text()) == num_episodes, "a preset was checked twice"
    cases = list(ET.parse(inner.path / "out.xml").iter("testcase"))
    assert len(cases) == 2 * NUM_ITEMS
    verdict = next(case for case in cases if case.get("name") == "verdict")
    seen = {entry.get("name"): entry.get("value") for entry in verdict.iter("property")}
    assert seen["blockstep_seed"] == "11"
    assert int(seen["blockstep_num_events"] or 0) >= 1000


def test_a_wrong_engine_fails_its_properties_and_passes_no_test(
    inner: pytest.Pytester,
) -> None:
    args = ("--blockstep-preset=tiny", "--blockstep-json=out.json", "--junitxml=out.xml", "-rsf")
    result = run(inner, "Bad", "--blockstep-budget=3000", *args)
    result.assert_outcomes(failed=3, skipped=NUM_ITEMS - 3)
    result.stdout.fnmatch_lines(
        [
            "*blockstep::tiny::P1 pool conservation*",
            "blockstep check: VIOLATION at event * (P* engine plugged_engines:Bad, preset tiny, *",
            "  property    P1 every_block_is_free_or_held",
            "  program   (shrunk from *",
            "  reproduce  blockstep check --engine plugged_engines:Bad --preset tiny *",
            "*the run ended at another finding: P1 every_block_is_free_or_held",
            "FAILED blockstep::tiny::P1 pool conservation*",
            "FAILED blockstep::tiny::P16 policy order*",
            "FAILED blockstep::tiny::divergence*",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*pytest_plugin*in runtest*")
    failure = read(inner, "out.json")["runs"][0]["check"]["failure"]
    assert failure["findings"][0]["property"] == "P1"
    texts = [case.text or "" for case in ET.parse(inner.path / "out.xml").iter("failure")]
    assert len(texts) == 3
    assert all(text.startswith("blockstep check: VIOLATION") for text in texts)


def test_a_crashed_engine_fails_one_test_and_not_the_session(inner: pytest.Pytester) -> None:
    inner.makepyfile("def test_after(): pass")
    result = run(inner, "Crashing", "--blockstep-preset=tiny", "-rfs")
    result.assert_outcomes(passed=1, failed=1, skipped=NUM_ITEMS - 1)
    result.stdout.fnmatch_lines(
        [
            "blockstep check: FAULT at event * (engine plugged_engines:Crashing, *",
            "*the engine's process ended with exit code 3 at: *",
            "  program   (as it ran, not shrunk)",
            "  reproduce  blockstep check --engine * --preset tiny --seed 0 --episode *",
            "FAILED blockstep::tiny::fault*",
        ]
    )


def test_a_run_without_a_verdict_fails_its_verdict_test(inner: pytest.Pytester) -> None:
    """A preset without selected tests is not checked at all."""
    args = ("--blockstep-budget=300", "--blockstep-json=out.json", "-k", "tiny")
    result = run(inner, "spec", *args)
    result.assert_outcomes(passed=NUM_ITEMS - 1, failed=1)
    result.stdout.fnmatch_lines(["*tiny::verdict*", "NO VERDICT (coverage goals not reached*"])
    assert [entry["preset"] for entry in read(inner, "out.json")["runs"]] == ["tiny"]


def test_a_property_that_was_judged_in_part_is_skipped(inner: pytest.Pytester) -> None:
    result = run(inner, "Silent", "--blockstep-preset=tiny", "--blockstep-budget=300", "-rs")
    result.assert_outcomes(passed=3, failed=1, skipped=len(PROPERTIES))
    result.stdout.fnmatch_lines(
        ["*judged in part only, and nothing found: equivalence exact, no states shown"]
    )


def test_an_unknown_engine_is_an_error_of_every_test(inner: pytest.Pytester) -> None:
    result = run(inner, "Nobody", "--blockstep-preset=tiny", "-k", "P4 or P5")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["blockstep: engine 'plugged_engines:Nobody': cannot load*"])
    result.stdout.no_fnmatch_line("*Traceback*")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--blockstep-preset=huge", "--blockstep-preset 'huge': must be one of tiny, small, real"),
        ("--blockstep-profile=vllm-0", "--blockstep-profile 'vllm-0': must be one of strict*"),
        ("--blockstep-budget=long", "--blockstep-budget 'long': must be a time*"),
        ("--blockstep-seed=-1", "--blockstep-seed -1: must be 0 or above"),
        ("--blockstep-depth=0", "--blockstep-depth 0: must be 1 or above"),
        ("--blockstep-with=magic", "--blockstep-with, --blockstep-without: feature 'magic': *"),
        ("--blockstep-event-seconds=0", "--blockstep-event-seconds 0: must be above 0"),
        ("--blockstep-corpus=.", "--blockstep-corpus .: no program in it: a corpus is a folder*"),
        ("--blockstep-corpus=no", "--blockstep-corpus no: there is no such folder: *"),
        ("--blockstep-json=no/out.json", "--blockstep-json 'no/out.json': there is no such folder"),
        ("--blockstep-path=nowhere", "*--blockstep-path 'nowhere': there is no such folder"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_before_anything_runs(
    inner: pytest.Pytester, option: str, message: str
) -> None:
    result = inner.runpytest_inprocess("--blockstep-engine=spec", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_features_can_be_required_and_excluded(inner: pytest.Pytester) -> None:
    path = inner.path / "out.json"
    run(
        *(inner, "spec", "--blockstep-preset=tiny", "--blockstep-budget=300"),
        *("--blockstep-with=drafts", "--blockstep-without=caching", "--blockstep-without=pause"),
        f"--blockstep-json={path}",
    )
    check = json.loads(path.read_text())["runs"][0]["check"]
    assert (check["with"], check["without"]) == (["drafts"], ["caching", "pause"])
    assert check["witnesses"].get("prefix_hit", 0) == 0


def test_tests_of_the_plugin_are_selected_by_their_marker(inner: pytest.Pytester) -> None:
    inner.makepyfile("def test_own(): pass")
    both = ("--collect-only", "-q", "--blockstep-engine=plugged_engines:Crashing")
    for wanted, count in (("blockstep", 2 * NUM_ITEMS), ("not blockstep", 1)):
        result = inner.runpytest_inprocess(*both, "-m", wanted)
        assert len([line for line in result.outlines if "::" in line]) == count


# Programs of one's own.


def test_own_programs_fail_with_the_report_of_a_check(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_own=PROGRAM)
    result = run(inner, "Bad", "-m", "not blockstep")
    result.assert_outcomes(failed=2)
    for name in ("test_run", "test_walk"):
        result.stdout.fnmatch_lines(
            [
                "E*AssertionError: blockstep: VIOLATION at event 2: * (P1 *, engine plugged_*:Bad)",
                "E*property    P1 every_block_is_free_or_held",
                "E*1  submit    A prompt=1,2,3 max_tokens=2",
                f"E*reproduce  pytest 'test_own.py::{name}' --blockstep-engine=plugged_*:Bad*",
            ]
        )
    result.stdout.no_fnmatch_line("*pytest_plugin/*")


def test_a_corpus_is_a_test_for_each_program(inner: pytest.Pytester) -> None:
    """Each program is a test: it fails with its report, or is skipped for what the engine lacks."""
    request = {"request_id": "A", "prompt_token_ids": [1, 2, 3], "max_tokens": 2}
    program = {
        "format": "blockstep-program",
        "version": 1,
        "config": {"num_blocks": 4, "block_size": 2},
        "actions": [{"type": "Submit", "request": request}, {"type": "Schedule"}],
    }
    flight = {"num_blocks": 4, "max_frames_in_flight": 2, "async_scheduling": True}
    (inner.path / "corpus" / "kept").mkdir(parents=True)
    for name, text in (
        ("kept/leak.json", json.dumps(program)),
        ("flight.json", json.dumps({**program, "config": flight})),
        ("junk.json", "junk"),
    ):
        (inner.path / "corpus" / name).write_text(text)
    inner.makepyfile(
        lacking="""
        from plugged_engines import Bad
        class Sync(Bad):
            def capabilities(self):
                return super().capabilities() - {"async"}
        """
    )
    options = ("--blockstep-corpus=corpus", "-k", "corpus", "-rsf", "-v")
    result = run(inner, "lacking:Sync", *options)
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "blockstep::corpus::flight SKIPPED*",
            "blockstep::corpus::junk FAILED*",
            "blockstep::corpus::kept/leak FAILED*",
            "blockstep: corpus/junk.json: 'junk' *: a program is a JSON object *",
            "blockstep check: VIOLATION at event 2: * (P* engine lacking:Sync, *kept/leak.json)",
            "  reproduce  blockstep check --engine lacking:Sync --program corpus/kept/leak.json",
            "SKIPPED * not tried: async",
        ]
    )


def test_a_program_with_a_config_that_does_not_fit_is_skipped() -> None:
    class Narrow:
        def run(self, *_: object) -> None:
            raise RefusedError("config: block_size = 2: is not a config of this engine")

    narrow: Any = Narrow()
    bench = Bench(CheckOptions("x:y"), narrow, [], "test_it")
    with pytest.raises(pytest.skip.Exception, match="not tried: config: block_size = 2"):
        bench.run([], config=Config(num_blocks=4, block_size=2))


def test_other_tests_run_after_an_engine_crashed(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        PROGRAM.replace("Drain())", "*(Schedule(),) * 40)").replace("walk", "other")
        + "\ndef test_after(): pass\n"
    )
    result = run(inner, "Crashing", "-m", "not blockstep", "-k", "test_run or test_after")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*FAULT at event 30: * (engine plugged_engines:Crashing)"])


# The Hypothesis machine.

MACHINE = """
from blockstep.conformance.search.machine import machine
TestEngine = machine("plugged_engines:{engine}", "tiny").TestCase
"""
CONFTEST = """
from hypothesis import Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

shared = dict(database=DirectoryBasedExampleDatabase("examples"), stateful_step_count=10)
settings.register_profile("few", max_examples=4, phases=[Phase.generate], **shared)
settings.register_profile("again", phases=[Phase.reuse], **shared)
"""


def test_the_hypothesis_machine_follows_the_hypothesis_profile(inner: pytest.Pytester) -> None:
    inner.makeconftest(CONFTEST)
    inner.makepyfile(MACHINE.format(engine="Seen"))
    result = inner.runpytest_subprocess("--hypothesis-profile=few")
    result.assert_outcomes(passed=1)
    assert 4 <= len((inner.path / "runs").read_text()) < 20, (
        "a few examples may run nothing; the default is 100"
    )


def test_the_hypothesis_machine_uses_the_example_database(inner: pytest.Pytester) -> None:
    inner.makeconftest(CONFTEST.replace("max_examples=4", "max_examples=200"))
    inner.makepyfile(MACHINE.format(engine="SeenBad"))
    inner.runpytest_subprocess("--hypothesis-profile=few").assert_outcomes(failed=1)
    assert any((inner.path / "examples").rglob("*"))
    (inner.path / "runs").unlink()
    result = inner.runpytest_subprocess("--hypothesis-profile=again")
    result.assert_outcomes(failed=1)
    assert len((inner.path / "runs").read_text()) < 20, "it is replayed, not searched for"


# What a check means for an item.


def test_no_test_passes_if_the_check_did_not_conform() -> None:
    check: dict[str, Any] = {
        "failure": None, "conforms": False, "exit_code": 3, "num_events": 9, "equivalence": "exact",
        "shows_states": True,
    }  # fmt: skip
    subjects = [*(entry.id for entry in PROPERTIES), *ASPECTS]
    assert {verdict_on(subject, check)[0] for subject in subjects} == {"failed", "skipped"}
    spec = {"kind": "spec", "property": "", "sentence": "spec_assertions_hold"}
    check["failure"] = {"findings": [spec]}
    assert [name for name in subjects if verdict_on(name, check)[0] == "failed"] == ["verdict"]
    assert {verdict_on(subject, check)[0] for subject in subjects} == {"failed", "skipped"}


def test_a_stall_fails_its_property_and_liveness() -> None:
    stall = {"kind": "liveness", "property": "P10", "sentence": "every_request_ends"}
    check = {"failure": {"findings": [stall]}}
    subjects = [*(entry.id for entry in PROPERTIES), *ASPECTS]
    assert [name for name in subjects if verdict_on(name, check)[0] == "failed"] == [
        "P10",
        "liveness",
    ]


def test_divergence_is_skipped_if_nothing_is_compared() -> None:
    check = {
        "failure": None, "conforms": True, "exit_code": 0, "num_events": 9, "equivalence": "safety",
        "shows_states": True,
    }  # fmt: skip
    assert verdict_on("divergence", check)[0] == verdict_on("P1", check)[0] == "skipped"
    assert verdict_on("verdict", check)[0] == verdict_on("liveness", check)[0] == "passed"


# Engines that are not exact.

TOYS = Path(__file__).parents[2] / "support"


def test_an_engine_at_safety_is_tested_without_comparison(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        from blockstep.conformance.protocol.program import Answer, Drain
        from blockstep.spec.vocabulary import Abort, Config, Request, Schedule, Submit
        CONFIG = Config(num_blocks=9, block_size=4, enable_prefix_caching=False)
        ACTIONS = [Submit(Request("A", (1, 2, 3), max_tokens=3)), Schedule(), Answer(), Schedule()]
        def test_runs(blockstep):
            blockstep.run([*ACTIONS, Drain()], config=CONFIG)
        def test_walks(blockstep):
            walk = blockstep.lockstep(CONFIG)
            walk.perform(*ACTIONS, Drain())
            assert not walk.run.live
        def test_aborts(blockstep):
            blockstep.run([*ACTIONS, Abort(("A",)), Drain()], config=CONFIG)
        def test_config(blockstep):
            blockstep.run([], config=Config(num_blocks=9, enable_prefix_caching=True))
        """
    )
    asked = ("--blockstep-preset=tiny", "--blockstep-budget=1500", f"--blockstep-path={TOYS}")
    result = run(inner, "foreign_support.toys:PlainToy", *asked, "-rs")
    result.stdout.fnmatch_lines(
        [
            "tiny: conforms: engine foreign_support.toys:PlainToy, equivalence safety*",
            "SKIPPED*not tried: the engine lacks abort (1 actions left out)",
            "SKIPPED*enable_prefix_caching*is not a config of this engine*",
        ]
    )
    # Two programs pass, and fault, liveness and verdict; what was not judged is skipped.
    result.assert_outcomes(passed=2 + 3, skipped=NUM_ITEMS - 3 + 2)
