"""An engine that lacks something is never accused for it: each capability, alone and in pairs.

Our own engines are correct, so a finding with some capability left out is a false accusation: the
engine was given an event that it does not claim, or held to a rule that does not apply to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
from episodes_support import play_episodes
from missing_capabilities import make_lacking

from blockstep.conformance.engine import (
    ALL_CAPABILITIES,
    EngineFactory,
    EngineTraits,
    Renamed,
    Safety,
    SamePlans,
    get_capabilities,
)
from blockstep.conformance.lockstep.safety_equivalence import SafetyRun
from blockstep.conformance.lockstep.start_run import run_program
from blockstep.conformance.protocol.program import Action, Answer, Hostile, Program, Propose
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.conformance.search.metamorphic import compare_pair
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

SAFETY = EngineTraits(equivalence=Safety())
EQUIVALENCES = {
    "exact": None,
    "renamed": EngineTraits(equivalence=Renamed()),
    "plan": EngineTraits(equivalence=SamePlans(shows_blocks=True)),
    "safety": SAFETY,
}
ALONE = [(), *((name,) for name in sorted(ALL_CAPABILITIES))]
PAIRS = list(combinations(sorted(ALL_CAPABILITIES), 2))


def play(make_engine: EngineFactory, num_events: int, preset: str, seed: int) -> None:
    """Play episodes of a correct engine."""
    assert play_episodes(make_engine, num_events, preset=preset, seed=seed).first is None


def lacking(name: str, equivalence: str, lacks: Sequence[str]) -> EngineFactory:
    engine = load_engine(name)
    absent = ALL_CAPABILITIES - get_capabilities(engine)
    return make_lacking(engine, (*lacks, *absent), EQUIVALENCES[equivalence])


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("equivalence", EQUIVALENCES)
@pytest.mark.parametrize("lacks", ALONE, ids=" ".join)
def test_an_engine_without_one_capability_is_not_accused(
    lacks: tuple[str, ...], equivalence: str
) -> None:
    play(lacking("host", equivalence, lacks), 120, "small", 2)


@pytest.mark.parametrize("equivalence", EQUIVALENCES)
@pytest.mark.parametrize("has", [(), ("rejection",), ("abort",), ("snapshot",)], ids=" ".join)
def test_an_engine_with_hardly_any_capability_is_not_accused(
    has: tuple[str, ...], equivalence: str
) -> None:
    """A new adapter claims this little: it gets no event that it does not claim."""
    play(lacking("host", equivalence, sorted(ALL_CAPABILITIES.difference(has))), 100, "small", 4)


@pytest.mark.parametrize("equivalence", EQUIVALENCES)
def test_an_engine_without_two_capabilities_is_not_accused(equivalence: str) -> None:
    for seed, lacks in enumerate(PAIRS[:: len(PAIRS) // 7]):
        play(lacking("host", equivalence, lacks), 60, "tiny", seed)


@pytest.mark.soak
@pytest.mark.parametrize("equivalence", EQUIVALENCES)
@pytest.mark.parametrize("lacks", [*ALONE, *PAIRS], ids=" ".join)
def test_an_engine_without_capabilities_is_not_accused_in_many_events(
    lacks: tuple[str, ...], equivalence: str
) -> None:
    play(lacking("host", equivalence, lacks), 15_000, "tiny", 1)
    play(lacking("host", equivalence, lacks), 15_000, "small", 2)


@pytest.mark.parametrize("lacks", [("drafts",), ("grammar",), ("abort", "rejection")], ids=" ".join)
def test_metamorphic_pairs_respect_missing_capabilities(lacks: tuple[str, ...]) -> None:
    make_engine = lacking("host", "safety", lacks)
    result = compare_pair(CheckOptions("mine", preset="tiny"), make_engine, 6)
    assert result.contrast is None
    assert result.num_compared["pool"]


CONFIG = v.Config(num_blocks=9, block_size=2, max_model_len=16, max_num_batched_tokens=16)
DRAFTING = v.Config(
    num_blocks=9,
    block_size=2,
    max_model_len=16,
    spec_method=v.SpecMethod.NGRAM,
    num_speculative_tokens=1,
)


def list_given(make_engine: EngineFactory, config: v.Config, *actions: Action) -> list[object]:
    """The events that an engine is given at safety."""
    run, findings = run_program(Program(config, actions), make_engine)
    assert isinstance(run, SafetyRun)
    assert findings == []
    return [exchange.event for exchange in run.exchanges]


def test_no_more_drafts_are_proposed_than_the_config_allows() -> None:
    """An engine may reject a draft too many."""
    start = (v.Submit(v.Request("A", (1, 2, 3), 6)), v.Schedule(), Answer())
    given = list_given(
        make_lacking(SpecEngine, (), SAFETY), DRAFTING, *start, Propose(((2, 1),)), v.Schedule()
    )
    (drafts,) = [event for event in given if isinstance(event, v.Drafts)]
    assert len(drafts.drafts[0].token_ids) == 1
    assert not any(
        isinstance(event, v.Drafts)
        for event in list_given(
            make_lacking(SpecEngine, (), SAFETY), CONFIG, *start, Propose(((2, 1),))
        )
    )


@pytest.mark.parametrize("is_reused", [False, True])
def test_late_drafts_go_only_to_engines_that_accept_them(is_reused: bool) -> None:
    """Drafts are late for a request in flight, and for a new request under an id used before."""
    once = (v.Submit(v.Request("A", (1, 2, 3), 1 if is_reused else 6)), v.Schedule(), Answer())
    start = (*once, once[0] if is_reused else v.Schedule())
    for lacks, num_given in (((), 1), (("late drafts", "rejection"), 0)):
        make_engine = make_lacking(SpecEngine, lacks, SAFETY)
        given = list_given(make_engine, DRAFTING, *start, Propose(((1, 1),)))
        assert sum(isinstance(event, v.Drafts) for event in given) == num_given


def test_an_engine_without_grammars_gets_no_grammar_of_an_unknown_request() -> None:
    make_engine = make_lacking(SpecEngine, ("grammar",))
    program = Program(CONFIG, (Hostile(v.GrammarReady("nobody")), v.GrammarReady("nobody")))
    run, findings = run_program(program, make_engine)
    assert findings == []
    assert run.exchanges == []
    assert run.skipped == {"grammar": 2}


@pytest.mark.parametrize(("is_hashable", "num_built"), [(True, 1), (False, 2)])
def test_a_factory_is_called_once_for_its_capabilities_if_it_is_hashable(
    is_hashable: bool, num_built: int
) -> None:
    built: list[v.Config] = []

    class Factory:
        def __call__(self, config: v.Config) -> SpecEngine:
            built.append(config)
            return SpecEngine(config)

    factory = Factory() if is_hashable else dataclass(Factory)()
    assert [get_capabilities(factory) for _ in range(2)] == [ALL_CAPABILITIES] * 2
    assert len(built) == num_built
