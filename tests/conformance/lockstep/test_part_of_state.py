"""Partly shown states (`show_state`): fields that an engine leaves out are not judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
from episodes_support import play_episodes
from equivalent_engines import (
    PLANS,
    RENAMED,
    HitOneShort,
    ShowsPart,
    change_nothing,
    held_to,
)

from blockstep.conformance.engine import EngineTraits, PartOfState, Safety
from blockstep.conformance.lockstep.driver import NOT_SHOWN
from blockstep.conformance.protocol.shown import DEFAULTS
from blockstep.spec.vocabulary import Snapshot

EXACT = EngineTraits()
AT = {"renamed": RENAMED, "plan": PLANS, "safety": EngineTraits(equivalence=Safety())}


class SameIds(ShowsPart):
    """`ShowsPart` with the block ids of the specification."""

    traits = EXACT
    change = staticmethod(change_nothing)


ENGINES: dict[str, Any] = {
    "exact": SameIds,
    **{name: held_to(ShowsPart, traits) for name, traits in AT.items()},
}


@pytest.mark.parametrize("name", ENGINES)
def test_fields_that_are_not_shown_are_not_judged(name: str) -> None:
    played = play_episodes(ENGINES[name], 500)
    assert played.first is None
    assert NOT_SHOWN in played.skipped or name in ("plan", "safety")


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("name", ENGINES)
def test_fields_that_are_not_shown_are_not_judged_in_many_events(name: str, preset: str) -> None:
    assert play_episodes(ENGINES[name], 30_000, preset=preset).first is None


@pytest.mark.parametrize("field", DEFAULTS)
def test_each_field_of_a_request_may_be_left_out(field: str) -> None:
    class LeavesOut(ShowsPart):
        kept = tuple(name for name in DEFAULTS if name != field)

    assert play_episodes(LeavesOut, 120).first is None


@pytest.mark.parametrize("name", ["exact", "renamed"])
def test_a_wrong_field_that_is_shown_is_found(name: str) -> None:
    base: Any = ENGINES[name]

    class Shows(base):  # type: ignore[misc]
        kept: ClassVar[tuple[str, ...]] = ("num_preemptions",)

        def snapshot(self) -> Snapshot:
            seen = super().snapshot()
            assert isinstance(seen, PartOfState)
            wrong = [
                replace(it, num_preemptions=it.num_preemptions and it.num_preemptions + 1)
                for it in seen.requests
            ]
            return replace(seen, requests=tuple(wrong))

    found = play_episodes(Shows, 20_000, preset="tiny").first
    assert found is not None
    assert found.differences[0].field.endswith("num_preemptions")


@pytest.mark.parametrize("name", ["exact", "renamed"])
@pytest.mark.parametrize("field", ["free_queue", "running", "frames_in_flight", "ref_counts"])
def test_a_wrong_field_that_every_engine_shows_is_found(name: str, field: str) -> None:
    base: Any = ENGINES[name]

    class Wrong(base):  # type: ignore[misc]
        def snapshot(self) -> Snapshot:
            seen: Snapshot = super().snapshot()
            changed: dict[str, Any] = {field: getattr(seen, field)[:-1]}
            return replace(seen, **changed)

    assert play_episodes(Wrong, 2000, preset="tiny").first is not None


@pytest.mark.parametrize("name", ["renamed", "plan"])
def test_a_defect_is_found_with_only_a_part_of_the_state(name: str) -> None:
    engine = held_to(ENGINES[name], AT[name], HitOneShort)
    assert play_episodes(engine, 20_000, preset="tiny").first is not None
