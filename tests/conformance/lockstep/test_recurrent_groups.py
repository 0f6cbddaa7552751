"""Recurrent groups: host engine and specification agree after each event of random walks."""

import pytest
from states_support import Walk

from blockstep.conformance.protocol.compare import observation_differences, snapshot_differences
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import Event, Observation


class ComparedWalk(Walk):
    """A walk whose events are also given to the host engine, and all answers compared."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        oracle = self.oracle
        engine, right = load_engine("host")(oracle.state.config), oracle.apply

        def apply(event: Event) -> Observation:
            answer = right(event)
            assert observation_differences(answer, engine.apply(event), with_hints=True) == ()
            shown = engine.snapshot()
            assert shown is not None
            assert snapshot_differences(oracle.snapshot(), shown) == ()
            return answer

        object.__setattr__(oracle, "apply", apply)


@pytest.mark.parametrize(
    "seeds",
    [
        range(700, 725),
        *(pytest.param(range(n, n + 400), marks=pytest.mark.soak) for n in (725, 1125)),
    ],
)
def test_the_host_agrees_on_random_walks_with_recurrent_groups(seeds: range) -> None:
    walks = [ComparedWalk(seed) for seed in seeds]
    for walk in walks:
        walk.run(60)
    assert sum(walk.num_hits for walk in walks) > 9
