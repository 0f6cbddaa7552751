"""Random walks with an encoder: what is read is there, and what is there is what the plans made.

These know no rule of the encoder but which token reads of which item.
"""

import pytest
from encoder_support import EncoderWalk

COUNTS = {
    "made": lambda walk: walk.worker.num_made,
    "shared": lambda walk: walk.worker.num_shared,
    "dropped": lambda walk: walk.worker.num_dropped,
    "loaded": lambda walk: walk.worker.num_loaded,
    "hits": lambda walk: walk.num_hits,
    "preempted": lambda walk: walk.num_preempted,
}


@pytest.mark.parametrize("part", range(2))
def test_what_is_read_is_there_and_nothing_else(part: int) -> None:
    walks = [EncoderWalk(seed) for seed in range(part * 40, part * 40 + 40)]
    for walk in walks:
        walk.run(60)
    assert {name for name, count in COUNTS.items() if sum(map(count, walks)) == 0} == set()
