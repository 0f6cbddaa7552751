"""Idle: whether the loop that drives a scheduler must continue planning, or may sleep.

A loop that sleeps while a request could run never wakes up for it: nothing else asks the workers.
One that never sleeps wastes a core.
"""

from __future__ import annotations

from blockstep.spec.core.state import State
from blockstep.spec.vocabulary import PauseState


def has_work(state: State) -> bool:
    """Whether a further plan may do anything before the next event.

    Source: vLLM 0.19.1 `has_requests`; P10, P17.
    """
    return bool(state.finished_req_ids) or state.rules[has_runnable](state)


def has_runnable(state: State) -> bool:
    """Whether there is a request that a plan may schedule in the present pause state.

    Source: vLLM 0.19.1 `get_num_unfinished_requests`; P10.
    """
    if state.running:
        return state.pause_state is not PauseState.PAUSED_ALL
    return bool(state.requests) and state.pause_state is PauseState.UNPAUSED
