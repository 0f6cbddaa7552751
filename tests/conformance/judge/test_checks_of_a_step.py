"""A sentence that is not asked of a step would have found nothing wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product

import pytest

from blockstep.conformance.judge.checks import CHECKS_OF, Asked, find_absent
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.property_check import PropertyCheck
from blockstep.conformance.judge.properties.property_check import judge as judge_all
from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.museum import EXHIBITS
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.registry import MUSEUM, SpecEngine, load_engine
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

SPARED = {found.sentence for checks in CHECKS_OF.values() for found in checks if found.of}


def test_checks_that_are_not_asked_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spared: Counter[str] = Counter()

    def judge(sentences: Iterable[PropertyCheck], step: Step, history: History) -> list[Finding]:
        asked, is_refused = tuple(sentences), isinstance(step.observation, v.Rejected)
        for found in CHECKS_OF[v.Rejected if is_refused else type(step.event)]:
            if found not in asked and found.needs not in history.lacked:
                assert found(step, history) == []
                spared[found.sentence] += 1
        return judge_all(asked, step, history)

    monkeypatch.setattr("blockstep.conformance.judge.checks.judge", judge)
    monkeypatch.setattr(LockStep, "_choose_asked", lambda *_: Asked.ALL)
    wrong = 0
    for name in sorted(EXHIBITS)[::12]:
        options = CheckOptions(engine=MUSEUM + name, preset="small")
        wrong += run_episode(options, 1, load_engine(MUSEUM + name)).first is not None
    for index, feature in product(range(3), ("forks", "tiers")):
        options = CheckOptions(engine="host", preset="small", with_features=(feature,))
        assert run_episode(options, index, load_engine("host")).first is None
    assert wrong
    assert spared.keys() >= SPARED


def test_what_makes_no_sense_is_asked_by_all() -> None:
    state = SpecEngine(v.Config(4)).snapshot()
    row = v.CachedRow("A", False, ((), ()), None, 0, 0, 1)  # of nobody, and in two groups of one
    step = Step(
        v.Config(4),
        1,
        v.Schedule(),
        v.Plan(0, remapped_req_ids=("A",), cached=(row,)),
        state,
        state,
    )
    assert find_absent(step) == ()
