"""The Hypothesis machine: green for our engine, red for a planted defect."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from blockstep.conformance.museum import build
from blockstep.conformance.search.machine import machine

SETTINGS = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

TestHostTiny = machine("host", "tiny").TestCase
TestHostTiny.settings = SETTINGS
TestHostSmall = machine("host", "small").TestCase
TestHostSmall.settings = SETTINGS


def test_it_finds_a_planted_defect_and_tells_its_story() -> None:
    # Shrinking is Hypothesis' own business, and takes it minutes.
    only_find = settings(SETTINGS, max_examples=400, phases=[Phase.generate])
    planted = machine(build("leak-on-abort"), "tiny")
    with pytest.raises(AssertionError, match="P1 ") as caught:
        run_state_machine_as_test(planted, settings=only_find)
    assert "abort" in "\n".join(caught.value.__notes__)
