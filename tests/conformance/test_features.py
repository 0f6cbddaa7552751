"""Features: the table accounts for everything, and what it says is what is drawn and spared."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from blockstep.conformance.draw.actions import SeededDraw, View, next_action
from blockstep.conformance.draw.presets import SMALL, draw_config, draw_swarm
from blockstep.conformance.engine import ALL_CAPABILITIES, Capability
from blockstep.conformance.judge.properties import PROPERTIES
from blockstep.conformance.judge.witnesses import WITNESSES
from blockstep.conformance.lockstep.client import Client
from blockstep.conformance.protocol.features import (
    ASYNC,
    BY_NAME,
    FEATURES,
    GROUPS,
    PIPELINE,
    PRIORITY,
    SEVERAL_AT_ONCE,
    Feature,
    UsageError,
    find_lacking,
    fit,
)
from blockstep.conformance.protocol.program import Action, Answer, Drain
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.protocol.wishes import Wish, make_wish, parse_features
from blockstep.conformance.search.check import check
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.floor import look, require_wish
from blockstep.conformance.search.hunt import call_here, hunt
from blockstep.conformance.search.options import CheckOptions, get_wish
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    Event,
    GroupKind,
    KVGroup,
    Observation,
    Policy,
    Request,
    Schedule,
    Submit,
    config_problems,
    event_problem,
)

SIZES = {
    *("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("enable_chunked_prefill", "long_prefill_token_threshold", "scheduler_reserve_full_isl"),
}
"""Fields of a config that are no feature: every engine has them."""
PLAIN = {
    *("request_id", "prompt_token_ids", "max_tokens", "arrival_time", "skip_reading_prefix_cache"),
}
"""The same of a request."""
ALWAYS_DONE = {Submit, Schedule, Commit, Answer, Drain}
NAMES = list(BY_NAME)
UNDRAWN: set[str] = set()
"""Features that nothing draws so far."""
DRAWN = [name for name in NAMES if name not in UNDRAWN]
WITH_CAPABILITY = [name for name in DRAWN if BY_NAME[name].capability]


def test_the_table_accounts_for_every_field_and_every_action() -> None:
    fields = {name for feature in FEATURES for name in feature.config}
    assert fields | SIZES == set(Config.__dataclass_fields__)
    fields = {name for feature in FEATURES for name in feature.request}
    assert fields | PLAIN == set(Request.__dataclass_fields__)
    actions = {action for feature in FEATURES for action in feature.actions}
    assert actions | ALWAYS_DONE == {*get_args(Action), *get_args(Event)}


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_whole(name: str) -> None:
    feature = BY_NAME[name]
    assert feature.summary
    assert feature.config or feature.request or feature.actions
    assert {*feature.properties} <= {entry.id for entry in PROPERTIES}
    assert feature.properties
    for beginning in (*feature.situations, *feature.hides):
        assert any(situation.startswith(beginning) for situation in WITNESSES), beginning


def test_every_capability_is_of_one_row_or_says_how_to_compare() -> None:
    of_rows = [feature.capability for feature in FEATURES if feature.capability]
    assert len(of_rows) == len(set(of_rows))
    assert set(Capability) - set(of_rows) == {
        *(Capability.SNAPSHOT, Capability.STATISTICS, Capability.CACHE_STATISTICS),
        *(Capability.LATE_DRAFTS, Capability.COMMON_PREFIX, Capability.WORK),
    }


def draw_some(wish: Wish, count: int = 40) -> list[tuple[Config, list[Action]]]:
    """Configs and actions as they are drawn, the first of each run a request."""
    runs = []
    for index in range(count):
        draw = SeededDraw(f"features/{index}")
        swarm = draw_swarm(SMALL, draw, wish=wish)
        view = View(swarm, Client())
        actions: list[Action] = []
        for _ in range(30):
            action = next_action(view, draw)
            view.note(action)
            if isinstance(action, Submit):
                view.client.live[action.request.request_id] = action.request
            actions.append(action)
        runs.append((swarm.config, actions))
    return runs


def is_in(feature: Feature, config: Config, actions: list[Action]) -> bool:
    """Whether a run has a feature."""
    requests = [action.request for action in actions if isinstance(action, Submit)]
    return (
        feature.is_asked_by(config)
        or any(map(feature.is_asked_by, requests))
        or any(isinstance(action, feature.actions) for action in actions)
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_nobody_wants_is_never_drawn(name: str) -> None:
    feature = BY_NAME[name]
    runs = draw_some(Wish(never=frozenset({name})))
    assert not any(is_in(feature, *run) for run in runs)
    assert all(config_problems(config) == () for config, _ in runs)


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_wanted_is_in_every_config_or_in_most_runs(name: str) -> None:
    feature = BY_NAME[name]
    runs = draw_some(Wish(always=frozenset({name})))
    assert all(config_problems(config) == () for config, _ in runs)
    if feature.config and not feature.request:
        assert all(feature.is_asked_by(config) for config, _ in runs)
    plain = sum(is_in(feature, *run) for run in draw_some(Wish()))
    assert sum(is_in(feature, *run) for run in runs) > min(plain, 30)


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_taken_away_leaves_a_valid_rest(name: str) -> None:
    feature = BY_NAME[name]
    for index in range(60):
        draw = SeededDraw(f"taken/{index}")
        swarm = draw_swarm(SMALL, draw, wish=Wish(always=frozenset({name})))
        config = feature.take_from(swarm.config)
        assert not feature.is_asked_by(config)
        assert config_problems(config) == ()
        for action in (next_action(View(swarm, Client()), draw) for _ in range(5)):
            if isinstance(action, Submit):
                request = feature.take_from(action.request)
                assert not feature.is_asked_by(request)
                assert event_problem(Submit(request)) == event_problem(action)


def test_without_asynchronous_scheduling_several_frames_are_a_pipeline() -> None:
    config = Config(num_blocks=8, max_frames_in_flight=3, async_scheduling=True)
    assert not PIPELINE.is_asked_by(config)
    fitting, missing = fit(config, (ASYNC,))
    assert (fitting.max_frames_in_flight, fitting.async_scheduling) == (3, False)
    assert missing == (Capability.ASYNC,)
    fitting, missing = fit(config, (ASYNC, PIPELINE))
    assert fitting == Config(num_blocks=8)
    assert missing == (Capability.ASYNC, Capability.PIPELINE)


@pytest.mark.parametrize("name", WITH_CAPABILITY)
def test_an_engine_is_never_given_what_it_lacks(name: str) -> None:
    feature = BY_NAME[name]

    class Lacking(SpecEngine):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            assert not feature.is_asked_by(config)

        def capabilities(self) -> frozenset[str]:
            return super().capabilities() - {feature.capability}

        def apply(self, event: Event) -> Observation:
            assert not isinstance(event, Submit) or not feature.is_asked_by(event.request)
            assert not isinstance(event, feature.actions)
            return super().apply(event)

    assert find_lacking(Lacking(Config(num_blocks=8)).capabilities()) == (feature,)
    skipped = 0
    for index in range(24):
        run, program, findings = play_episode(CheckOptions(preset="tiny"), index, Lacking)
        assert findings == []
        assert not feature.is_asked_by(program.config)
        skipped += run.skipped.get(str(feature.capability), 0)
    assert skipped > 0, "what is left out is counted"


def test_several_groups_are_taken_from_who_lacks_them() -> None:
    config = Config(num_blocks=8, groups=(KVGroup(GroupKind.FULL, 16),))
    assert fit(config, (GROUPS,)) == (Config(num_blocks=8), (Capability.GROUPS,))
    for engine in ("compiled", "fastest"):
        assert GROUPS in find_lacking(load_engine(engine)(Config(num_blocks=8)).capabilities())
    for engine in ("host", "host-kernels"):
        assert GROUPS not in find_lacking(load_engine(engine)(Config(num_blocks=8)).capabilities())


def test_features_are_named_one_by_one_or_with_commas() -> None:
    assert parse_features(()) == ()
    assert parse_features(("drafts, pause", "drafts", "embeds")) == ("drafts", "pause", "embeds")
    with pytest.raises(UsageError, match=r"feature 'lora': must be one of priority, drafts, "):
        parse_features(("drafts,lora",))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"with_features": ("x",)}, "feature 'x': must be one of"),
        ({"without_features": ("x",)}, "feature 'x': must be one of"),
        (
            {"with_features": ("drafts",), "without_features": ("pause", "drafts")},
            "feature 'drafts': cannot be both with and without; the features are priority, ",
        ),
        ({"with_features": ("pipeline", "async")}, "features 'async' and 'pipeline': no run has"),
        ({"with_features": ("async",), "max_depth": 1}, "feature 'async': needs 2 plans"),
        ({"with_features": ("priority",), "policy": Policy.FCFS}, "cannot be with policy fcfs"),
        (
            {"without_features": ("priority",), "policy": Policy.PRIORITY},
            "without 'priority': the policy cannot be priority",
        ),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_sentence(fields: dict[str, Any], says: str) -> None:
    for run in (get_wish, check):
        with pytest.raises(UsageError, match=says) as caught:
            run(CheckOptions(max_events=10, **fields))
        assert "\n" not in str(caught.value)


def test_what_an_engine_lacks_cannot_be_wanted() -> None:
    class Sync(SpecEngine):
        def capabilities(self) -> frozenset[str]:
            return ALL_CAPABILITIES - {"async"}

    options = CheckOptions("mine", with_features=("async",))
    with pytest.raises(UsageError, match="feature 'async': the engine mine lacks it"):
        require_wish(options, look(options, Sync))
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


def test_both_kinds_of_depth_are_drawn() -> None:
    configs = [draw_config(SMALL, SeededDraw(f"depth/{index}")) for index in range(300)]
    deep = [config for config in configs if config.max_frames_in_flight > 1]
    share = sum(config.async_scheduling for config in deep) / len(deep)
    assert 0.6 < share < 0.9
    assert not any(config.async_scheduling for config in configs if config not in deep)
    assert make_wish(("async",), ()).always == {"async"} < SEVERAL_AT_ONCE
    assert PRIORITY.is_asked_by(Config(num_blocks=8, policy=Policy.PRIORITY))
