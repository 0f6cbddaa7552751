"""Hypothesis state machine: it passes for our engine and fails for a seeded bug."""

from __future__ import annotations

import pytest
from foreign_support.toys import AbortingToy
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from blockstep.conformance.museum import build
from blockstep.conformance.search.machine import machine
from blockstep.spec.vocabulary import Aborted, Event, Observation


class FreesTwice(AbortingToy):
    """An abort of a running request frees a block twice."""

    def apply(self, event: Event) -> Observation:
        held = self.running[0].blocks[:1] if self.running else ()
        seen = super().apply(event)
        self.free += held if isinstance(seen, Aborted) and seen.request_ids else ()
        return seen


SETTINGS = settings(
    max_examples=25,
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


@pytest.mark.parametrize(
    "engine",
    [
        "foreign_support.toys:PlainToy",
        "foreign_support.toys:AbortingToy",
        "foreign_support.hosts:AtPlan",
    ],
)
def test_an_engine_that_is_not_exact_is_held_to_what_it_declares(engine: str) -> None:
    few = settings(SETTINGS, max_examples=5, stateful_step_count=30)
    run_state_machine_as_test(machine(engine, "tiny"), settings=few)


def test_a_wrong_foreign_engine_fails_by_a_property() -> None:
    only_find = settings(SETTINGS, max_examples=200, phases=[Phase.generate])
    with pytest.raises(AssertionError, match=r"P[0-9]+ "):
        run_state_machine_as_test(machine(FreesTwice, "tiny"), settings=only_find)


def test_the_machine_finds_a_seeded_bug_and_prints_its_events() -> None:
    # Shrinking is Hypothesis' own business, and takes it minutes.
    only_find = settings(SETTINGS, max_examples=400, phases=[Phase.generate])
    seeded = machine(build("leak-on-abort"), "tiny")
    with pytest.raises(AssertionError, match="P1 ") as caught:
        run_state_machine_as_test(seeded, settings=only_find)
    assert "abort" in "\n".join(caught.value.__notes__)
