"""Engines that follow a scene: a divergence is reported, and a missing capability is noted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from followers import ENGINES, Followers, following

from blockstep.impl.host import HostEngine
from blockstep.spec import Oracle
from blockstep.spec.vocabulary import (
    Config,
    Event,
    Observation,
    Plan,
    Policy,
    Request,
    Snapshot,
    StreamingUpdate,
)

CONFIG = Config(num_blocks=20, block_size=2)


class WrongAnswer(HostEngine):
    """An engine whose plans have other ids."""

    def apply(self, event: Event) -> Observation:
        """Apply an event."""
        answer = super().apply(event)
        return replace(answer, frame_id=7) if isinstance(answer, Plan) else answer


class WrongState(HostEngine):
    """An engine whose free queue lacks a block once a request runs."""

    def snapshot(self) -> Snapshot:
        """Return the state."""
        state = super().snapshot()
        return replace(state, free_queue=state.free_queue[1:]) if state.running else state


def play(oracle: Oracle, name: str = "A") -> None:
    """Submit a request and run one step."""
    oracle.submit(Request(name, (1, 2, 3)))
    plan = oracle.schedule()
    oracle.commit(plan, {row.request_id: (5,) for row in plan.rows})


@pytest.mark.parametrize(
    ("engine", "field"), [(WrongAnswer, "frame_id"), (WrongState, "free_queue")]
)
def test_a_divergence_names_the_engine_and_the_field(engine: type[HostEngine], field: str) -> None:
    with following({"right": HostEngine, "wrong": engine}):
        oracle = Oracle(CONFIG)
        with pytest.raises(AssertionError, match=rf"wrong differs after Schedule.*{field}"):
            play(oracle)


def test_all_engines_follow_to_the_end() -> None:
    with following() as found:
        play(Oracle(CONFIG))
    assert [(one.num_compared, one.declined) for one in found] == [(3 * len(ENGINES), {})]


def test_an_engine_stops_following_with_the_missing_capability() -> None:
    with following() as found:
        oracle = Oracle(replace(CONFIG, policy=Policy.PRIORITY))
        play(oracle)
        oracle.submit(Request("B", (1,), resumable=True))
        oracle.apply(StreamingUpdate(Request("B", (2,))))
        Oracle(replace(CONFIG, max_loras=1))
    first, second = found
    assert [*first.engines] == [*second.engines] == ["host"]
    assert all("sessions is needed for Submit" in why for why in first.declined.values())
    assert all("no cap on adapters" in why for why in second.declined.values())


def test_engines_stop_following_after_a_test_sets_the_state() -> None:
    with following() as found:
        oracle = Oracle(CONFIG)
        play(oracle)
        oracle.state = Oracle(CONFIG).state
        play(oracle)
    assert isinstance(found[0], Followers)
    assert found[0].num_compared == 3 * len(ENGINES)
