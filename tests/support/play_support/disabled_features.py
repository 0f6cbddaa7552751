"""Disabled features: plays in which a state or an answer has a value of one."""

from __future__ import annotations

from collections.abc import Callable

from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec.vocabulary import (
    BlockKey,
    BlockStored,
    EncoderSnapshot,
    PinsSnapshot,
    Reset,
    Schedule,
    Submit,
    TransfersSnapshot,
)
from play_support import forks, pins
from play_support.kv_transfer import loading_for_no_request
from play_support.play import Bend, C, Case, Play, after, nothing, observed
from play_support.tiers import closed

LACKED = "disabled_features_leave_no_state"


def planned() -> Play:
    """C runs, and the config has no store."""
    return Play().do(Submit(C)).run(1).do(Schedule())


def committed() -> Play:
    return Play().do(Submit(C)).run(1)


def reset() -> Play:
    return Play().do(Reset())


def with_an_event(step: Step) -> Step:
    """Return the step with a KV event, which the config does not ask for."""
    return observed(step, kv_events=(BlockStored((BlockKey(None, (8, 8)),), None, (8, 8), 2),))


ALONE: list[Case] = [(LACKED, planned, nothing, loading_for_no_request)]
EACH_KIND: list[tuple[str, Callable[[], Play], Bend]] = [
    *[(LACKED, play, closed) for play in (*pins.OF_EACH, forks.forked)],
    *[
        (LACKED, committed, bend)
        for bend in (
            lambda s: after(s, encoder=EncoderSnapshot()),
            lambda s: after(s, transfers=TransfersSnapshot()),
            lambda s: after(s, pins=PinsSnapshot()),
            with_an_event,
        )
    ],
    (LACKED, reset, with_an_event),
]
"""Wrong steps of each kind of event, and for each feature that may be disabled."""
