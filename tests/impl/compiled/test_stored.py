"""Random transfers through the compiled engine and the host: both say the same after each event.

A store says anything at any time, beside sessions, adapters, grammars and all that else is drawn;
tiers and KV groups of every kind are drawn as well.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from alike_support import Pair, draw_thresholds, list_recurrent, play_all
from stored_support import drain, draw_event, draw_stored

from blockstep.impl.compiled import CompiledEngine
from blockstep.spec import vocabulary as v


class Alike(Pair):
    """The compiled engine in the place of the specification."""

    def __init__(self, config: v.Config, seed: int) -> None:
        super().__init__(config, seed, lambda *_: Counter())
        self.oracle = CompiledEngine(config)  # type: ignore[assignment]


def draw_config(draw: random.Random) -> v.Config:
    config = draw_thresholds(draw, draw_stored(draw))
    if draw.random() < 0.3:
        listed = list_recurrent(config.block_size, config.num_speculative_tokens)
        more = config.num_blocks + 20
        drawn = [replace(config, groups=groups, num_blocks=more) for groups in listed]
        legal = [one for one in drawn if not v.config_problems(one)]
        if legal:
            return draw.choice(legal)
    return replace(config, swap_min_tokens=draw.choice((0, 1, 4)))


def run(seeds: range, num_events: int) -> None:
    def begin(draw: random.Random, seed: int) -> Alike:
        return Alike(draw_config(draw), seed)

    play_all(seeds, num_events, begin, draw_event, drain)


def test_compiled_and_host_are_alike() -> None:
    run(range(12), 80)


@pytest.mark.soak
def test_compiled_and_host_are_alike_for_long() -> None:
    run(range(1_000, 1_400), 150)
