"""Skipped checks: a check that does not run on a step would have found nothing in it."""

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

SKIPPED = {found.sentence for checks in CHECKS_OF.values() for found in checks if found.of}


def test_checks_that_are_skipped_would_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: Counter[str] = Counter()

    def judge(sentences: Iterable[PropertyCheck], step: Step, history: History) -> list[Finding]:
        asked, is_refused = tuple(sentences), isinstance(step.observation, v.Rejected)
        for found in CHECKS_OF[v.Rejected if is_refused else type(step.event)]:
            if found not in asked and found.needs not in history.lacked:
                assert found(step, history) == []
                skipped[found.sentence] += 1
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
    assert skipped.keys() >= SKIPPED


def test_no_check_is_skipped_for_a_malformed_step() -> None:
    state = SpecEngine(v.Config(4)).snapshot()
    row = v.CachedRow(
        "A", False, ((), ()), None, 0, 0, 1
    )  # of an unknown request, with two tables for one group
    step = Step(
        v.Config(4),
        1,
        v.Schedule(),
        v.Plan(0, remapped_req_ids=("A",), cached=(row,)),
        state,
        state,
    )
    assert find_absent(step) == ()
