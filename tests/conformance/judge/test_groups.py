"""Several KV groups: correct engines are not accused, and each seeded bug is found by its check.

The specification is compared with itself, so a bug seeded into it causes no divergence: only
the property checks and the worker can find it. `make soak` plays each case with more seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from blockstep.conformance.engine import EngineFactory, EngineTraits, Safety
from blockstep.conformance.explore.shard import Task
from blockstep.conformance.explore.walk import walk
from blockstep.conformance.explore.worlds import WORLDS
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.museum import build
from blockstep.conformance.protocol.program import Drain, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search import episodes
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.core import prefix_cache, slots
from blockstep.spec.core.requests import NO_HIT
from blockstep.spec.features import common_prefix, groups, mamba
from blockstep.spec.features.groups import hits, kinds

FULL, WINDOW = v.GroupKind.FULL, v.GroupKind.SLIDING_WINDOW
CHUNKS, STATES = v.GroupKind.CHUNKED_LOCAL, v.GroupKind.RECURRENT
ALIGN = v.MambaCacheMode.ALIGN

Groups = Callable[[v.Config], tuple[v.KVGroup, ...]]
"""The groups of a config, in blocks of the sizes that it has."""


def with_window(config: v.Config) -> tuple[v.KVGroup, ...]:
    size = config.block_size
    return v.KVGroup(FULL, size), v.KVGroup(WINDOW, size, sliding_window=size + 1)


def of_two_sizes(config: v.Config) -> tuple[v.KVGroup, ...]:
    size = config.block_size
    window = v.KVGroup(WINDOW, 2 * size, sliding_window=3)
    return v.KVGroup(CHUNKS, size, attention_chunk_size=2 * size + 1), window, v.KVGroup(FULL, size)


def with_states(config: v.Config) -> tuple[v.KVGroup, ...]:
    num_drafts = config.num_speculative_tokens
    mode, size = ALIGN, config.block_size * (num_drafts // config.block_size + 1)
    if not config.enable_prefix_caching:
        mode, size = v.MambaCacheMode.NONE, config.block_size * config.max_model_len
    elif not config.enable_chunked_prefill:
        mode = v.MambaCacheMode.ALL
    states = v.KVGroup(STATES, size, mamba_cache_mode=mode, num_speculative_blocks=num_drafts)
    return v.KVGroup(FULL, config.block_size), states


MIXES: tuple[Groups, ...] = (with_window, of_two_sizes, with_states)


class Shown(SpecEngine):
    """The specification, judged at safety."""

    traits = EngineTraits(equivalence=Safety())


class Hidden(Shown):
    """The same engine without a visible state."""

    def snapshot(self) -> v.Snapshot | None:  # type: ignore[override]
        return None


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[str]]:
    """Return a function that plays episodes with these groups and yields the checks that fail."""
    fit_config = episodes.fit_config
    # A defect planted in a rule is on both sides, so nothing differs: every property is asked.
    always = property(lambda _run: True, lambda _run, _value: None)
    monkeypatch.setattr(LockStep, "asks_all", always)

    def play(
        groups: Groups, make_engine: EngineFactory, seed: int, count: int, *features: str
    ) -> Iterator[str]:
        def fit(config: v.Config, make_engine: EngineFactory) -> Any:
            config, missing = fit_config(replace(config, groups=()), make_engine)
            config = replace(config, groups=groups(config), num_blocks=2 * config.num_blocks)
            if any(group.mamba_cache_mode is ALIGN for group in config.groups):
                # Chunks end at blocks there, where an item that must be whole may not fit.
                config = replace(config, disable_chunked_mm_input=False)
            assert not v.config_problems(config)
            return config, missing

        monkeypatch.setattr(episodes, "fit_config", fit)
        options = CheckOptions(
            preset="tiny",
            seed=seed,
            with_features=features,
            without_features=("groups", "transfers", "forks"),
        )
        for index in range(count):
            _, _, findings = episodes.play_episode(options, index, make_engine)
            yield from [finding.sentence for finding in findings]

    return play


@pytest.mark.parametrize("engine", [SpecEngine, Shown, Hidden, HostEngine])
@pytest.mark.parametrize("groups", MIXES)
def test_no_right_engine_is_accused(play: Any, groups: Groups, engine: EngineFactory) -> None:
    assert [*play(groups, engine, seed=1, count=8)] == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("engine", [SpecEngine, Shown, Hidden, HostEngine])
@pytest.mark.parametrize("groups", MIXES)
def test_no_right_engine_is_accused_in_a_long_run(
    play: Any, groups: Groups, engine: EngineFactory, seed: int
) -> None:
    assert [*play(groups, engine, seed=seed, count=1_000)] == []


# Seeded bugs.

Rule = Callable[..., Any]
Defect = tuple[str, Groups, tuple[str, ...], Rule, Callable[[Rule], Rule]]
"""The check, groups and features that show the defect, the rule, and its replacement."""


def skip_a_token_early(rule: Any) -> Any:
    """A window skips the first token that it still attends to."""
    return lambda group, computed: rule(group, computed + (group.kind is WINDOW))


def free_a_block_late(rule: Any) -> Any:
    return lambda group, computed: max(rule(group, computed) - group.block_size, 0)


def accept_all_drafts(rule: Any) -> Any:
    """Drafts in flight count as accepted, so blocks are freed that a rollback needs."""
    return lambda config, pool, request, _in_doubt, *others: rule(config, pool, request, 0, *others)


def ignore_the_window(rule: Any) -> Any:
    """A hit is what full attention finds; blocks of the window are not looked up."""

    def is_valid(group: v.KVGroup, runs: Sequence[int], num_tokens: int, behind: int) -> bool:
        return group.kind is WINDOW or bool(rule(group, runs, num_tokens, behind))

    return is_valid


def hit_states_at_once(rule: Any) -> Any:
    """A state can be hit in the step that writes it."""
    return lambda _step: []


def zero_nothing(rule: Any) -> Any:
    return lambda _step: ()


def count_one_more(rule: Any) -> Any:
    """The hint counts one block more than the rows have in common."""
    return lambda step: tuple(count + 1 for count in rule(step))


def run_past_the_block(rule: Any) -> Any:
    """A chunk of a prompt does not end at the end of a block."""
    return lambda _computed, end, *_: end


def round_down(rule: Any) -> Any:
    """A chunk is rounded down to whole blocks, even to no token (upstream #40707)."""
    return lambda computed, end, last, unit, *_: (
        max(end // unit * unit, computed) if end < last else end
    )


def charge_all_tokens(rule: Any) -> Any:
    """A window is charged for every token of a request (upstream #39734)."""

    def count(config: v.Config, request: Any, _rules: Any) -> int:
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        return sum(-(-num_tokens // group.block_size) for group in config.kv_groups)

    return count


DRAFTS_AHEAD = ("async", "drafts")
DEFECTS: list[Defect] = [
    ("written_block_is_in_one_place", with_window, (), kinds.compute_num_skipped_tokens,
     skip_a_token_early),
    ("row_has_freed_skipped_blocks", of_two_sizes, (),
     kinds.compute_num_skipped_tokens, free_a_block_late),
    ("attended_blocks_are_held", with_window, DRAFTS_AHEAD, groups.skip_slots, accept_all_drafts),
    ("attended_slot_holds_the_right_prefix", with_window, ("caching",), hits.is_valid_hit,
     ignore_the_window),
    ("attended_slot_was_written", with_states, ("caching",), mamba.get_unwritten_states,
     hit_states_at_once),
    ("block_of_a_state_is_zeroed_for_attention", with_states, (), mamba.get_blocks_to_zero,
     zero_nothing),
    ("common_prefix_is_of_every_row", with_window, (), common_prefix.get_num_common_prefix_blocks,
     count_one_more),
    ("published_block_holds_the_right_prefix", with_states, ("caching",), mamba.compute_aligned_end,
     run_past_the_block),
    ("head_of_the_queue_is_admitted_when_it_fits", with_states, ("caching",),
     mamba.compute_aligned_end, round_down),
    ("request_is_refused_for_its_size_only_if_it_never_fits", with_window, (),
     slots.compute_max_blocks, charge_all_tokens),
]  # fmt: skip


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], None]:
    """Return a function that replaces a rule in every module of the specification."""

    def plant(rule: Callable[..., Any], wrap: Callable[[Any], Any]) -> None:
        wrong = wrap(rule)
        for name, module in list(sys.modules.items()):
            if name.startswith("blockstep.spec"):
                for known, value in list(vars(module).items()):
                    if value is rule:
                        monkeypatch.setattr(module, known, wrong)

    return plant


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect[-1].__name__)
def test_a_seeded_bug_is_found_by_its_check(play: Any, plant: Any, defect: Defect) -> None:
    sentence, groups, features, rule, wrap = defect
    plant(rule, wrap)
    assert sentence in play(groups, SpecEngine, 1, 900, *features)


def test_a_chunk_is_charged_for_one_state_only() -> None:
    """An engine that charges more leaves a request waiting that fits; a check finds it first."""
    submits = (v.Submit(v.Request("A", (0,), 2)), v.Submit(v.Request("B", (1,) * 4, 1)))
    program = Program(WORLDS["spare"].config, (*submits, v.Schedule(), Drain()))
    _, findings = run_program(program, build("states-charged-by-tokens"))
    assert findings[0].sentence == "head_of_the_queue_is_admitted_when_it_fits"


def test_a_small_world_finds_blocks_that_are_freed_too_early(plant: Any) -> None:
    """The walk has no worker: the check of the state finds the defect alone."""
    plant(groups.skip_slots, accept_all_drafts)
    walked = walk(Task(replace(WORLDS["doubts"], expected=None)))
    assert any("P5 attended_blocks_are_held" in line for line in walked.found)


def test_a_small_world_finds_a_hit_that_is_not_the_longest(plant: Any) -> None:
    """The planted rule takes no hit where there is one."""
    plant(prefix_cache.get_prefix_hit, lambda _rule: lambda *_: NO_HIT)
    walked = walk(Task(replace(WORLDS["narrow"], expected=None)))
    assert any("P5 hit_is_the_longest_possible" in line for line in walked.found)
