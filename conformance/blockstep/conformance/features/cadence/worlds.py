"""Small worlds with a prefill cadence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockstep.conformance.explore.world import AHEAD, UNRESERVED, Counts, Scope, World, a, b
from blockstep.conformance.judge.properties.history import History
from blockstep.spec import vocabulary as v
from blockstep.spec.core.state import State
from blockstep.spec.features.prefill_cadence import PREFILL_WAIT


def get_form(state: State, places: Mapping[v.BlockId, int]) -> tuple[Any, ...]:
    """Return the steps that prompts wait."""
    del places
    return (PREFILL_WAIT.of(state),)


def recall(state: State, history: History) -> None:
    """Give a history the plans since the last one with a prompt; once the interval is over, it does
    not matter how many there were."""
    interval = state.config.prefill_schedule_interval
    history.num_plans_since_prompt = interval - 1 - PREFILL_WAIT.of(state)


SCOPE = Scope(
    lambda config: config.has_prefill_interval, lambda _: (), lambda _: (), get_form, recall
)
WORLDS = (
    World("paced", "prompts in chunks in every third step, preemptions, hits; aborts, resets",
        v.Config(6, 1, 2, 2, 5, prefill_schedule_interval=3, **UNRESERVED),
        (a(3, 2), b(2, 3)), aborts=True, resets=(True,),
        expected=Counts(3_293, 15_293, 11_248, 23)),
    World("spaced", "two plans in flight: prompts in every other step, unless no decode can run",
        v.Config(7, 1, 2, 2, 5, prefill_schedule_interval=2, **AHEAD),
        (a(3, 2), b(1, 3)),
        expected=Counts(681, 1_269, 2_863, 17)),
)  # fmt: skip
