"""Scheduler benchmark: timed engines make the same decisions, and reports are right.

Nothing is timed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from foreign_support.toys import PlainToy
from typer.testing import CliRunner, Result

from blockstep.conformance.bench.measure import (
    REHEARSAL,
    Measurement,
    Reading,
    Spread,
    get_slope,
    measure,
    merge_rounds,
    rehearse,
)
from blockstep.conformance.bench.profile import name_function, profile, to_lines
from blockstep.conformance.bench.report import get_ratio, make_markdown, make_rows, to_json
from blockstep.conformance.bench.scenarios import SCENARIOS, Scenario
from blockstep.conformance.bench.timed_engines import (
    ArraySide,
    NotEqualError,
    TimedEngine,
    find_obstacle,
    open_side,
    split,
)
from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.options import ExitCode
from blockstep.spec.vocabulary import Ack, Commit, OutputRow, Outputs

SIDES = ("host", "tests.conformance.bench.test_bench:make_plain_host")
QUICK = ("decode", "storm", "drafts", "async")
"""Scenarios without a long start."""


class Plain:
    """An engine that has the protocol's methods only, and no arrays."""

    def __init__(self, engine: Any) -> None:
        self.apply, self.snapshot = engine.apply, engine.snapshot
        self.capabilities = engine.capabilities


def make_plain_host(config: Any) -> Plain:
    return Plain(load_engine("host")(config))


def make_host_that_preempts_the_oldest(config: Any) -> Plain:
    """A host engine that preempts the oldest request instead of the newest."""
    return Plain(load_engine("museum:oldest-preempted")(config))


def change_commits(engine: Any, change: Callable[[Any], Any]) -> Any:
    apply = engine.apply
    engine.apply = lambda event: change(apply(event)) if isinstance(event, Commit) else apply(event)
    return engine


def make_broken_host(config: Any) -> Any:
    return change_commits(Plain(load_engine("host")(config)), lambda _outputs: int("no"))


def make_host_that_answers_ack(config: Any) -> Any:
    return change_commits(Plain(load_engine("host")(config)), lambda _outputs: Ack())


def make_toy_with_unknown_outputs(config: Any) -> Any:
    rows = (OutputRow("r77", (1,)),)
    return change_commits(load_engine(TOYS[0])(config), lambda _outputs: Outputs(rows))


make_toy_with_unknown_outputs.traits = PlainToy.traits  # type: ignore[attr-defined]
COUNTER = count()


def make_toy_with_changing_budget(config: Any) -> Any:
    """A toy that has a smaller token budget in every second run."""
    return PlainToy(replace(config, max_num_batched_tokens=64 - next(COUNTER) % 2))


make_toy_with_changing_budget.traits = PlainToy.traits  # type: ignore[attr-defined]


def run(scenario: str, engines: tuple[str, ...], size: int, steps: int = 8) -> Measurement:
    return measure(SCENARIOS[scenario], size, engines, steps, False, lambda _done, _text: None)


@pytest.mark.parametrize("scenario", QUICK)
def test_timed_engines_make_the_same_decisions_at_each_size(scenario: str) -> None:
    for size in (2, 14):
        entry = run(scenario, SIDES, size)
        assert {found.engine for found in entry.readings} == set(SIDES)
        assert entry.num_steps == 8
        assert entry.rows_mean > 0


@pytest.mark.parametrize("scenario", ["window", "recurrent"])
def test_timed_engines_make_the_same_decisions_with_several_kv_groups(scenario: str) -> None:
    assert run(scenario, SIDES, 3).rows_mean == 3


def test_each_step_of_waves_admits_and_finishes_all_requests() -> None:
    entry = run("waves", SIDES, 5)
    assert (entry.rows_mean, entry.new_mean, entry.tokens_mean) == (5, 5, 160)


def test_an_engine_with_arrays_is_timed_through_apply_too() -> None:
    def advance(_done: float, _text: str) -> None:
        pass

    entry = measure(SCENARIOS["decode"], 3, ("host",), 8, False, advance, through_apply=True)
    readings = [(found.engine, found.reading) for found in entry.readings]
    assert readings == [("host", "arrays"), ("host", "materialised"), ("host", "protocol")]


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_the_token_budget_exceeds_what_running_requests_need(scenario: Scenario) -> None:
    for size in (1, 8, 64, 256, 1024, scenario.num_running_max):
        config = scenario.get_config(size)
        assert config.max_num_batched_tokens > size * (1 + config.num_speculative_tokens)


def test_the_mixed_scenario_admits_as_many_requests_as_finish() -> None:
    for size in (256, 1024, 4096):
        budget = SCENARIOS["mixed"].get_config(size).max_num_batched_tokens
        lengths = list(islice(SCENARIOS["mixed"].get_requests(size), 128))
        prompts = sum(len(request.prompt_token_ids) for request in lengths)
        outputs = sum(request.max_tokens for request in lengths)
        # Decodes take one token each; the rest of the budget must admit as many as finish.
        assert (budget - size) * outputs > size * prompts


TOYS = ("foreign_support.toys:PlainToy", "foreign_support.toys:AbortingToy")


def bench(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, args)])


@pytest.mark.parametrize("engine", [*TOYS, "foreign_support.hosts:AtSafety"])
def test_an_engine_that_is_not_exact_is_timed_alone(engine: str) -> None:
    assert split(["host", engine, "spec"]) == [("host", "spec"), (engine,)]
    entry = run("storm", (engine,), 4)
    assert (entry.equivalence, entry.num_steps) == ("safety", 8)
    assert {found.engine for found in entry.readings} == {engine}
    drafts = SCENARIOS["drafts"].get_config(4)
    assert find_obstacle(engine, drafts) == ("drafts" if engine in TOYS else None)


@pytest.fixture
def _rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the rehearsal before a measurement, since nothing is timed here."""
    monkeypatch.setattr("blockstep.conformance.bench.measure.REHEARSAL", {"decode": 1})


@pytest.mark.usefixtures("_rehearsed")
def test_an_engine_that_is_not_exact_is_marked_in_the_results(tmp_path: Path) -> None:
    out, toy = tmp_path / "out.json", TOYS[1]
    asked = ("--engine", "host", "--engine", toy, "--scenario", "decode", "--scenario", "drafts")
    result = bench("scheduler", *asked, "-n", 1, "--steps", 4, "--json", out)
    assert result.exit_code == ExitCode.CONFORMS, result.output
    assert f"{toy}: compared with no other (equivalence safety" in result.output
    assert f"config        {toy}, decode: enable_prefix_caching=False" in result.output
    assert f"not measured  {toy}, drafts: the engine lacks drafts" in result.output
    entries = json.loads(out.read_text())["measurements"]
    assert {(entry["scenario"], entry["equivalence"]) for entry in entries} == {
        *(("decode", "exact"), ("decode", "safety"), ("drafts", "exact"))
    }


def test_a_scenario_that_an_engine_cannot_run_is_a_usage_error() -> None:
    few = bench("scheduler", "--engine", TOYS[0], "--scenario", "decode", "-n", 4)
    assert few.exit_code == ExitCode.USAGE
    assert "no more than 2 run at once" in few.output
    for command in ("scheduler", "profile"):
        lacks = bench(command, "--engine", TOYS[0], "--scenario", "drafts", "-n", 4)
        assert lacks.exit_code == ExitCode.USAGE
        assert "take another --scenario" in lacks.output


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("make_broken_host", "raised ValueError"),
        ("make_host_that_answers_ack", "a Commit was answered with Ack"),
        ("make_toy_with_unknown_outputs", "the engine names"),
        ("make_toy_with_changing_budget", "does not decide the same twice"),
        ("foreign_support.toys:SmallToy", "raised MemoryError: too many blocks"),
    ],
)
def test_a_failing_engine_is_reported_in_one_line(engine: str, message: str) -> None:
    name = engine if ":" in engine else f"tests.conformance.bench.test_bench:{engine}"
    result = bench("profile", "--engine", name, "--scenario", "decode", "-n", 1, "--steps", 4)
    assert result.exit_code == ExitCode.FAILED
    assert message in result.output
    assert name in result.output
    assert len(result.output.splitlines()) == 1


def test_storm_preempts_requests_and_drafts_are_accepted() -> None:
    assert run("storm", ("host",), 14, steps=60).preempted_mean > 0
    assert run("drafts", ("host",), 4).tokens_mean > 4


def test_engines_that_decide_differently_are_not_compared() -> None:
    engines = ("host", "tests.conformance.bench.test_bench:make_host_that_preempts_the_oldest")
    with pytest.raises(NotEqualError, match="blockstep check"):
        run("storm", engines, 4, steps=600)


def test_an_engine_with_arrays_is_timed_through_its_arrays() -> None:
    config = SCENARIOS["decode"].get_config(1)
    assert type(open_side("host", config)) is ArraySide
    assert type(open_side(SIDES[-1], config)) is TimedEngine


def entry_of(size: int, microseconds: float) -> Measurement:
    times = Spread(microseconds, 2 * microseconds, microseconds)
    readings = (
        Reading("host", "arrays", times, times, times, 1.0),
        Reading("vllm", "objects", times, times, Spread(1000.0, 1000.0, 1000.0), 1.0),
    )
    return Measurement("decode", size, 9, size, size, 0.0, 0.0, "digest", readings)


def test_the_slope_is_per_request_and_leaves_small_sizes_out() -> None:
    entries = [entry_of(1, 500.0), entry_of(64, 16.4), entry_of(1064, 116.4)]
    assert get_slope(entries, "host", "arrays") == pytest.approx(100.0)
    assert get_slope(entries[:2], "host", "arrays") is None


def test_rounds_are_merged_by_median_and_grouped_by_scenario() -> None:
    long = replace(entry_of(1, 5.0), scenario="long")
    rounds = [entry_of(1, 10.0), long, entry_of(1, 90.0), long, entry_of(1, 20.0), entry_of(8, 7.0)]
    merged = merge_rounds(rounds)
    assert [(m.scenario, m.num_running, m.num_rounds) for m in merged] == [
        ("decode", 1, 3), ("decode", 8, 1), ("long", 1, 2),
    ]  # fmt: skip
    assert merged[0].readings[0].commit == Spread(20.0, 40.0, 20.0)
    assert merged[1] == rounds[-1]


def test_a_report_gives_ratios_machine_and_command() -> None:
    entries = [entry_of(64, 10.0), entry_of(128, 20.0)]
    rows = [row for entry in entries for row in make_rows(entry)]
    assert [row["times vllm"] for row in rows] == ["100.0", "", "50.0", ""]
    machine = {
        "processor": "P", "cores": 2, "python": "3", "system": "S", "date": "D", "load_1min": 0.1,
    }  # fmt: skip
    conditions = {"command": "blockstep bench scheduler", "machine": machine, "gc": "off"}
    page = make_markdown(entries, conditions, Path("plot.svg"))
    assert "`blockstep bench scheduler`" in page
    assert "![" in page
    assert "in bold how many p50" in page
    assert "| 64 | **100.0x** 10.0 / 20.0 | 1,000 / 1,000 |" in page
    assert "| ns per request, from 64 on | 156 | 0 |" in page
    plain = to_json(entries, conditions)
    assert plain["slopes"][0]["nanoseconds_per_request"] == 156.2
    again = json.loads(json.dumps(plain))["measurements"]
    assert msgspec.convert(again, list[Measurement]) == entries


def test_a_trace_is_reported_as_one_row_with_the_sum_of_its_steps() -> None:
    entry = replace(entry_of(256, 10.0), scenario="trace", num_steps=5000)
    machine = dict.fromkeys(("processor", "cores", "python", "system", "date", "load_1min"), "")
    page = make_markdown([entry], {"command": "C", "machine": machine, "gc": "off"}, None)
    assert "| all 5,000 steps | **100.0x** 0.05 s | 5.00 s |" in page
    assert "![" not in page


def test_there_is_no_ratio_without_a_reading_of_vllm() -> None:
    entry = entry_of(64, 10.0)
    alone = replace(entry, readings=entry.readings[:1])
    assert get_ratio(alone, alone.readings[0]) is None
    assert make_rows(alone)[0]["times vllm"] == ""


def test_the_rehearsal_plays_every_scenario_of_its_table() -> None:
    texts: list[str] = []
    rehearse(("host",), lambda _done, text: texts.append(text))
    assert {text.split()[0] for text in texts} == set(REHEARSAL)


@pytest.mark.parametrize(
    ("engine", "calls"),
    [
        ("host", {"impl/host/engine.py: HostEngine.schedule_arrays": 1.0,
         "impl/host/engine.py: HostEngine.commit_arrays": 1.0}),
        (SIDES[-1], {"impl/host/engine.py: HostEngine.apply": 2.0}),
    ],
)  # fmt: skip
def test_a_profile_counts_the_calls_of_each_step(engine: str, calls: dict[str, float]) -> None:
    found = profile(SCENARIOS["drafts"], 4, engine, 8, 1000, lambda _done, _text: None)
    steps = {line.function: line for line in found.lines if line.function in calls}
    assert {name: line.calls for name, line in steps.items()} == calls
    assert sum(line.total for line in steps.values()) == pytest.approx(1.0)
    assert sum(line.own for line in found.lines) == pytest.approx(1.0)
    assert len(to_lines(found)) == 2 + len(found.lines)


def test_names_of_functions_have_no_paths_and_addresses() -> None:
    assert name_function("<built-in method f of A object at 0x7f00ab>") == (
        "<built-in method f of A>"
    )
    names = {
        "/home/me/blockstep/impl/blockstep/impl/host/pool.py": "impl/host/pool.py: <module>",
        "/usr/site-packages/numpy/core.py": "numpy/core.py: <module>",
        "/usr/lib/python3/json/decoder.py": "decoder.py: <module>",
    }
    assert {file: name_function(compile("", file, "exec")) for file in names} == names


def test_command_profiles(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["bench", "profile", "--scenario", "decode", "-n", "2", "--steps", "4"]
    result = CliRunner().invoke(app, [*arguments, "--lines", "3", "--json", str(out)])
    assert result.exit_code == ExitCode.CONFORMS, result.output
    assert "decode, 2 running, host" in result.output
    assert len(json.loads(out.read_text())["profiles"][0]["lines"]) == 3


@pytest.mark.usefixtures("_rehearsed")
def test_command_writes_table_json_and_page(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    result = CliRunner().invoke(
        app,
        ["bench", "scheduler", "--engine", "host", "--engine", "spec", "--scenario",
         "decode", "-n", "1", "-n", "3", "-n", "1", "--steps", "3", "--json", str(out),
         "--markdown", str(page)],
    )  # fmt: skip
    assert result.exit_code == ExitCode.CONFORMS, result.output
    assert "all decided the same" in result.output
    plain = json.loads(out.read_text())
    found = [(entry["num_running"], entry["num_rounds"]) for entry in plain["measurements"]]
    assert found == [(1, 2), (3, 1)]
    assert "host, arrays" in page.read_text()


@pytest.mark.usefixtures("_rehearsed")
def test_command_plays_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at, "input_length": 600, "output_length": 3, "hash_ids": [0, at + 1]}
        for at in range(3)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(
        app, ["bench", "scheduler", "--engine", "host", "--engine", "spec", "--trace", str(trace)]
    )
    assert result.exit_code == ExitCode.CONFORMS, result.output
    assert "total host arrays" in result.output
