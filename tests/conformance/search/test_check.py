"""Check: it is repeatable, a correct engine conforms, and each seeded bug is found."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.draw.actions import SeededDraw
from blockstep.conformance.draw.presets import PRESETS
from blockstep.conformance.draw.swarms import draw_config
from blockstep.conformance.engine import ALL_CAPABILITIES, EngineTraits, Safety
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.museum import EXHIBITS, build
from blockstep.conformance.protocol.findings import FindingKind
from blockstep.conformance.protocol.program import Drain, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.report.verdict import render_verdict
from blockstep.conformance.search.check import InProcess, check, search
from blockstep.conformance.search.episodes import EpisodeResult, play_episode, run_episode
from blockstep.conformance.search.options import CheckOptions, ExitCode, find_profile, load
from blockstep.conformance.search.verdict_requirements import (
    EngineFacts,
    read_engine_facts,
    required_goals,
    run_canary,
)
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import get_profile


def test_a_budget_in_events_makes_a_run_repeatable_in_any_number_of_processes() -> None:
    options = CheckOptions(engine="host", preset="tiny", seed=5, max_events=1500)
    alone, both = check(options), check(replace(options, jobs=2))
    assert both.num_events == alone.num_events >= 1500
    assert both.witnesses == alone.witnesses
    assert alone.first is None


def test_the_host_engine_conforms_and_reaches_all_goals() -> None:
    result = check(CheckOptions(engine="host", seed=0, max_events=30_000, jobs=2))
    assert result.missing == ()
    assert result.exit_code is ExitCode.CONFORMS


@pytest.mark.parametrize("feature", ["forks", "pins", "tiers", "transfers"])
def test_an_engine_conforms_in_runs_that_all_have_a_feature(feature: str) -> None:
    result = check(CheckOptions(engine="host", max_events=4_000, with_features=(feature,)))
    assert result.first is None


def test_the_specification_follows_two_quirks_together_without_an_assertion() -> None:
    """A second full group's hit is longer than what is loaded, and groups load in turns: the
    release asks its pool for -1 blocks, and the specification took all but one (exit 3)."""
    config = v.Config(
        num_blocks=26,
        block_size=1,
        max_num_batched_tokens=64,
        max_model_len=64,
        policy=v.Policy.PRIORITY,
        long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False,
        spec_method=v.SpecMethod.EAGLE,
        num_speculative_tokens=1,
        groups=(
            v.KVGroup(v.GroupKind.FULL, 1),
            v.KVGroup(v.GroupKind.SLIDING_WINDOW, 1, sliding_window=3),
            v.KVGroup(v.GroupKind.FULL, 2),
        ),
        kv_connector=True,
        kv_load_failure_policy=v.KVLoadFailurePolicy.RECOMPUTE,
    )
    actions = (
        v.Submit(v.Request("A", (0, 0), 4, priority=3)),
        v.Submit(v.Request("B", (0, 0), 7)),
        v.KVOffer("A", 4, is_async=True),
        v.KVOffer("B", 1),
        Drain(),
    )
    options = CheckOptions(engine="spec", profile="vllm-0.19.1")
    program = Program(config, actions)
    run, findings = run_program(program, load(options), find_profile(options.profile))
    assert findings == []
    assert run.num_events > 30


def test_the_specification_is_held_to_itself_under_the_profile_of_the_run() -> None:
    result = check(
        CheckOptions(engine="spec", profile="vllm-0.19.1", preset="tiny", max_events=800)
    )
    assert result.first is None


class DeclinesAll(SpecEngine):
    """An engine that declines every event."""

    def declines(self, event: v.Event) -> str:
        return "a known defect"


class PlaceOfDeclinesAll(InProcess):
    def read_engine_facts(self, options: CheckOptions) -> EngineFacts:
        return read_engine_facts(options, DeclinesAll)

    def run_batch(self, options: CheckOptions, start: int, count: int) -> list[EpisodeResult]:
        assert start < 10_000, "it never ends"
        return [run_episode(options, index, DeclinesAll) for index in range(start, start + count)]


def test_a_check_of_an_engine_that_declines_all_ends_without_a_verdict() -> None:
    options = CheckOptions(preset="tiny", profile="vllm-0.19.1", max_events=100)
    result = search(options, PlaceOfDeclinesAll(), lambda _result: None)
    assert result.num_events == 0
    assert result.exit_code is ExitCode.HARNESS


def test_the_canary_is_caught() -> None:
    events = run_canary(CheckOptions(engine="host", seed=3))
    assert events is not None
    assert 0 < events < 5000


RAISING = {
    "late-report-kills",
    "copy-takes-what-is-not-there",
    "first-copy-is-not-counted",
    "states-charged-once",
}
"""Seeded bugs at which the engine raises before a property check fails."""


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("name", EXHIBITS)
def test_every_seeded_bug_is_found_by_a_property_that_it_names(name: str) -> None:
    entry, make_engine, num_events = EXHIBITS[name], build(name), 0
    taken = (entry.takes, "groups" if entry.takes_groups else "")
    options = CheckOptions(seed=6, with_features=tuple(filter(None, taken)))
    for index in range(20_000):
        run, _, findings = play_episode(options, index, make_engine)
        num_events += run.num_events
        assert num_events < 150_000, f"{name} survived"
        if findings and (name in RAISING or findings[0].kind is not FindingKind.FAULT):
            break  # otherwise the engine only raised: continue until a check fails
    named = {found.property_id for found in findings}
    differs = any(
        found.kind in (FindingKind.DIVERGENCE, FindingKind.LIVENESS) for found in findings
    )
    ends = name in RAISING and findings[0].kind is FindingKind.FAULT
    assert named & set(entry.properties) or differs or ends, findings


@pytest.mark.parametrize("name", ["readmitted-with-promises", "full-hit"])
def test_a_counterexample_fits_on_a_screen(name: str) -> None:
    result = check(CheckOptions(engine=f"museum:{name}", max_events=150_000))
    assert result.failure is not None
    assert len(result.failure.program.actions) <= 12


@pytest.mark.parametrize("name", PRESETS)
def test_every_drawn_config_is_valid_and_they_differ(name: str) -> None:
    drawn = [draw_config(PRESETS[name], SeededDraw(str(seed))) for seed in range(200)]
    assert all(v.config_problems(config) == () for config in drawn)
    assert len(Counter(drawn)) > 150
    assert len({config.spec_method for config in drawn}) == 4


class Release(SpecEngine):
    """Stands in for a release with known defects."""

    def __init__(self, config: v.Config) -> None:
        profile = get_profile("vllm-0.19.1")
        assert profile is not None
        super().__init__(config, profile)


def test_under_strict_a_known_defect_is_a_finding() -> None:
    result = check(CheckOptions(engine=f"{__name__}:Release", max_events=60_000))
    assert result.exit_code in {ExitCode.FAILED, ExitCode.LIVENESS}


def test_under_its_profile_a_known_defect_is_counted_as_known() -> None:
    options = CheckOptions(engine=f"{__name__}:Release", profile="vllm-0.19.1", max_events=2_000)
    result = check(options)
    assert result.first is None, result.first
    assert result.known
    assert {"P4", "P10"} & set(result.known)


class WithoutRejections(SpecEngine):
    """An engine that must not be given bad input."""

    def capabilities(self) -> frozenset[str]:
        return ALL_CAPABILITIES - {"rejection"}

    def apply(self, event: v.Event) -> v.Observation:
        answer = super().apply(event)
        if isinstance(answer, v.Rejected):
            raise ValueError(answer.detail)
        return answer


def test_an_engine_without_rejections_gets_no_bad_input() -> None:
    result = check(CheckOptions(engine=f"{__name__}:WithoutRejections", max_events=3_000))
    assert result.first is None, result.first
    assert not any(name.startswith("rejected_") for name in result.missing)
    assert result.skipped["rejection"] > 0


class Moody(SpecEngine):
    """The first engine that is given an event loses a block, and no later one does."""

    first: Moody | None = None

    def apply(self, event: v.Event) -> v.Observation:
        Moody.first = Moody.first or self
        return super().apply(event)

    def snapshot(self) -> v.Snapshot:
        snapshot = super().snapshot()
        if Moody.first is not self:
            return snapshot
        return replace(snapshot, free_queue=snapshot.free_queue[1:])


def test_a_finding_that_is_not_repeated_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockstep.conformance.search.check.EPISODES_COMPARED_MAX", 3)
    monkeypatch.setattr("blockstep.conformance.search.check.TINY_EPISODES", 3)
    Moody.first = None
    args = ["check", "--engine", f"{__name__}:Moody", "--budget", "500", "--in-process"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1
    assert result.stdout.startswith("blockstep check: VIOLATION at event 1: ")
    assert "seen once, and not when the program ran again" in result.output


class Forgetful(SpecEngine):
    """An engine that knows only some of the stop tokens."""

    known = slice(None)

    def __init__(self, config: v.Config) -> None:
        super().__init__(config)
        self.asked: dict[str, v.Request] = {}

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Submit):
            asked = event.request
            stops = asked.stop_token_ids[self.known]
            answer = super().apply(v.Submit(replace(asked, stop_token_ids=stops)))
            if not isinstance(answer, v.Rejected):
                self.asked[asked.request_id] = asked
            return answer
        answer = super().apply(event)
        if isinstance(answer, v.Plan):
            new = (replace(row, request=self.asked[row.request_id]) for row in answer.new)
            return replace(answer, new=tuple(new))
        return answer


@pytest.mark.parametrize("known", [slice(1), slice(-1, None), slice(4)], ids=str)
def test_an_engine_that_looks_at_some_stop_tokens_only_is_found(
    known: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forgetful, "known", known)
    for index in range(300):
        options = CheckOptions(seed=0, without_features=("sessions", "forks"))
        _, _, findings = play_episode(options, index, Forgetful)
        if findings:
            break
    assert "P13" in {found.property_id for found in findings}


class Shallow(SpecEngine):
    """An engine with a largest depth, an unreachable goal, and events that it declines."""

    traits = EngineTraits(max_depth=2, out_of_reach=frozenset({"skip_ahead"}))

    def declines(self, event: v.Event) -> str | None:
        return "a known defect" if isinstance(event, v.Reset) else None


def test_an_engine_may_narrow_a_check_and_the_report_shows_it() -> None:
    engine = f"{__name__}:Shallow"
    result = check(CheckOptions(engine, preset="tiny", profile="sparing", max_events=600))
    assert result.first is None
    assert result.options.max_depth == 2
    assert result.skipped.keys() == {"a known defect"}
    required = required_goals(result.options)
    missing = [name for name in required if not result.witnesses[name]]
    unreachable = {
        "skip_ahead",
        "dropped_token_runs_again",
    }  # the first by its traits, the second by lack of a trait
    assert result.missing == tuple(name for name in missing if name not in unreachable)
    assert "skip_ahead" in required
    console = Console(record=True, width=100, file=io.StringIO())
    render_verdict(result, console)
    assert f"left out    a known defect: {result.skipped['a known defect']} times" in (
        console.export_text()
    )


class Released(SpecEngine):
    traits = EngineTraits(version="0.19.1", profile="vllm-0.19.1")


class JudgedAlone(SpecEngine):
    traits = replace(Released.traits, equivalence=Safety())


@pytest.mark.parametrize(
    ("profile", "is_other"),
    [
        *(("vllm-0.33.0", True), ("vllm-0.20.2", True)),
        *(("vllm-0.19.1", False), ("vllm-0.19.2", False), ("strict", True), ("sparing", True)),
        ("strict+equals_preempt_the_first", False),
    ],
)
def test_the_profile_of_another_release_is_noted(profile: str, is_other: bool) -> None:
    notes = read_engine_facts(CheckOptions(profile=profile), Released).notes
    note = (
        f"the engine is release 0.19.1, and the profile is {profile}: "
        "decisions that differ between them fail here; use --profile vllm-0.19.1"
    )
    assert notes == ((note,) if is_other else ())


def test_no_profile_is_noted_where_no_decision_is_compared() -> None:
    assert not read_engine_facts(CheckOptions(), JudgedAlone).notes
