"""A session that stops: its state is kept only if no step has run ahead of the stop."""

from __future__ import annotations

import pytest

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_state_of_later_tokens_is_not_kept(num_ahead: int) -> None:
    states = v.KVGroup(v.GroupKind.RECURRENT, 1, mamba_cache_mode=v.MambaCacheMode.ALL)
    config = v.Config(
        num_blocks=16,
        block_size=1,
        max_model_len=16,
        groups=(v.KVGroup(v.GroupKind.FULL, 1), states),
        max_frames_in_flight=2,
        async_scheduling=True,
    )
    run = LockStep.start(config, load_engine("host"))
    session = v.Request("A", (1, 2), max_tokens=5, eos_token_id=7, resumable=True)
    events: list[v.Event] = [
        v.Submit(session),
        *[v.Schedule()] * (1 + num_ahead),
        v.Commit(0, (v.RowTokens("A", (7,)),)),
    ]
    assert [run.apply(event) for event in events] == [[]] * len(events)
    (asked,) = run.spec.snapshot().requests
    assert bool(asked.num_computed_tokens) is (num_ahead == 0)
