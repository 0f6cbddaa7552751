"""KV events: a log of the blocks that become cached, and of those that are evicted."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import Example, Feature

FEATURE = Feature(
    "events",
    "a log of KV events: which blocks become cached, and which are evicted",
    Capability.EVENTS,
    config={"enable_kv_cache_events": False},
    situations=("events_",),
    properties=("P20",),
    switches=("enable_kv_cache_events",),
    is_late=True,
    examples=(Example({"enable_kv_cache_events": True}),),
)
