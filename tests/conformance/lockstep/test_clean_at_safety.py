"""Correct engines are never accused at safety, whatever they show and claim to do.

What an adapter names among its capabilities is its author's choice, so each choice is tried: all
that the engine can do, all but one thing, nothing at all, and a random part, another one for each
episode. `make soak` plays 100,000 events of each with three seeds; `make test` plays a few.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import pytest
from foreign_support.toys import AbortingToy
from missing_capabilities import make_lacking

from blockstep.conformance.engine import (
    ALL_CAPABILITIES,
    Capability,
    EngineFactory,
    EngineTraits,
    Safety,
    get_capabilities,
    get_traits,
)
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.episodes import fit_depth, run_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.capabilities import HOST

CHECKOUT = os.environ.get("BLOCKSTEP_NANO_VLLM")
ENGINES = ("host", "nano_vllm", "toy")
PRESETS = {"tiny": 5, "small": 4, "real": 1}
"""Shares of the events by preset: an episode of `real` is as long as ten others."""
SEEDS = (1, 2, 3)
NUM_EVENTS = 100_000
"""Number of events for each case and seed."""
NUM_EVENTS_SAMPLED = 250
ALL, NONE, DRAWN = "all", "none", "drawn"


class Case(NamedTuple):
    """An engine, and which of its capabilities its adapter claims."""

    engine: str
    claims: str
    """`all`, `none`, `drawn`, or the only one that is left out."""
    shows_state: bool

    def __str__(self) -> str:
        return f"{self.engine}-{self.claims}-{'shown' if self.shows_state else 'hidden'}"


# The capabilities are listed here because a checkout of nano-vllm may be missing.
OWN: dict[str, frozenset[str]] = {
    "host": HOST,
    "nano_vllm": frozenset({Capability.SNAPSHOT}),
    "toy": frozenset({Capability.SNAPSHOT, Capability.ABORT}),
}


def list_cases() -> Iterator[Case]:
    """Yield all cases, each with the state shown and with the state hidden."""
    for engine, own in OWN.items():
        able = sorted(own - {Capability.SNAPSHOT})
        parts = [ALL, *able, NONE, DRAWN] if len(able) > 1 else [ALL, *able]
        for claims in parts:
            yield from (Case(engine, claims, True), Case(engine, claims, False))


CASES = tuple(list_cases())
PLAIN = tuple(case for case in CASES if case.claims in (ALL, DRAWN) and case.engine != "nano_vllm")


@cache
def load(engine: str) -> EngineFactory:
    """The engine's factory. Skips where there is no checkout of nano-vllm."""
    if engine == "toy":
        return AbortingToy
    if engine == "nano_vllm" and CHECKOUT is None:
        pytest.skip("BLOCKSTEP_NANO_VLLM names no checkout of nano-vllm")
    if engine == "nano_vllm" and CHECKOUT not in sys.path:
        sys.path.append(str(CHECKOUT))
    return load_engine(engine)


def claim(case: Case, draw: random.Random) -> frozenset[str]:
    """Return the capabilities that the adapter claims in one episode."""
    able = sorted(OWN[case.engine] - {Capability.SNAPSHOT})
    match case.claims:
        case "all":
            claimed = frozenset(able)
        case "none":
            claimed = frozenset[str]()
        case "drawn":
            claimed = frozenset(draw.sample(able, draw.randrange(len(able) + 1)))
        case left_out:
            claimed = frozenset(able) - {left_out}
    return claimed | {Capability.SNAPSHOT} if case.shows_state else claimed


def play(case: Case, seed: int, num_events: int, parts: Mapping[str, int] = PRESETS) -> int:
    """Play at least `num_events` events, shared among the presets. Return their number."""
    make_engine = load(case.engine)
    weaker = get_traits(make_engine).equivalence
    traits = EngineTraits(equivalence=weaker or Safety())
    draw = random.Random(f"{case}/{seed}")
    played, index = dict.fromkeys(parts, 0), 0
    while sum(played.values()) < num_events:
        preset = min(parts, key=lambda name: played[name] / parts[name])
        claimed = claim(case, draw)
        right = make_lacking(make_engine, ALL_CAPABILITIES - claimed, traits)
        options = CheckOptions("mine", preset=preset, seed=seed)
        episode = run_episode(fit_depth(options, right), index, right)
        parameters = (str(case), preset, seed, index, sorted(claimed))
        assert episode.first is None, (episode.first, *parameters)
        # An engine that claims little may support none of a few actions.
        assert episode.num_events or episode.skipped, parameters
        assert index <= num_events, f"{index} episodes of next to nothing"
        played[preset] += episode.num_events
        index += 1
    return sum(played.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_listed_capabilities_are_those_of_the_engine(engine: str) -> None:
    has = get_capabilities(load(engine))
    assert has == OWN[engine], "what it claims of these it can do"


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_correct_engine_is_not_accused(case: Case) -> None:
    play(case, 1, NUM_EVENTS_SAMPLED, {"tiny": 1, "small": 1})


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_correct_engine_is_not_accused_in_many_events(
    case: Case, seed: int, record_property: Callable[[str, object], None]
) -> None:
    record_property("events", play(case, seed, NUM_EVENTS))
