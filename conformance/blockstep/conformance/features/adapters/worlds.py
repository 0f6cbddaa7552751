"""Small worlds with a limit on adapters."""

from __future__ import annotations

from blockstep.conformance.explore.world import UNCACHED, Counts, World, a, b
from blockstep.spec import vocabulary as v

WORLDS = (
    World("seat", "two adapters and one LoRA slot, two plans in flight, forced resets",
        v.Config(5, 1, 3, 3, 3, max_frames_in_flight=2, max_loras=1),
        (a(1, 2, adapter="x"), b(1, 1, adapter="y")),
        aborts=True, resets=(True,), expected=Counts(3_149, 15_651, 11_589, 21)),
    World("free", "one LoRA slot, and a request without an adapter",
        v.Config(3, 1, 2, 2, 2, max_loras=1, **UNCACHED), (a(1, 1, adapter="x"), b(1, 1)),
        expected=Counts(26, 44, 84, 6)),
)  # fmt: skip
