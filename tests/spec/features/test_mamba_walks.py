"""Random walks with recurrent groups: each row continues from the state of its own tokens."""

import pytest
from states_support import Walk


@pytest.mark.parametrize("part", range(3))
def test_a_row_continues_from_the_state_of_its_tokens(part: int) -> None:
    walks = [Walk(seed) for seed in range(part * 25, part * 25 + 25)]
    for walk in walks:
        walk.run(60)
    assert sum(walk.num_hits for walk in walks) > 9
    assert sum(walk.num_preempted for walk in walks) > 4
    assert sum(walk.num_published for walk in walks) > 99
