"""Changed specification: the replacement of a function is called, however it is called."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from blockstep.conformance.protocol.changed_spec import ChangedSpec, link
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.core.block_pool import allocate_blocks, free_blocks, withdraw_all
from blockstep.spec.core.preemption import process_preemption
from blockstep.spec.core.prefix_cache import find_hit
from blockstep.spec.core.requests import NO_HIT
from blockstep.spec.core.rules import STRICT_RULES, Rules
from blockstep.spec.core.schedule import create_step
from blockstep.spec.core.slots import allocate_slots, take_blocks
from blockstep.spec.core.work import Step
from blockstep.spec.features.groups.hits import get_joint_hit
from blockstep.spec.features.groups.kinds import skip_before_window
from blockstep.spec.features.identity import name_content
from blockstep.spec.features.kv_transfer import process_admission_attempt
from blockstep.spec.features.resets import process_reset
from blockstep.spec.releases.policy_order import step_continues_after_self_preemption
from blockstep.spec.releases.quirk import Change
from blockstep.spec.snapshots import get_snapshot
from blockstep.spec.transition import transition

CONFIG = v.Config(num_blocks=8, block_size=2, max_num_seqs=4)
WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=2)
LONG = v.Request("A", (1, 2, 3, 4, 5), max_tokens=4)
SHORT = v.Request("B", (7, 8, 9), max_tokens=2)


def make_engine(change: Change, config: v.Config = CONFIG) -> ChangedSpec:
    kind = type("Changed", (ChangedSpec,), {"change": staticmethod(change)})
    engine: ChangedSpec = kind(config)
    return engine


def submit_and_schedule(engine: SpecEngine, request: v.Request = LONG) -> v.Plan:
    engine.submit(request)
    return engine.schedule()


def change_nothing(rules: Rules, _config: v.Config) -> Rules:
    return rules


def count_calls(function: Callable[..., Any]) -> tuple[Change, list[object]]:
    """A change that counts the calls of a function, and its list of calls."""
    calls: list[object] = []

    def change(rules: Rules, _config: v.Config) -> Rules:
        def by(*values: Any, **named: Any) -> Any:
            calls.append(function)
            return rules[function](*values, **named)

        return rules.replacing(function, by)

    return change, calls


GROUPED = v.Config(num_blocks=12, block_size=2, groups=(v.KVGroup(v.GroupKind.FULL, 2), WINDOW))
STORE = v.Config(num_blocks=12, block_size=2, kv_connector=True)


@pytest.mark.parametrize(
    ("function", "config"),
    [
        pytest.param(allocate_blocks, CONFIG, id="called directly"),
        pytest.param(create_step, CONFIG, id="called directly, in its own module"),
        pytest.param(take_blocks, CONFIG, id="called by the rules"),
        pytest.param(name_content, CONFIG, id="a hook"),
        pytest.param(find_hit, GROUPED, id="replaced by a feature"),
        pytest.param(get_joint_hit, GROUPED, id="in the place of another"),
        pytest.param(skip_before_window, GROUPED, id="in a table"),
        pytest.param(process_admission_attempt, STORE, id="calls what it replaces"),
        pytest.param(Step.add, CONFIG, id="a method"),
    ],
)
def test_the_replacement_is_called(function: Callable[..., Any], config: v.Config) -> None:
    change, calls = count_calls(function)
    engine, clean = make_engine(change, config), SpecEngine(config)
    plan = submit_and_schedule(clean)
    assert submit_and_schedule(engine) == plan
    assert engine.commit(plan, {"A": [6]}) == clean.commit(plan, {"A": [6]})
    assert engine.schedule() == clean.schedule()
    assert calls
    assert engine.snapshot() == clean.snapshot()


def test_a_function_called_from_another_module_is_replaced() -> None:
    """`kv_transfer` calls `resets.process_reset`."""
    change, calls = count_calls(withdraw_all)
    assert make_engine(change, STORE).reset()
    change, more = count_calls(process_reset)
    assert make_engine(change, STORE).reset()
    assert len(calls) == len(more) == 1


def leave_no_hit(rules: Rules, _config: v.Config) -> Rules:
    return rules.replacing(find_hit, lambda _config, _pool, _request: NO_HIT)


def test_two_engines_and_the_specification_do_not_disturb_each_other() -> None:
    engines = [make_engine(leave_no_hit), make_engine(change_nothing), SpecEngine(CONFIG)]
    for engine in engines:  # side by side, event by event
        engine.submit(LONG)
    plans = [engine.schedule() for engine in engines]
    assert plans[0] == plans[1] == plans[2]
    for engine, plan in zip(engines, plans, strict=True):
        engine.commit(plan, {"A": [6]})
        engine.submit(v.Request("C", LONG.prompt_token_ids, max_tokens=1))
    computed = [engine.schedule().new[0].num_computed_tokens for engine in engines]
    assert computed == [0, 4, 4]
    assert STRICT_RULES.replaced == {}
    assert SpecEngine(CONFIG).state.rules[find_hit] is find_hit


def test_a_replacement_for_a_single_call_is_used_in_that_call() -> None:
    """A change may call a function by other rules."""
    calls: list[int] = []

    def change(rules: Rules, _config: v.Config) -> Rules:
        allocate: Any = rules[allocate_slots]

        def by(*values: Any) -> Any:
            *others, mine = values

            def take(*values: Any) -> Any:
                calls.append(1)
                return rules[take_blocks](*values)

            return allocate(*others, mine.replacing(take_blocks, take))

        return rules.replacing(allocate_slots, by)

    submit_and_schedule(make_engine(change))
    assert calls


def test_the_change_of_a_quirk_changes_a_specification() -> None:
    config = v.Config(num_blocks=5, block_size=1, policy=v.Policy.PRIORITY)
    rules = link(step_continues_after_self_preemption, config).rules
    assert rules.changes == {
        f"{step_continues_after_self_preemption.__module__}.{step_continues_after_self_preemption.__name__}"
    }
    assert make_engine(step_continues_after_self_preemption, config).schedule() == v.Plan(0)


def free_nothing(rules: Rules, _config: v.Config) -> Rules:
    return rules.replacing(free_blocks, lambda pool, _table: pool)


class Leaking(ChangedSpec):
    """An engine with an importable name."""

    change = staticmethod(free_nothing)


def test_a_copied_engine_has_the_same_rules() -> None:
    for is_deep in (True, False):
        engine = Leaking(CONFIG)
        submit_and_schedule(engine)
        copied = deepcopy(engine) if is_deep else pickle.loads(pickle.dumps(engine))
        for one in (engine, copied):
            one.abort("A")
        assert copied.snapshot() == engine.snapshot()
        assert copied.state.pool.ref_counts.count(1) == 3


def test_a_changed_specification_has_no_assertions() -> None:
    """A wrong decision is found by what it leads to, as in any other engine."""

    def change(rules: Rules, _config: v.Config) -> Rules:
        preempt = rules[process_preemption]

        def by(step: Step, victim_index: int) -> v.RequestId:
            step.pool = free_blocks(step.pool, step.requests["A"].block_tables[0])
            return preempt(step, victim_index)

        return rules.replacing(process_preemption, by)

    engine = make_engine(change)
    plan = submit_and_schedule(engine)
    engine.commit(plan, {"A": [6]})
    engine.reset(reset_running_requests=True)
    assert min(engine.state.pool.ref_counts) == -1
    clean = SpecEngine(CONFIG)
    clean.commit(submit_and_schedule(clean), {"A": [6]})
    with pytest.raises(AssertionError, match="a held block has a holder"):
        free_blocks(free_blocks(clean.state.pool, (1,)), (1,))


def test_a_function_of_another_package_cannot_be_replaced() -> None:
    def change(rules: Rules, _config: v.Config) -> Rules:
        return rules.replacing(get_snapshot, get_snapshot).replacing(len, len)

    with pytest.raises(ValueError, match="is no function of the specification"):
        make_engine(change)


def test_without_a_change_all_results_are_those_of_the_specification() -> None:
    engine = make_engine(change_nothing)
    state = SpecEngine(CONFIG).state
    for event in (v.Submit(LONG), v.Schedule(), v.Submit(SHORT), v.Schedule()):
        result = transition(state, event)
        answer = engine.apply(event)
        if isinstance(result, v.Rejected):
            assert answer == result
            continue
        state = result.state
        assert answer == result.observation
        assert engine.snapshot() == get_snapshot(state)
