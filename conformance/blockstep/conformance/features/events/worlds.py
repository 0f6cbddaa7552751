"""Small worlds with KV events."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.explore.world import (
    AHEAD,
    BOTH,
    FULL,
    RANKED,
    UNRESERVED,
    Counts,
    World,
    a,
    b,
    states,
)
from blockstep.spec import vocabulary as v

EVENTS: dict[str, Any] = {"enable_kv_cache_events": True}
WORLDS = (
    World("told", "KV events: two equal requests, two plans in flight, both resets",
        v.Config(5, 1, 2, 2, 3, **AHEAD, **EVENTS), (a(2, 1), b(2, 1)),
        aborts=True, resets=BOTH, expected=Counts(528, 3_190, 2_641, 15)),
    World("marked", "KV events, with states only at the ends of chunks",
        v.Config(8, 1, 1, 3, 7, groups=(states(1, v.MambaCacheMode.ALIGN),), **EVENTS),
        (a(6, 1),), expected=Counts(35, 48, 88, 22)),
    World("grouped", "KV events of two groups: full attention, and states at the ends of chunks",
        v.Config(8, 1, 1, 3, 5, **EVENTS, groups=(FULL, states(1, v.MambaCacheMode.ALIGN))),
        (a(3, 2),), resets=BOTH, expected=Counts(28, 91, 83, 12)),
    World("retold", "PRIORITY, KV events: a step withdraws keys that it has published",
        v.Config(5, 1, 2, 4, 6, long_prefill_token_threshold=1, **RANKED, **UNRESERVED, **EVENTS),
        (a(3, 2, priority=1), b(1, 3)), expected=Counts(144, 210, 630, 18)),
)  # fmt: skip
