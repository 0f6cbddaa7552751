"""Sides of a quirk: a run records that it changed a result, and that it ran without a change."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from blockstep.conformance.judge.legal import EXAMPLES, PLAIN_CONFIG
from blockstep.conformance.lockstep.quirks import (
    FEATURE_OF,
    OF_ANOTHER,
    UNMET,
    get_quirk_title,
    list_goals,
    name_applied,
    name_spared,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.features import BY_NAME
from blockstep.conformance.protocol.program import Action, Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.check import check
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions, find_profile, load
from blockstep.conformance.search.verdict_requirements import (
    EngineFacts,
    list_quirk_goals,
    missing_goals,
    read_engine_facts,
)
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import QUIRKS, Profile, Quirk
from blockstep.spec.releases import get_rules

CONFIG = v.Config(num_blocks=9, block_size=2, max_model_len=32, enable_kv_cache_events=True)
STEP: tuple[Action, ...] = (v.Schedule(), Answer())


def list_sides(quirk: Quirk, *actions: Action, config: v.Config = CONFIG) -> list[str]:
    """Return the sides that a program shows of a quirk, which the engine has, too."""
    profile = Profile("one", frozenset({quirk}))
    program = Program(config, actions)
    run, findings = run_program(program, partial(SpecEngine, profile=profile), profile)
    assert findings == []
    return run.list_quirk_goals()


def make_session(name: str, max_tokens: int) -> v.Request:
    return v.Request(name, (1, 2), max_tokens=max_tokens, resumable=True)


def test_a_quirk_that_is_a_function_applies_where_it_gives_another_result() -> None:
    quirk = Quirk.SESSIONS_KEEP_MAX_TOKENS
    begun = (v.Submit(make_session("A", 1)), *STEP)
    alike = v.StreamingUpdate(make_session("A", 1))
    other = v.StreamingUpdate(make_session("A", 2))
    assert list_sides(quirk, *begun) == []
    assert list_sides(quirk, *begun, alike) == [name_spared(quirk)]
    assert list_sides(quirk, *begun, other) == [name_applied(quirk)]
    assert list_sides(quirk, *begun, alike, *STEP, other) == [
        name_applied(quirk),
        name_spared(quirk),
    ]


def test_a_quirk_that_is_a_flag_applies_where_the_event_has_another_result() -> None:
    """A reset reads the flag, whether or not KV events are enabled."""
    quirk, without_events = Quirk.RESET_EVENT_IS_LATE, replace(CONFIG, enable_kv_cache_events=False)
    assert list_sides(quirk, v.Reset(), config=without_events) == [name_spared(quirk)]
    filled = (v.Submit(v.Request("A", (1, 2, 3), max_tokens=1)), *STEP, v.Schedule())
    assert list_sides(quirk, *filled) == []
    assert list_sides(quirk, *filled, v.Reset()) == [name_applied(quirk)]


@pytest.mark.parametrize("release", ["0.11.0", "0.19.1", "0.27.0", "0.33.0"])
def test_recording_the_sides_of_quirks_changes_nothing(release: str) -> None:
    """The engine is the specification under the same profile, without the recording."""
    options = CheckOptions(engine="spec", profile=f"vllm-{release}", preset="tiny")
    make_engine = load(options)
    for index in range(5):
        assert run_episode(options, index, make_engine).first is None


def test_quirks_that_replace_nothing_are_named() -> None:
    """All other quirks replace a rule under a config of some feature."""
    configs = [replace(PLAIN_CONFIG, **one.config) for found in EXAMPLES.values() for one in found]
    replacing = set()
    for story, config in product(QUIRKS, configs):
        before = get_rules(frozenset(story.upon), config)
        after = story.change(before, config)
        if any(after[one] is not before[one] for one in after.replaced):
            replacing.add(story.quirk)
    assert {*Quirk} - replacing == {*OF_ANOTHER}


def get_facts(options: CheckOptions) -> EngineFacts:
    return read_engine_facts(options, load(options))


def test_sides_of_a_quirk_are_required_if_its_feature_is_asked_for() -> None:
    options = CheckOptions(engine="spec", profile="vllm-0.19.1", with_features=("sessions",))
    facts = get_facts(options)
    wished = list_quirk_goals(options, facts, only_wished=True)
    assert name_spared(Quirk.SESSIONS_KEEP_MAX_TOKENS) in wished
    assert name_applied(Quirk.SESSIONS_KEEP_MAX_TOKENS) not in wished
    assert {FEATURE_OF[Quirk(goal.split()[1])] for goal in wished} == {"sessions"}
    assert {*wished} <= {*missing_goals({}, options, facts)}
    assert not {*wished} & {*missing_goals(dict.fromkeys(wished, 1), options, facts)}
    assert {*wished} < {*list_quirk_goals(options, facts)}
    plain = CheckOptions(engine="spec", profile="vllm-0.19.1")
    assert not {*wished} & {*missing_goals({}, plain, get_facts(plain))}
    strict = CheckOptions(engine="spec", with_features=("sessions",))
    assert list_quirk_goals(strict, get_facts(strict)) == []


def test_a_check_lists_the_sides_that_it_has_not_seen() -> None:
    options = CheckOptions(engine="spec", preset="tiny", profile="vllm-0.19.1", max_events=300)
    result = check(options)
    assert result.num_quirk_sides == len(list_quirk_goals(options, get_facts(options)))
    assert 0 < len(result.unseen_sides) < result.num_quirk_sides
    assert not {*result.unseen_sides} & {*result.quirks}


def test_sides_that_are_not_required_are_of_existing_quirks() -> None:
    every = Profile("all", frozenset(Quirk))
    assert {*UNMET} <= {*list_goals(every)}
    assert all(UNMET.values())
    assert {*FEATURE_OF.values()} <= {*BY_NAME}
    assert {get_quirk_title(goal) for goal in list_goals(every)} == {
        story.title for story in QUIRKS
    }
    assert len(list_goals(find_profile("vllm-0.19.1"))) == 2 * len(
        find_profile("vllm-0.19.1").quirks
    )
