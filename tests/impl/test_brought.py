"""What requests bring, in random programs: the specification gives the same run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
from tests.impl.test_groups import draw_groups_config
from tests.impl.test_soak import draw_config, draw_event

from blockstep.impl.host import CRC32, SHA256, HostEngine
from blockstep.spec import Oracle
from blockstep.spec.vocabulary import Config, Event, Plan, Submit

DrawEvent: TypeAlias = Callable[[random.Random, HostEngine], Event]


def draw_any_config(draw: random.Random) -> Config:
    """With one KV group or several."""
    return draw_groups_config(draw) if draw.random() < 0.2 else draw_config(draw)


def run_both(seed: int, num_events: int, config: Config, draw_next: DrawEvent) -> Counter[str]:
    """Play one random program on both sides; what was seen in it."""
    draw = random.Random(seed)
    oracle, host = Oracle(config), HostEngine(config, draw.choice((SHA256, CRC32)))
    seen: Counter[str] = Counter()
    for number in range(num_events):
        event = draw_next(draw, host)
        answer, due = host.apply(event), oracle.apply(event)
        assert answer == due, (seed, number, event)
        assert host.snapshot() == oracle.snapshot(), (seed, number, event)
        seen.update(look(event, answer, host))
    return seen


def look(event: Event, answer: object, host: HostEngine) -> list[str]:
    """What is to be counted."""
    seen = [f"{type(event).__name__} {type(answer).__name__}"]
    if isinstance(answer, Plan):
        used = {host.table.requests[slot].adapter for slot in host.running} - {None}
        if 0 < host.config.max_loras == len(used):
            seen.append("no seat left")
    return seen


# Adapters.


def draw_adapter_event(draw: random.Random, host: HostEngine) -> Event:
    event = draw_event(draw, host)
    if isinstance(event, Submit):
        adapter = draw.choice((None, "x", "y", "z"))
        return Submit(replace(event.request, adapter=adapter))
    return event


def compare_adapters(seeds: range, num_events: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        config = replace(draw_any_config(draw), max_loras=draw.choice((1, 1, 2, 3)))
        seen += run_both(seed, num_events, config, draw_adapter_event)
    assert seen["no seat left"] > len(seeds)


def test_adapters() -> None:
    compare_adapters(range(8), 120)


@pytest.mark.soak
def test_adapters_over_many_seeds() -> None:
    compare_adapters(range(1000, 4000), 250)
