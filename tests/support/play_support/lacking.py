"""What a config lacks: plays, and the sentence that says that nothing is known of it."""

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
from play_support import forking, pinning
from play_support.play import Bend, C, Case, Play, after, nothing, observed
from play_support.tiering import closed
from play_support.transferring import loading_for_no_request

LACKED = "disabled_features_leave_no_state"


def planned() -> Play:
    """C runs, and no store is there."""
    return Play().do(Submit(C)).run(1).do(Schedule())


def committed() -> Play:
    return Play().do(Submit(C)).run(1)


def reset() -> Play:
    return Play().do(Reset())


def with_an_event(step: Step) -> Step:
    """The log tells of a block, and nobody asked for one."""
    return observed(step, kv_events=(BlockStored((BlockKey(None, (8, 8)),), None, (8, 8), 2),))


ALONE: list[Case] = [(LACKED, planned, nothing, loading_for_no_request)]
EACH_KIND: list[tuple[str, Callable[[], Play], Bend]] = [
    *[(LACKED, play, closed) for play in (*pinning.OF_EACH, forking.forked)],
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
"""More that is wrong, of each kind of event and of each thing that may be lacking."""
