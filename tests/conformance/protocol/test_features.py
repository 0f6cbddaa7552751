"""Features: the table covers all fields and actions, and runs draw or leave out what it says."""

from __future__ import annotations

from typing import get_args

import pytest

from blockstep.conformance.draw.actions import SeededDraw, next_action
from blockstep.conformance.draw.presets import SMALL
from blockstep.conformance.draw.swarms import draw_config, draw_swarm
from blockstep.conformance.draw.view import View
from blockstep.conformance.engine import ALL_CAPABILITIES, Capability
from blockstep.conformance.features.groups import FEATURE as GROUPS
from blockstep.conformance.judge.checks import PROPERTIES
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE, Feature
from blockstep.conformance.protocol.feature_selection import (
    FeatureSelection,
    make_wish,
    parse_features,
)
from blockstep.conformance.protocol.features import (
    ASYNC,
    BY_NAME,
    FEATURES,
    PIPELINE,
    PRIORITY,
    UsageError,
    find_lacking,
    fit,
)
from blockstep.conformance.protocol.program import Action, Answer, Drain
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.search.call import call_here
from blockstep.conformance.search.check import check
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.hunt import hunt
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.verdict_requirements import read_engine_facts, require_wish
from blockstep.spec import vocabulary as v

SIZES = {
    *("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("enable_chunked_prefill", "long_prefill_token_threshold", "scheduler_reserve_full_isl"),
}
"""Fields of a config that are no feature: every engine has them."""
PLAIN = {
    *("request_id", "prompt_token_ids", "max_tokens", "arrival_time", "skip_reading_prefix_cache")
}
"""Fields of a request that are no feature."""
ALWAYS_DONE = {v.Submit, v.Schedule, v.Commit, Answer, Drain}
NAMES = list(BY_NAME)
UNDRAWN: set[str] = set()
"""Features that nothing draws so far."""
DRAWN = [name for name in NAMES if name not in UNDRAWN]
WITH_CAPABILITY = [name for name in DRAWN if BY_NAME[name].capability]


def test_the_table_covers_every_field_and_every_action() -> None:
    fields = {name for feature in FEATURES for name in feature.config}
    assert fields | SIZES == set(v.Config.__dataclass_fields__)
    fields = {name for feature in FEATURES for name in feature.request}
    assert fields | PLAIN == set(v.Request.__dataclass_fields__)
    actions = {action for feature in FEATURES for action in feature.actions}
    assert actions | ALWAYS_DONE == {*get_args(Action), *get_args(v.Event)}


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_table_is_complete(name: str) -> None:
    feature = BY_NAME[name]
    assert feature.summary
    assert feature.config or feature.request or feature.actions
    assert {*feature.properties} <= {entry.id for entry in PROPERTIES}
    assert feature.properties
    for beginning in (*feature.situations, *feature.hides):
        assert any(situation.startswith(beginning) for situation in WITNESSES), beginning


def test_every_capability_is_in_one_row_or_concerns_comparisons() -> None:
    of_rows = [feature.capability for feature in FEATURES if feature.capability]
    assert len(of_rows) == len(set(of_rows))
    assert set(Capability) - set(of_rows) == {
        *(Capability.SNAPSHOT, Capability.STATISTICS, Capability.CACHE_STATISTICS),
        *(Capability.LATE_DRAFTS, Capability.COMMON_PREFIX, Capability.WORK),
    }


def draw_some(wish: FeatureSelection, count: int = 40) -> list[tuple[v.Config, list[Action]]]:
    """Draw `count` configs, each with 30 actions."""
    runs = []
    for index in range(count):
        draw = SeededDraw(f"features/{index}")
        swarm = draw_swarm(SMALL, draw, wish=wish)
        view = View(swarm, Client())
        actions: list[Action] = []
        for _ in range(30):
            action = next_action(view, draw)
            view.note(action)
            if isinstance(action, v.Submit):
                view.client.live[action.request.request_id] = action.request
            actions.append(action)
        runs.append((swarm.config, actions))
    return runs


def is_in(feature: Feature, config: v.Config, actions: list[Action]) -> bool:
    """Whether a run has a feature."""
    requests = [action.request for action in actions if isinstance(action, v.Submit)]
    return (
        feature.is_asked_by(config)
        or any(map(feature.is_asked_by, requests))
        or any(isinstance(action, feature.actions) for action in actions)
    )


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", NAMES)
def test_an_excluded_feature_is_never_drawn(name: str) -> None:
    feature = BY_NAME[name]
    runs = draw_some(FeatureSelection(never=frozenset({name})))
    assert not any(is_in(feature, *run) for run in runs)
    assert all(v.config_problems(config) == () for config, _ in runs)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", DRAWN)
def test_a_wished_feature_is_in_every_config_or_in_most_runs(name: str) -> None:
    feature = BY_NAME[name]
    runs = draw_some(FeatureSelection(always=frozenset({name})))
    assert all(v.config_problems(config) == () for config, _ in runs)
    if feature.config and not feature.request:
        assert all(feature.is_asked_by(config) for config, _ in runs)
    plain = sum(is_in(feature, *run) for run in draw_some(FeatureSelection()))
    assert sum(is_in(feature, *run) for run in runs) > min(plain, 30)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", DRAWN)
def test_a_config_or_request_without_a_feature_is_still_valid(name: str) -> None:
    feature = BY_NAME[name]
    for index in range(60):
        draw = SeededDraw(f"taken/{index}")
        swarm = draw_swarm(SMALL, draw, wish=FeatureSelection(always=frozenset({name})))
        config = feature.take_from(swarm.config)
        assert not feature.is_asked_by(config)
        assert v.config_problems(config) == ()
        for action in (next_action(View(swarm, Client()), draw) for _ in range(5)):
            if isinstance(action, v.Submit):
                request = feature.take_from(action.request)
                assert not feature.is_asked_by(request)
                assert v.event_problem(v.Submit(request)) == v.event_problem(action)


def test_without_asynchronous_scheduling_several_frames_are_a_pipeline() -> None:
    config = v.Config(num_blocks=8, max_frames_in_flight=3, async_scheduling=True)
    assert not PIPELINE.is_asked_by(config)
    fitting, missing = fit(config, (ASYNC,))
    assert (fitting.max_frames_in_flight, fitting.async_scheduling) == (3, False)
    assert missing == (Capability.ASYNC,)
    fitting, missing = fit(config, (ASYNC, PIPELINE))
    assert fitting == v.Config(num_blocks=8)
    assert missing == (Capability.ASYNC, Capability.PIPELINE)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", WITH_CAPABILITY)
def test_an_engine_is_never_given_a_feature_that_it_lacks(name: str) -> None:
    feature = BY_NAME[name]

    class Lacking(SpecEngine):
        def __init__(self, config: v.Config) -> None:
            super().__init__(config)
            assert not feature.is_asked_by(config)

        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {feature.capability}

        def apply(self, event: v.Event) -> v.Observation:
            assert not isinstance(event, v.Submit) or not feature.is_asked_by(event.request)
            assert not isinstance(event, feature.actions)
            return super().apply(event)

    assert find_lacking(Lacking(v.Config(num_blocks=8)).capabilities()) == (feature,)
    skipped = 0
    for index in range(24):
        run, program, findings = play_episode(CheckOptions(preset="tiny"), index, Lacking)
        assert findings == []
        assert not feature.is_asked_by(program.config)
        skipped += run.skipped.get(str(feature.capability), 0)
    assert skipped > 0, "what is left out is counted"


def test_several_groups_are_taken_from_engines_that_lack_them() -> None:
    config = v.Config(num_blocks=8, groups=(v.KVGroup(v.GroupKind.FULL, 16),))
    assert fit(config, (GROUPS,)) == (v.Config(num_blocks=8), (Capability.GROUPS,))
    assert GROUPS in find_lacking(
        load_engine("plain_engine:PlainEngine")(v.Config(num_blocks=8)).capabilities()
    )
    for engine in ("host", "host-kernels"):
        assert GROUPS not in find_lacking(
            load_engine(engine)(v.Config(num_blocks=8)).capabilities()
        )


def test_features_are_named_one_by_one_or_with_commas() -> None:
    assert parse_features(()) == ()
    assert parse_features(("drafts, pause", "drafts", "embeds")) == ("drafts", "pause", "embeds")
    with pytest.raises(UsageError, match=r"feature 'lora': must be one of priority, drafts, "):
        parse_features(("drafts,lora",))


def test_a_feature_that_the_engine_lacks_cannot_be_wished() -> None:
    class Sync(SpecEngine):
        def capabilities(self) -> frozenset[str]:
            return ALL_CAPABILITIES - {"async"}

    options = CheckOptions("mine", with_features=("async",))
    with pytest.raises(UsageError, match="feature 'async': the engine mine lacks it"):
        require_wish(options, read_engine_facts(options, Sync))
    with pytest.raises(UsageError, match="feature 'async': the engine mine lacks it"):
        hunt(options, call_here(Sync))


def test_wishes_reach_the_runs_of_a_check() -> None:
    options = CheckOptions(
        preset="tiny",
        with_features=("pipeline", "embeds"),
        without_features=("drafts", "hostile"),
        max_events=2500,
    )
    result = check(options)
    assert result.first is None
    assert not any(name.startswith(("draft", "rejected_frame")) for name in result.witnesses)
    assert not {"skip_ahead", "planned_before_its_token"} & result.witnesses.keys()
    assert result.witnesses["pipeline_waits_for_its_token"] > 20
    for index in range(5):
        run, _, _ = play_episode(options, index, SpecEngine)
        assert PIPELINE.is_asked_by(run.config)


def test_frames_in_flight_are_drawn_with_and_without_async_scheduling() -> None:
    configs = [draw_config(SMALL, SeededDraw(f"depth/{index}")) for index in range(300)]
    deep = [config for config in configs if config.max_frames_in_flight > 1]
    share = sum(config.async_scheduling for config in deep) / len(deep)
    assert 0.6 < share < 0.9
    assert not any(config.async_scheduling for config in configs if config not in deep)
    assert make_wish(("async",), ()).always == {"async"} < SEVERAL_AT_ONCE
    assert PRIORITY.is_asked_by(v.Config(num_blocks=8, policy=v.Policy.PRIORITY))
