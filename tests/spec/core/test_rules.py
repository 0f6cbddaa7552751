"""Rules: equality, pickling, what each quirk replaces, and one function for each event."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import permutations
from pathlib import Path

import pytest

import blockstep.spec
from blockstep.spec import Config, Oracle, Policy, Request
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.rules import STRICT_RULES, Rules
from blockstep.spec.features import EVENTS, FEATURES
from blockstep.spec.profiles import RELEASES, Profile, initial_state
from blockstep.spec.releases import QUIRKS, Quirk, QuirkStory, get_rules
from blockstep.spec.transition import Accepted, process_event, transition
from blockstep.spec.vocabulary import EVENT_TYPES, GroupKind, KVGroup, Schedule, Submit

CACHED = Config(num_blocks=9)
UNCACHED = replace(CACHED, enable_prefix_caching=False)
BESIDE = replace(UNCACHED, is_encoder_decoder=True, groups=(KVGroup(GroupKind.RECURRENT, 16),))

STORED = replace(CACHED, kv_connector=True)
OF_ANOTHER = (Quirk.PADDING_WAITS_AT_MAX_MODEL_LEN, Quirk.PADDING_ON_HIT_WITHOUT_OTHER_REQUESTS)
"""Quirks that only change what `padding_on_admission` does."""


def test_rules_with_equal_quirks_are_equal() -> None:
    some = frozenset({Quirk.NO_FULL_ISL_RESERVE, Quirk.SINGLE_WAITING_QUEUE})
    rules = get_rules(some, CACHED)
    assert rules == get_rules(some, CACHED)
    assert hash(rules) == hash(get_rules(some, CACHED))
    for one, other in permutations((rules, STRICT_RULES)):
        assert one != other
    assert rules != some
    assert repr(rules) == "Rules(no_full_isl_reserve, single_waiting_queue)"
    assert repr(STRICT_RULES) == "Rules()"


@pytest.mark.parametrize("profile", RELEASES, ids=lambda profile: profile.name)
def test_a_pickled_or_copied_state_has_the_same_rules(profile: Profile) -> None:
    state = initial_state(CACHED, profile)
    for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert again == state
        for event in (Submit(Request("A", (1, 2, 3))), Schedule()):
            first, second = transition(state, event), transition(again, event)
            assert isinstance(first, Accepted)
            assert first == second
        assert again.rules.changes == profile.quirks


def test_strict_rules_are_one_object_after_pickling() -> None:
    rules = get_rules(frozenset(), CACHED)
    assert pickle.loads(pickle.dumps(STRICT_RULES)) is STRICT_RULES
    assert pickle.loads(pickle.dumps(rules)) is rules
    assert Oracle(CACHED).state.rules is rules
    assert rules == STRICT_RULES


def list_changed(rules: Rules, before: Rules) -> set[str]:
    """Return the names of functions for which `rules` and `before` have different replacements."""
    functions = {*rules.replaced, *before.replaced}
    return {one.__qualname__ for one in functions if rules[one] is not before[one]}


@pytest.mark.parametrize("story", QUIRKS, ids=lambda story: story.quirk)
def test_a_quirk_replaces_one_or_two_functions(story: QuirkStory) -> None:
    """A quirk is applied to the quirks that it needs, under each of the four configs."""
    upon = frozenset(story.upon)
    changed: set[str] = set()
    for config in (CACHED, UNCACHED, BESIDE, STORED):
        before = get_rules(upon, config)
        changed |= list_changed(story.change(before, config), before)
    assert len(changed) in ((0,) if story.quirk in OF_ANOTHER else (1, 2)), changed


def _list_hooks(hooks: Hooks) -> list[Callable[..., object]]:
    """Return the functions in all tables of `hooks`."""
    return [hook for table in fields(hooks) for hook in getattr(hooks, table.name)]


def test_a_release_replaces_only_functions_that_are_called_by_rules() -> None:
    """Hooks of features and the functions that process an event count as called by rules."""
    text = "".join(file.read_text() for file in Path(blockstep.spec.__path__[0]).rglob("*.py"))
    by_name = {*re.findall(r"rules\[(?:\w+\.)?(\w+)\]", text)}
    for config in (CACHED, UNCACHED, BESIDE, STORED):
        rules = get_rules(frozenset(Quirk), config)
        called = {hook for feature in FEATURES for hook in _list_hooks(feature.hooks)}
        called |= {*EVENTS.values()}
        for function in rules.replaced:
            assert function in called or function.__name__ in by_name, function


def test_each_event_has_one_function() -> None:
    """Each event is a case of `process_event` or is in the table of one feature."""
    cases = re.findall(r"case v\.(\w+)\(", inspect.getsource(process_event))
    ours = [kind.__name__ for feature in FEATURES for kind in feature.events]
    assert sorted([*cases, *ours]) == sorted(kind.__name__ for kind in EVENT_TYPES)


@pytest.mark.parametrize("other", [None, Quirk.UNWRITTEN_KEYS_STAY])
def test_blocks_of_a_victim_without_keys_are_reused_first(
    other: Quirk | None,
) -> None:
    """Preemption frees blocks in the same order as a finish or a reset does."""
    config = Config(
        num_blocks=6, block_size=2, max_model_len=10, policy=Policy.PRIORITY,
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    quirks = {Quirk.BLOCKS_WITHOUT_KEYS_REUSED_FIRST, *([other] if other else [])}
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    oracle.submit(Request("low", (1, 2, 3, 4, 5), priority=1))
    oracle.submit(Request("high", (6, 7, 8), max_tokens=4))
    plan = oracle.schedule()
    assert [row.request_id for row in plan.rows] == ["high", "low"]
    oracle.commit(plan, {"high": [9], "low": [9]})
    plan = oracle.schedule()  # both still fit
    oracle.commit(plan, {"high": [9], "low": [9]})
    (table,) = oracle.state.requests["low"].block_tables
    assert len(table) == 3
    before = oracle.state.pool.free_queue
    assert oracle.schedule().preempted_req_ids == ("low",)
    named = tuple(b for b in reversed(table[:3]) if oracle.state.pool.block_keys[b] is not None)
    taken = oracle.state.requests["high"].block_tables[0][-1]
    assert taken == table[2], "the block without a key was at the head of the queue"
    assert oracle.state.pool.free_queue == (*before, *named)
