"""Grouped: plays with several KV groups, where a request gives back what it attends to no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, Schedule, Submit
from play_support.play import CONFIG, A, Play

FULL = KVGroup(GroupKind.FULL, 2)
WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=4)
CHUNKS = KVGroup(GroupKind.CHUNKED_LOCAL, 4, attention_chunk_size=4)
GROUPED = replace(CONFIG, num_blocks=17, groups=(FULL, WINDOW))


def going_on(config: Config = GROUPED) -> Play:
    """A goes on at position 5 and gives back its first block of the window."""
    play = Play(config, SpecEngine).do(Submit(A)).run(1).do(Schedule())
    assert play.step.new["A"].block_tables[1][0] == 0
    return play


def with_its_token(config: Config = GROUPED) -> Play:
    """The token that A sampled at position 5 is committed."""
    return going_on(config).commit()


def attending_as(*groups: KVGroup) -> Any:
    """Plants other kinds of attention: the specification goes by them from now on."""

    def plant(engine: Any) -> None:
        state = engine.state
        engine.state = replace(state, config=replace(state.config, groups=groups))

    return plant
