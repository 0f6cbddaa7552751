"""KV groups: plays in which a request frees the blocks that have left its window."""

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
    """A computes position 5 and frees its first block of the sliding window."""
    play = Play(config, SpecEngine).do(Submit(A)).run(1).do(Schedule())
    assert play.step.new["A"].block_tables[1][0] == 0
    return play


def with_its_token(config: Config = GROUPED) -> Play:
    """The same, with the token that A sampled at position 5 committed."""
    return going_on(config).commit()


def attending_as(*groups: KVGroup) -> Any:
    """Return a plant: from now on the specification has these KV groups."""

    def plant(engine: Any) -> None:
        state = engine.state
        engine.state = replace(state, config=replace(state.config, groups=groups))

    return plant
