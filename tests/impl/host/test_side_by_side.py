"""Compiled code, the same source as Python, and the specification make the same decisions.

Programs are drawn for each manager and use its feature. A difference shows where machine code and
Python differ (overflow, division, writes beyond an array), or where a manager writes to an array
that compiled code does not see.
"""

from __future__ import annotations

import pytest
from as_python import SideBySide
from episodes_support import play_episodes

from blockstep.impl.host import IS_COMPILED
from blockstep.spec.vocabulary import Ack, Config, Request, Schedule, Submit

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="there is no machine code to compare with")

MANAGERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "blocks": (("caching", "reset"), ("window",), ("chunks",), ("states",), ("kinds", "drafts")),
    "queues": (("priority",), ("aborts", "pause")),
    "commits": (("drafts", "async"), ("pipeline", "stops")),
    "adapters": (("adapters",),),
    "masks": (("masks", "async"), ("grammar",)),
    "sessions": (("sessions",),),
    "encoder inputs": (("encoder",), ("embeds", "keys", "multimodal")),
    "events": (("events", "groups"),),
    "transfers": (("transfers", "pipeline"), ("transfers", "async")),
    "pins": (("pins",),),
    "forks": (("forks",),),
    "tiers": (("tiers",),),
    "cadence": (("cadence", "async"),),
    "rejections": (("hostile",),),
}
"""Features of programs that reach each manager."""
DRAWN = [(manager, number) for manager, drawn in MANAGERS.items() for number in range(len(drawn))]


def play(manager: str, number: int, num_events: int, seed: int) -> None:
    features = MANAGERS[manager][number]
    played = play_episodes(SideBySide, num_events, preset="tiny", with_features=features, seed=seed)
    assert played.first is None, played.sentence


@pytest.mark.parametrize("manager", MANAGERS)
def test_each_manager_decides_alike_compiled_and_as_python(manager: str) -> None:
    for number in range(len(MANAGERS[manager])):
        play(manager, number, 80, seed=number)


def test_an_array_that_differs_is_noticed() -> None:
    engine = SideBySide(Config(num_blocks=4))
    assert engine.apply(Submit(Request("a", (1, 2)))) == Ack()
    engine.as_python.requests.state.tails[0, 1] = 3
    with pytest.raises(AssertionError, match="tails"):
        engine.apply(Schedule())


@pytest.mark.soak
@pytest.mark.parametrize(("manager", "number"), DRAWN)
def test_each_manager_decides_alike_in_long_runs(manager: str, number: int) -> None:
    play(manager, number, 10_000, seed=5)
