"""Seeded bugs at `safety`: each is found, and engines without one are not accused.

`make test` plays a few events of each; `make soak` plays as many as a user's run would have, with
three seeds, and 100,000 of each correct engine that decides differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from missing_capabilities import make_lacking
from other_policies import SAFETY, UNLIKE, Unlike
from seeded_engines import SEEDED, PutsReportsAside, ReportsLastHit, Seeded

from blockstep.conformance.engine import Capability, EngineFactory
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.changed_spec import ChangedSpec
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Answer, Drain, Program, Report
from blockstep.conformance.search.episodes import fit_depth, run_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.vocabulary import Config, KVOffer, Request, Schedule, Submit

NUM_EVENTS = 8_000
"""Number of events within which each bug is found, with each of three seeds."""
FEATURES: tuple[tuple[str, ...], ...] = (
    *((), ("transfers",), ("encoder",), ("sessions",), ("pins",), ("forks",), ("tiers",)),
    *(("groups",), ("masks",), ("async",), ("drafts",), ("transfers", "drafts")),
    *(("sessions", "async"), ("kinds",), ("events",), ("adapters",), ("aborts",), ("hostile",)),
    *(("drafts", "async"), ("drafts", "groups"), ("drafts", "forks"), ("drafts", "sessions")),
)
"""Features of the episodes of a correct engine, in turn."""
ALL, SHORT = {"tiny": 5, "small": 4, "real": 1}, {"tiny": 1, "small": 1}
"""Shares of the events by preset: an episode of `real` is as long as ten others."""
STORE = Config(num_blocks=4, block_size=2, kv_connector=True)
PUT_ASIDE = Program(
    STORE,
    (
        *(Submit(Request("A", (1, 2), 1)), KVOffer("A", 0, delays_free=True)),
        *(Submit(Request("B", (4, 5, 6), 4)), Schedule(), Answer(), Schedule()),
        *(Answer(Report(sending=("A",))), *(Schedule(), Answer()) * 2, Drain()),
    ),
)
"""The store finishes its read of A while only B runs (SGLang #20049)."""
RELOADED = Program(
    Config(
        num_blocks=6,
        block_size=2,
        kv_connector=True,
        max_num_batched_tokens=2,
        scheduler_reserve_full_isl=False,
    ),
    (
        *(Submit(Request("A", (1, 2), 6)), Schedule(), Answer()),
        *(Submit(Request("B", (3, 4, 5, 6, 7), 4)), *(Schedule(), Answer()) * 5),
        *(KVOffer("B", 4), *(Schedule(), Answer()) * 5, Drain()),
    ),
)
"""B is preempted before its first token, then loaded: its first hit was none (LMCache #2912)."""


def hide(make_engine: EngineFactory) -> EngineFactory:
    """Return the same engine without a visible state."""
    return make_lacking(make_engine, {Capability.SNAPSHOT}, SAFETY)


def search(make_engine: EngineFactory, seed: int, features: tuple[str, ...]) -> Finding | None:
    """The first finding within a number of events."""
    num_events = index = 0
    while num_events < NUM_EVENTS:
        preset = ("small", "tiny")[index % 2]
        options = CheckOptions("mine", preset=preset, seed=seed, with_features=features)
        episode = run_episode(fit_depth(options, make_engine), index, make_engine)
        if episode.first is not None:
            return episode.first
        num_events, index = num_events + episode.num_events, index + 1
    return None


def play(
    make_engine: EngineFactory,
    seed: int,
    num_events: int,
    parts: Mapping[str, int] = ALL,
    index: int = 0,
) -> int:
    """Play at least `num_events` events, shared among the presets, without a finding."""
    played = dict.fromkeys(parts, 0)
    while sum(played.values()) < num_events:
        preset = min(parts, key=lambda name: played[name] / parts[name])
        features = FEATURES[index % len(FEATURES)]
        options = CheckOptions("mine", preset=preset, seed=seed, with_features=features)
        episode = run_episode(fit_depth(options, make_engine), index, make_engine)
        assert episode.first is None, (episode.first, preset, seed, index, features)
        played[preset] += episode.num_events
        index += 1
    return sum(played.values())


def check_seeded(case: Seeded, seed: int) -> None:
    found = search(case.engine, seed, case.features)
    assert found is not None
    assert found.sentence == case.sentence
    if case.if_hidden:
        found = search(hide(case.engine), seed, case.features)
        assert found is not None
        assert found.sentence == case.if_hidden


NAMES = [case.engine.__name__ for case in SEEDED]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("case", SEEDED, ids=NAMES)
def test_a_seeded_bug_is_found_by_its_check(case: Seeded) -> None:
    check_seeded(case, 3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", SEEDED, ids=NAMES)
def test_a_seeded_bug_is_found_by_its_check_with_other_seeds(case: Seeded, seed: int) -> None:
    check_seeded(case, seed)


@pytest.mark.parametrize(
    ("program", "wrong", "sentence"),
    [
        (PUT_ASIDE, PutsReportsAside, "every_hold_has_an_owner_and_an_end"),
        (RELOADED, ReportsLastHit, "first_hit_is_remembered"),
        (RELOADED, hide(ReportsLastHit), "reported_cached_tokens_are_of_the_first_hit"),
    ],
)
def test_a_reported_defect_is_found_in_its_program(
    program: Program, wrong: EngineFactory, sentence: str
) -> None:
    assert run_program(program, wrong)[1][0].sentence == sentence
    assert run_program(program, Unlike)[1] == run_program(program, hide(Unlike))[1] == []


@pytest.mark.parametrize("engine", UNLIKE, ids=lambda engine: engine.__name__)
def test_a_correct_engine_that_decides_differently_is_not_accused(
    engine: type[ChangedSpec],
) -> None:
    first = UNLIKE.index(engine) * 4  # so that each begins with other features
    play(engine, 1, 200, SHORT, first)
    play(hide(engine), 1, 100, SHORT, first)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("shows_state", [True, False])
@pytest.mark.parametrize("engine", UNLIKE, ids=lambda engine: engine.__name__)
def test_a_correct_engine_is_not_accused_in_many_events(
    engine: type[ChangedSpec],
    shows_state: bool,
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    make_engine: EngineFactory = engine if shows_state else hide(engine)
    record_property("events", play(make_engine, seed, 100_000))
