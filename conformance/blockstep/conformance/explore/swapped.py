"""Worlds in which victims are swapped out, and in which admission closes."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.explore.world import Counts, World
from blockstep.spec import vocabulary as v


def _ask(name: v.RequestId, num_tokens: int, max_tokens: int, **more: Any) -> v.Request:
    """Return a request with `num_tokens` equal tokens and `max_tokens`."""
    return v.Request(name, (0,) * num_tokens, max_tokens=max_tokens, **more)


_UNRESERVED: dict[str, Any] = {"scheduler_reserve_full_isl": False}
_SWAPPED: dict[str, Any] = {"kv_connector": True, "swap_min_tokens": 2} | _UNRESERVED
_COMPUTED: dict[str, Any] = {"kv_load_failure_policy": v.KVLoadFailurePolicy.RECOMPUTE}
_AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
_RANKED: dict[str, Any] = {"policy": v.Policy.PRIORITY}
_CLOSED: dict[str, Any] = {"admission_low_blocks": 1, "admission_high_blocks": 2}
_WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, sliding_window=2)
_FULL = v.KVGroup(v.GroupKind.FULL, 1)
_OFFERS = (v.KVOffer("A", 2), v.KVOffer("B", 2, is_async=True))

SWAPPED = (
    World("swapped", "victims are swapped out, and loading them again fails: by an error",
        v.Config(5, 1, 2, 3, 4, **_SWAPPED), (_ask("A", 2, 3), _ask("B", 3, 2)),
        aborts=True, kv_offers=_OFFERS,
        expected=Counts(2_210, 16_778, 7_655, 20)),
    World("reswapped", "two plans in flight, and loading a swapped-out victim again fails",
        v.Config(5, 1, 2, 3, 4, **_SWAPPED, **_COMPUTED, **_AHEAD),
        (_ask("A", 2, 3), _ask("B", 3, 2)), resets=(True,), kv_offers=_OFFERS,
        expected=Counts(3_513, 30_739, 16_226, 26)),
    World("outranked", "PRIORITY: a victim planned in this step is swapped out as it was before",
        v.Config(5, 1, 2, 4, 5, **_SWAPPED, **_COMPUTED, **_RANKED),
        (_ask("A", 2, 3, priority=1), _ask("B", 3, 2)), kv_offers=_OFFERS,
        expected=Counts(405, 2_459, 1_830, 16)),
    World("slid", "a window of longer blocks has freed what is swapped out, and loading fails",
        v.Config(7, 1, 2, 4, 5, **_SWAPPED, **_COMPUTED, groups=(_FULL, _WINDOW)),
        (_ask("A", 2, 3), _ask("B", 3, 2)), kv_offers=(v.KVOffer("A", 2), v.KVOffer("B", 2)),
        expected=Counts(281, 1_529, 1_178, 18)),
    World("several", "PRIORITY: an urgent request needs the blocks of two others in one step",
        v.Config(6, 1, 3, 5, 5, **_SWAPPED, **_RANKED),
        (_ask("A", 1, 3), _ask("B", 2, 2, priority=1), _ask("C", 2, 2, priority=1)),
        expected=Counts(754, 3_024, 3_326, 20)),
    World("closed", "admission closes below one free block, and opens with two; aborts, pauses",
        v.Config(5, 1, 2, 4, 4, **_CLOSED, **_UNRESERVED), (_ask("A", 2, 2), _ask("B", 1, 3)),
        aborts=True, pauses=tuple(v.PauseState),
        expected=Counts(5_583, 37_164, 17_823, 21)),
    World("shut", "two plans in flight, and a waiting load needs admission to open",
        v.Config(5, 1, 2, 3, 4, **_SWAPPED, **_CLOSED, **_AHEAD),
        (_ask("A", 2, 2), _ask("B", 3, 2)), aborts=True,
        kv_offers=(v.KVOffer("B", 1, is_async=True),),
        expected=Counts(2_459, 17_293, 9_494, 25)),
)  # fmt: skip
"""Each is walked within seconds."""
