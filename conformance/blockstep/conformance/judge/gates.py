"""Gates of features: limits at which a waiting request is skipped, with no outside event due; and
plans that hold prompts.

The module `properties` in a feature's folder may have a class `GATE`, and a function `HOLD`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol, TypeAlias

from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.protocol.features import is_off, load_parts
from blockstep.spec import vocabulary as v

Hold: TypeAlias = Callable[[Step, History], bool]
"""Returns whether a plan gives no tokens to prompts: running chunks, and waiting requests with more
than one token to compute, the first of which ends the waiting phase."""


class Gate(Protocol):
    """A limit that an admission may meet, while a plan admits requests."""

    def __init__(self, history: History) -> None: ...

    def has_room_for(self, name: v.RequestId) -> bool:
        """Whether a request may be admitted."""
        ...

    def take(self, name: v.RequestId) -> None:
        """Note that a request runs."""
        ...


@cache
def get_gates(lacked: frozenset[str]) -> tuple[type[Gate], ...]:
    """Return the gates of the features that a config does not switch off (`History.lacked`)."""
    modules = load_parts("properties").items()
    found = [it.GATE for name, it in modules if hasattr(it, "GATE") and not is_off(name, lacked)]
    return tuple(found)


@cache
def get_holds(lacked: frozenset[str]) -> tuple[Hold, ...]:
    """Return the holds of the features that a config does not switch off (`History.lacked`)."""
    modules = load_parts("properties").items()
    found = [it.HOLD for name, it in modules if hasattr(it, "HOLD") and not is_off(name, lacked)]
    return tuple(found)


def holds_prompts(step: Step, history: History) -> bool:
    """Whether some feature holds prompts in a plan."""
    return any(hold(step, history) for hold in get_holds(history.lacked))


def is_held(step: Step, history: History, name: v.RequestId, num_start: int) -> bool:
    """Whether a plan gives no tokens to a request that starts behind `num_start` tokens, since it
    holds prompts."""
    if name in step.place:
        is_prompt = step.old[name].is_prefill_chunk
    else:
        is_prompt = num_start < history.lives[name].num_known - 1
    return is_prompt and holds_prompts(step, history)
