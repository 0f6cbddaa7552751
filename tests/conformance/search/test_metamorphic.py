"""Metamorphic pairs: two configs that must not differ in outputs are compared."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from foreign_support.toys import PlainToy
from typer.testing import CliRunner

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.search.metamorphic import ARMS, compare_pair, usable_pairs
from blockstep.conformance.search.options import CheckOptions, ExitCode
from blockstep.spec import vocabulary as v


@pytest.mark.parametrize("engine", ["host", "spec"])
def test_a_correct_engine_has_equal_outputs_in_every_pair(engine: str) -> None:
    result = compare_pair(CheckOptions(seed=1), load_engine(engine), 40)
    assert result.contrast is None
    assert set(result.num_compared) == {arm.name for arm in ARMS}
    assert min(result.num_compared.values()) > 50


class CountsEvents(load_engine("host")):  # type: ignore[misc]
    """Counts the events that it accepts, by kind."""

    taken: Counter[str] = Counter()  # noqa: RUF012

    def apply(self, event: v.Event) -> v.Observation:
        answer: v.Observation = super().apply(event)
        self.taken[type(event).__name__] += not isinstance(answer, v.Rejected)
        return answer


@pytest.mark.parametrize(
    ("feature", "event"),
    [
        ("adapters", "Submit"),
        ("masks", "GrammarBitmask"),
        ("sessions", "StreamingUpdate"),
        ("encoder", "Submit"),
    ],
)
def test_the_events_of_a_feature_are_given_in_every_pair(feature: str, event: str) -> None:
    CountsEvents.taken.clear()
    result = compare_pair(CheckOptions(with_features=(feature,)), CountsEvents, 16)
    assert (result.contrast, result.fault, result.num_endless) == (None, None, 0)
    assert min(result.num_compared.values()) > 30
    assert CountsEvents.taken[event] > 100


class CutsInputs(load_engine("host")):  # type: ignore[misc]
    """Cuts the next input of a session to one token if prefix caching is on."""

    def apply(self, event: v.Event) -> v.Observation:
        has_cache = self.config.enable_prefix_caching
        if isinstance(event, v.StreamingUpdate) and has_cache and not event.request.items:
            short = event.request.prompt_token_ids[:1]
            event = replace(event, request=replace(event.request, prompt_token_ids=short))
        answer: v.Observation = super().apply(event)
        return answer


def test_a_session_that_loses_input_with_caching_makes_a_pair_differ() -> None:
    result = compare_pair(CheckOptions(with_features=("sessions",)), CutsInputs, 60)
    assert result.contrast is not None
    assert result.contrast.arm == "caching"
    assert any(request.resumable for request in result.contrast.requests)


@pytest.mark.parametrize(
    ("bug", "arms"),
    [
        ("stale-key-after-reuse", {"caching", "chunks", "pool"}),
        ("lost-rollback", {"drafts", "async"}),
        ("salt-ignored", {"caching", "chunks", "pool"}),
    ],
)
def test_a_seeded_bug_makes_a_pair_differ(bug: str, arms: set[str]) -> None:
    result = compare_pair(CheckOptions(), load_engine(f"museum:{bug}"), 300)
    assert result.contrast is not None
    assert result.contrast.arm in arms
    assert result.contrast.plain != result.contrast.other
    assert len(result.contrast.requests) <= 4


def test_a_pair_that_the_engine_does_not_support_is_left_out() -> None:
    class Plain(SpecEngine):
        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {"async", "drafts", "pipeline"}

    arms, not_tried = usable_pairs(Plain)
    assert not_tried == ("drafts", "async", "pipeline")
    assert [arm.name for arm in arms] == ["caching", "pool", "chunks"]
    assert compare_pair(CheckOptions(), Plain, 5).contrast is None


@pytest.mark.parametrize(
    "engine",
    [
        *("foreign_support.toys:PlainToy", "foreign_support.toys:AbortingToy"),
        *("foreign_support.hosts:AtSafety", "foreign_support.hosts:AtPlan"),
    ],
)
def test_an_engine_that_is_not_exact_has_equal_outputs(engine: str) -> None:
    result = compare_pair(CheckOptions(seed=2), load_engine(engine), 12)
    assert (result.contrast, result.fault, result.num_endless) == (None, None, 0)
    if "toys" in engine:
        assert result.not_tried == ("drafts", "async", "pipeline")
        assert result.alike == ("caching", "chunks")
    tried = {arm.name for arm in ARMS} - {*result.not_tried, *result.alike}
    assert all(result.num_compared[name] > 20 for name in tried)


class Raising(PlainToy):
    """Raises at a commit if the pool is large."""

    def apply(self, event: v.Event) -> v.Observation:
        if self.config.num_blocks > 100 and isinstance(event, v.Commit):
            raise KeyError("blocks")
        return super().apply(event)


class NeverRuns(PlainToy):
    """Never runs a request."""

    def plan(self) -> v.Plan:
        return v.Plan(0)


class Foreign(PlainToy):
    """Delivers a token to a request that was never submitted."""

    def apply(self, event: v.Event) -> v.Observation:
        seen = super().apply(event)
        return v.Outputs((v.OutputRow("ghost", (1,)),)) if isinstance(event, v.Commit) else seen


class Wrong(PlainToy):
    """Answers a Schedule with nothing."""

    def plan(self) -> v.Plan:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("engine", "arm", "message"),
    [
        ("Raising", "pool", "the engine raised KeyError: 'blocks'"),
        ("Foreign", "", "'ghost', which was never submitted"),
        ("Wrong", "", "was answered with None"),
    ],
)
def test_an_engine_that_breaks_is_a_fault_with_its_workload(
    engine: str, arm: str, message: str, tmp_path: Path
) -> None:
    name, out = f"{__name__}:{engine}", tmp_path / "out.json"
    result = CliRunner().invoke(
        app, ["arms", "--engine", name, "--workloads", "20", "--json", str(out)]
    )
    assert result.exit_code == ExitCode.FAILED
    assert result.output.startswith("blockstep arms: FAULT")
    assert message in " ".join(result.output.split())
    again = result.output.splitlines()[-1].split()
    assert again[:2] == ["reproduce", "blockstep"]
    assert CliRunner().invoke(app, again[2:]).output == result.output
    assert json.loads(out.read_text())["fault"]["arm"] == arm


def test_requests_that_never_finish_are_not_compared() -> None:
    result = CliRunner().invoke(
        app, ["arms", "--engine", f"{__name__}:NeverRuns", "--workloads", "9"]
    )
    assert result.exit_code == ExitCode.HARNESS
    assert "NO VERDICT (nothing compared)" in result.output
    assert "answers, under both configs: see blockstep check" in result.output


def test_every_pair_has_a_valid_config() -> None:
    from blockstep.conformance.search.metamorphic import draw_workload

    for episode in range(50):
        swarm, _ = draw_workload(CheckOptions(), episode, SpecEngine)
        for arm in ARMS:
            changed = arm.change(swarm.config)
            assert changed != swarm.config
            # An encoder-decoder model has neither caching nor chunks, and is left out of theirs.
            is_left_out = swarm.config.is_encoder_decoder and arm.name in {"caching", "chunks"}
            rules = {problem.rule for problem in v.config_problems(changed)}
            assert rules == ({"cannot be used with is_encoder_decoder"} if is_left_out else set())
