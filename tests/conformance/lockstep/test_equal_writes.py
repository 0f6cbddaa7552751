"""Engines in which two prompts of one step write to one block: equal content is no violation."""

from __future__ import annotations

from typing import Any

import pytest
from episodes_support import play_episodes
from foreign_support.toys import (
    AbortingToy,
    Life,
    SharesMoreThanIsEqual,
    SharesThePartialBlock,
    SharingToy,
)

from blockstep.conformance.engine import Capability


class Hidden:
    """A mixin that hides the state of an engine."""

    def snapshot(self) -> None:
        return None

    def capabilities(self) -> frozenset[str]:
        return frozenset({Capability.ABORT})


def hide(engine: type[Any]) -> type[Any]:
    return type(engine.__name__, (Hidden, engine), {})


SHOWN = pytest.mark.parametrize("wrap", [lambda engine: engine, hide], ids=["shown", "hidden"])


@SHOWN
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_an_engine_that_writes_equal_content_twice_is_not_accused(wrap: Any, preset: str) -> None:
    num_shared = 0

    class Counting(SharingToy):
        def share(self, life: Life, other: Life) -> None:
            nonlocal num_shared
            num_shared += self.count_shared(life, other) > 0
            super().share(life, other)

    assert play_episodes(wrap(Counting), 1500, preset=preset, seed=1).first is None
    assert num_shared > 0


@pytest.mark.soak
@SHOWN
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_equal_writes_are_not_accused_in_many_events(wrap: Any, preset: str, seed: int) -> None:
    assert play_episodes(wrap(SharingToy), 50_000, preset=preset, seed=seed).first is None


@SHOWN
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3))])
@pytest.mark.parametrize("engine", [SharesMoreThanIsEqual, SharesThePartialBlock])
def test_unequal_writes_are_still_accused(wrap: Any, engine: type[Any], seed: int) -> None:
    assert play_episodes(wrap(engine), 20_000, preset="tiny", seed=seed).sentence in (
        "written_block_is_in_one_place",
        "block_still_to_be_written_has_one_holder",
        "attended_slot_holds_the_right_prefix",
    )


def test_the_base_engine_without_sharing_is_not_accused() -> None:
    assert play_episodes(AbortingToy, 300, preset="tiny", seed=1).first is None
