"""Failed loads at safety: an engine that ignores them is found, a correct one is not accused."""

from __future__ import annotations

import pytest

from blockstep.conformance.engine import EngineFactory, EngineTraits, Safety
from blockstep.conformance.lockstep.start_run import get_start
from blockstep.conformance.museum.trial import load_as_foreign
from blockstep.conformance.protocol.findings import Finding
from blockstep.conformance.protocol.program import Action, Answer, Drain, Report
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import STRICT

FAILED = Report(invalid=(("A", 0),))
AT_ONCE: tuple[Action, ...] = (v.KVOffer("A", 2), v.Schedule(), Answer(FAILED), Drain())
LATER: tuple[Action, ...] = (v.KVOffer("A", 2, True), v.Schedule(), FAILED, Drain())
AFTER_A_LOAD: tuple[Action, ...] = (
    *(v.KVOffer("A", 2, True), v.Schedule(), Report(recving=("A",))),
    *(v.Schedule(), Answer(), FAILED, Drain()),
)
NOTHING_CACHED: tuple[Action, ...] = (v.KVOffer("A", 2), v.Schedule(), Answer(), Drain())


class Correct(SpecEngine):
    """The specification, held to the properties alone."""

    traits = EngineTraits(equivalence=Safety())


def play(
    make_engine: EngineFactory, policy: v.KVLoadFailurePolicy, actions: tuple[Action, ...]
) -> list[Finding]:
    """Return the first findings about an engine that is held to the properties alone."""
    config = v.Config(
        num_blocks=9,
        block_size=2,
        enable_prefix_caching=False,
        kv_connector=True,
        kv_load_failure_policy=policy,
    )
    run = get_start(make_engine)(config, make_engine, 0, 50, False, STRICT)
    for action in (v.Submit(v.Request("A", (1, 2, 3), max_tokens=2)), *actions):
        findings = run.perform(action)
        if findings:
            return findings
    return []


@pytest.mark.parametrize("policy", list(v.KVLoadFailurePolicy))
@pytest.mark.parametrize(
    "actions",
    [AT_ONCE, LATER, AFTER_A_LOAD, NOTHING_CACHED],
    ids=["now", "later", "after a load", "hit"],
)
def test_a_correct_engine_is_not_accused(
    policy: v.KVLoadFailurePolicy, actions: tuple[Action, ...]
) -> None:
    assert play(Correct, policy, actions) == []


@pytest.mark.parametrize("policy", list(v.KVLoadFailurePolicy))
def test_an_engine_that_delivers_tokens_of_a_failed_load_is_accused(
    policy: v.KVLoadFailurePolicy,
) -> None:
    """The engine ignores all reports of failed loads."""
    (first, *_) = play(
        load_as_foreign(CheckOptions("museum:invalid-is-passed-over")), policy, AT_ONCE
    )
    assert first.property_id in ("P13", "P19")
