"""Property checks run where an engine needs them, and equal engines need none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from episodes_support import find_failing

from blockstep.conformance.draw.actions import SeededDraw, next_action
from blockstep.conformance.engine import EngineFactory, EngineTraits, Renamed
from blockstep.conformance.judge import checks
from blockstep.conformance.judge.checks import JUDGED
from blockstep.conformance.judge.properties import property_check as sentence
from blockstep.conformance.judge.properties.property_check import PropertyCheck
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.start_run import run_program, start_program
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Answer, Drain, Program
from blockstep.conformance.protocol.registry import MUSEUM, SpecEngine, load_engine
from blockstep.conformance.search.episodes import draw_options, fit_depth, play_episode, start_run
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec.core.block_pool import free_blocks
from blockstep.spec.profiles import STRICT, Profile
from blockstep.spec.vocabulary import Config, Request, Schedule, Submit

FEATURES = ((), ("groups",), ("transfers",), ("encoder", "sessions"), ("forks",), ("tiers", "pins"))
CONFIG = Config(num_blocks=6, block_size=2)
PROGRAM = Program(
    CONFIG,
    (
        *(Submit(Request("A", (1, 2, 3), 4)), Submit(Request("B", (4, 5), 3))),
        *((Schedule(), Answer()) * 4),
        Drain(),
    ),
)


def play_with_all_checks(options: CheckOptions, index: int, make_engine: EngineFactory) -> LockStep:
    """Play one episode in which every check runs at every step."""
    draw = SeededDraw(f"{options.preset}/{options.seed}/{index}")
    options = fit_depth(options, make_engine)
    swarm = draw_options(options, draw, make_engine)
    run, view = start_run(swarm, make_engine, options)
    run.asks_all = True
    for _ in range(swarm.preset.num_actions):
        action: Action = run.fit(next_action(view, draw))
        view.note(action)
        assert run.perform(action) == []
    assert run.perform(Drain()) == []
    return run


def count_asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count from now on how often each check runs."""
    asked: dict[str, int] = {}
    judge = sentence.judge

    def count(sentences: tuple[PropertyCheck, ...], *rest: object) -> list[Finding]:
        for one in sentences:
            asked[one.sentence] = asked.get(one.sentence, 0) + 1
        return judge(sentences, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(f"{checks.__name__}.judge", count)
    return asked


@pytest.mark.parametrize("features", FEATURES, ids=lambda names: "+".join(names) or "core")
def test_the_specification_is_held_to_every_property(
    features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count_asked(monkeypatch)
    options = CheckOptions("mine", preset="tiny", with_features=features)
    for index in range(6):
        assert play_with_all_checks(options, index, SpecEngine).num_events
    judged = {one.sentence for one in JUDGED}
    assert len(set(asked) - judged) > 60, "checks of the policy run, too"


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("features", FEATURES, ids=lambda names: "+".join(names) or "core")
def test_the_specification_is_held_to_every_property_in_many_events(
    preset: str, features: tuple[str, ...]
) -> None:
    num_events = index = 0
    options = CheckOptions("mine", preset=preset, with_features=features)
    while num_events < 20_000:
        num_events += play_with_all_checks(options, index, SpecEngine).num_events
        index += 1


def test_a_specification_that_breaks_its_policy_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides free block tables from the head: only a property check finds it."""
    build = SpecEngine.__init__

    def build_wrongly(self: SpecEngine, config: Config, profile: Profile = STRICT) -> None:
        build(self, config, profile)
        free = self.state.rules[free_blocks]
        by = lambda pool, table: free(pool, table[::-1])  # noqa: E731
        rules = self.state.rules.replacing(free_blocks, by)
        self.state = replace(self.state, rules=rules)

    monkeypatch.setattr(SpecEngine, "__init__", build_wrongly)
    found = {}
    for asks_all in (False, True):
        run = start_program(PROGRAM, SpecEngine)
        run.asks_all = asks_all
        found[asks_all] = [it.sentence for action in PROGRAM.actions for it in run.perform(action)]
    assert found[False] == []
    assert found[True][0] == "freed_tail_is_evicted_first"


@pytest.mark.parametrize(
    "name",
    [
        *("forward-frees", "reset-keeps-keys", "full-hit", "leak-on-abort"),
        "share-counted-before-hits",
    ],
)
def test_findings_are_those_of_a_run_in_which_every_check_always_runs(name: str) -> None:
    make_engine = load_engine(MUSEUM + name)
    episode = find_failing(MUSEUM + name, "small")
    _, program, findings = play_episode(CheckOptions(MUSEUM + name), episode, make_engine)
    run = start_program(program, make_engine)
    run.asks_all = True
    per_action = [run.perform(action) for action in program.actions]
    assert per_action == [[]] * (len(program.actions) - 1) + [findings]


def test_equal_engines_need_no_checks_and_renamed_ones_only_those_of_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(SpecEngine):
        traits = EngineTraits(equivalence=Renamed())

    asked = count_asked(monkeypatch)
    assert run_program(PROGRAM, SpecEngine)[1] == []
    assert asked == {}
    assert run_program(PROGRAM, Other)[1] == []
    assert asked
    assert asked.keys() <= {one.sentence for one in JUDGED}
