"""Small worlds with swap-out or closed admission."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.explore.world import (
    AHEAD,
    COMPUTED,
    FETCHED,
    FULL,
    RANKED,
    UNRESERVED,
    Counts,
    World,
    a,
    b,
    c,
    group,
    offer,
)
from blockstep.spec import vocabulary as v

SWAPPING: dict[str, Any] = {"swap_min_tokens": 2} | FETCHED | UNRESERVED
CLOSED: dict[str, Any] = {"admission_low_blocks": 1, "admission_high_blocks": 2}
WORLDS = (
    World("swapped", "victims are swapped out, and loading them again fails: by an error",
        v.Config(5, 1, 2, 3, 4, **SWAPPING), (a(2, 3), b(3, 2)),
        aborts=True, kv_offers=(offer("A", 2), offer("B", 2, is_async=True)),
        expected=Counts(2_210, 16_778, 7_655, 20)),
    World("reswapped", "two plans in flight, and loading a swapped-out victim again fails",
        v.Config(5, 1, 2, 3, 4, **SWAPPING | COMPUTED, **AHEAD),
        (a(2, 3), b(3, 2)), resets=(True,),
        kv_offers=(offer("A", 2), offer("B", 2, is_async=True)),
        expected=Counts(3_513, 30_739, 16_226, 26)),
    World("outranked", "PRIORITY: a victim planned in this step is swapped out as it was before",
        v.Config(5, 1, 2, 4, 5, **SWAPPING | COMPUTED, **RANKED),
        (a(2, 3, priority=1), b(3, 2)), kv_offers=(offer("A", 2), offer("B", 2, is_async=True)),
        expected=Counts(405, 2_459, 1_830, 16)),
    World("slid", "a window of longer blocks has freed what is swapped out, and loading fails",
        v.Config(7, 1, 2, 4, 5, **SWAPPING | COMPUTED,
                 groups=(FULL, group("sliding_window", 2, sliding_window=2))),
        (a(2, 3), b(3, 2)), kv_offers=(offer("A", 2), offer("B", 2)),
        expected=Counts(281, 1_529, 1_178, 18)),
    World("several", "PRIORITY: an urgent request needs the blocks of two others in one step",
        v.Config(6, 1, 3, 5, 5, **SWAPPING, **RANKED),
        (a(1, 3), b(2, 2, priority=1), c(2, 2, priority=1)),
        expected=Counts(754, 3_024, 3_326, 20)),
    World("closed", "admission closes below one free block, and opens with two; aborts, pauses",
        v.Config(5, 1, 2, 4, 4, **CLOSED, **UNRESERVED), (a(2, 2), b(1, 3)),
        aborts=True, pauses=tuple(v.PauseState),
        expected=Counts(5_583, 37_164, 17_823, 21)),
    World("shut", "two plans in flight, and a waiting load needs admission to open",
        v.Config(5, 1, 2, 3, 4, **SWAPPING, **CLOSED, **AHEAD),
        (a(2, 2), b(3, 2)), aborts=True,
        kv_offers=(offer("B", 1, is_async=True),),
        expected=Counts(2_459, 17_293, 9_494, 25)),
)  # fmt: skip
