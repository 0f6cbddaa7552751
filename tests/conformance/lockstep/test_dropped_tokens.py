"""Engines that drop the token in flight of a preempted request, and run its position again.

Such an engine is correct if it declares this (`EngineTraits.drops_tokens_in_flight`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from episodes_support import play_episodes
from foreign_support.hosts import (
    AtSafety,
    DeclaresAndDoesNotDrop,
    DropsAndDoesNotDeclare,
    DropsForGood,
    DropsInFlight,
)

from blockstep.conformance.draw.presets import SMALL, TINY
from blockstep.conformance.engine import (
    BadEngineError,
    Capability,
    EngineTraits,
    SamePlans,
    get_traits,
)
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Answer, Drain, Mask, Program
from blockstep.conformance.search.metamorphic import compare_pair
from blockstep.conformance.search.options import CheckOptions
from blockstep.conformance.search.verdict_requirements import missing_goals, read_engine_facts
from blockstep.spec import vocabulary as v

PRESETS = (TINY.name, SMALL.name)
GOAL = "dropped_token_runs_again"
SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3)))
WRONG = (DropsForGood, DropsAndDoesNotDeclare, DeclaresAndDoesNotDrop)


def hide(engine: type[Any]) -> type[Any]:
    """Return the engine without a visible state."""

    class Hidden(engine):  # type: ignore[misc]
        def snapshot(self) -> None:
            return None

        def capabilities(self) -> frozenset[str]:
            named: frozenset[str] = super().capabilities()
            return named - {Capability.SNAPSHOT}

    return Hidden


@pytest.mark.parametrize("engine", [DropsInFlight, hide(DropsInFlight)], ids=["shown", "hidden"])
def test_an_engine_that_declares_dropped_tokens_is_not_accused(engine: type[Any]) -> None:
    played = play_episodes(engine, 1000, seed=1)
    assert played.first is None
    assert played.witnesses[GOAL] > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("engine", [DropsInFlight, hide(DropsInFlight)], ids=["shown", "hidden"])
def test_declared_dropped_tokens_are_not_accused_in_many_events(
    engine: type[Any], preset: str, seed: int
) -> None:
    assert play_episodes(engine, 50_000, preset=preset, seed=seed).first is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shows", [True, False], ids=["shown", "hidden"])
@pytest.mark.parametrize("engine", WRONG)
def test_an_engine_that_drops_otherwise_than_it_declares_is_accused(
    engine: type[Any], shows: bool, seed: int
) -> None:
    assert play_episodes(engine if shows else hide(engine), 20_000, seed=seed).first


CONFIG = v.Config(num_blocks=20, block_size=4, max_frames_in_flight=2)
PROGRAM = Program(
    CONFIG,
    (
        v.Submit(v.Request("A", (1, 2, 3), 4)),
        v.Schedule(),
        v.Reset(reset_running_requests=True),
        v.Schedule(),
        Answer(),
        Answer(),
    ),
)


def test_a_dropped_position_runs_again_and_one_token_is_delivered() -> None:
    run, findings = run_program(PROGRAM, DropsInFlight)
    assert findings == []
    assert run.witnesses[GOAL] == 1
    delivered = [it.seen.rows for it in run.exchanges if isinstance(it.seen, v.Outputs)]
    assert [len(rows) for rows in delivered] == [0, 1]
    assert len(run.delivered["A"]) == 1


def test_the_specification_resumes_only_after_the_commit_of_the_token() -> None:
    run, findings = run_program(PROGRAM, AtSafety)
    assert findings == []
    delivered = [it.seen.rows for it in run.exchanges if isinstance(it.seen, v.Outputs)]
    assert [len(rows) for rows in delivered] == [1]


ASYNC = v.Config(
    num_blocks=4,
    block_size=1,
    max_model_len=3,
    policy=v.Policy.PRIORITY,
    enable_prefix_caching=False,
    spec_method=v.SpecMethod.DRAFT_MODEL,
    num_speculative_tokens=1,
    max_frames_in_flight=2,
    async_scheduling=True,
)
MASKED = Program(
    ASYNC,
    (
        v.Submit(v.Request("A", (0,), 1, structured_output=True, grammar=v.Grammar((((7, 0),),)))),
        v.GrammarReady("A"),
        v.Submit(v.Request("B", (0,), 2, priority=-1)),
        v.Submit(v.Request("C", (0,), 1, priority=-2)),
        v.Schedule(),
        v.Schedule(),
        v.Schedule(),
        Mask(2),
    ),
)
"""The mask of the repeated row of A is requested while the dropped row is in flight."""
WINDOWED = Program(
    replace(
        ASYNC,
        num_blocks=7,
        max_model_len=64,
        num_speculative_tokens=2,
        max_frames_in_flight=3,
        groups=(v.KVGroup(v.GroupKind.SLIDING_WINDOW, 1, 1),),
    ),
    (v.Submit(v.Request("B", (0,), 2)), v.Submit(v.Request("A", (0,), 1)), Drain()),
)
"""A window slides while a frame with dropped drafts is in flight."""


@pytest.mark.parametrize("program", [MASKED, WINDOWED], ids=["mask", "window"])
def test_a_dropped_row_is_not_in_flight_for_masks_and_windows(program: Program) -> None:
    run, findings = run_program(program, DropsInFlight)
    assert findings == []
    assert run.witnesses[GOAL] > 0


def test_a_check_of_such_an_engine_must_reach_a_dropped_token() -> None:
    options = CheckOptions("mine", preset=SMALL.name)
    assert GOAL in missing_goals({}, options, read_engine_facts(options, DropsInFlight))
    assert GOAL not in missing_goals({}, options, read_engine_facts(options, AtSafety))


def test_metamorphic_pairs_of_such_an_engine_agree() -> None:
    result = compare_pair(CheckOptions(seed=2), DropsInFlight, 12)
    assert (result.contrast, result.fault, result.num_endless) == (None, None, 0)


def test_tokens_may_be_dropped_only_at_safety() -> None:
    class AtPlans(DropsInFlight):
        traits = EngineTraits(equivalence=SamePlans(), drops_tokens_in_flight=True)

    with pytest.raises(BadEngineError, match="drops no token"):
        get_traits(AtPlans)
