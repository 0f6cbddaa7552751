"""Capabilities: what a config needs, and the problem reported if an engine lacks it."""

from __future__ import annotations

from typing import Any

import pytest

from blockstep.conformance.engine import ALL_CAPABILITIES
from blockstep.impl.capabilities import list_config_problems, list_needed
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, Policy, SpecMethod

PLAIN = Config(num_blocks=8)
ASKED: dict[str, dict[str, Any]] = {
    "priority": {"policy": Policy.PRIORITY},
    "drafts": {"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 1},
    "async": {"max_frames_in_flight": 2, "async_scheduling": True},
    "pipeline": {"max_frames_in_flight": 2},
    "groups": {"groups": (KVGroup(GroupKind.FULL, 16),)},
}


@pytest.mark.parametrize("name", ASKED)
def test_a_missing_capability_is_reported_as_a_config_problem(name: str) -> None:
    config = Config(num_blocks=8, **ASKED[name])
    assert list_needed(PLAIN) == frozenset()
    assert list_needed(config) == {name}
    assert name in ALL_CAPABILITIES
    assert list_config_problems(config) == ()
    (problem,) = list_config_problems(config, ALL_CAPABILITIES - {name})
    assert problem.field in ASKED[name]
