"""What requests bring: plays with adapters, and the sentences that speak of them alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import Config, Schedule, Submit
from play_support.play import Bend, Play, request

Case: TypeAlias = tuple[str, Callable[[], Play], Callable[[Any], object], Bend]
"""The sentence, a play that is right, what is planted, and how the last step is bent."""
X = request("X", 1, 2, 3, adapter="x")
Y = request("Y", 1, 2, 3, adapter="y")


def nothing(_engine: Any) -> None:
    """The engine is right; only what came of it is bent."""


def of_two_adapters() -> Play:
    return Play().do(Submit(X), Submit(Y), Schedule())


def capped_behind_its_back() -> Play:
    """The engine knows of no cap on adapters, and there is one."""
    play = of_two_adapters()
    play.config = replace(play.config, max_loras=1)
    play.make_engine = uncapped
    return play


def uncapped(config: Config) -> HostEngine:
    return HostEngine(replace(config, max_loras=0))


ALONE: list[Case] = [
    (
        "running_stays_within_max_loras",
        of_two_adapters,
        nothing,
        lambda s: replace(s, config=replace(s.config, max_loras=1)),
    ),
]
OF_ANSWERS: list[Case] = [
    ("plan_stays_within_max_loras", capped_behind_its_back, nothing, lambda s: s),
]
