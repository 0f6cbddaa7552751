"""Small worlds with pins."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.explore.small import BOTH, FETCHED, UNRESERVED, a, b, c, offer
from blockstep.conformance.explore.world import Counts, World
from blockstep.spec import vocabulary as v

PINNED: dict[str, Any] = {"policy": v.Policy.CONTINUUM}
WORLDS = (
    World("turns", "a job of two turns, with a pin that ends at any time; aborts, resets",
        v.Config(4, 2, 1, 3, 6, **PINNED),
        (a(3, 1, job_id="x"), b(5, 1, job_id="x", is_last_step=True)),
        aborts=True, resets=BOTH,
        also=(v.PinEstimate("x", 2), v.PinEstimate("x")),
        expected=Counts(904, 8_060, 3_190, 18)),
    World("shelved", "a job of two turns, and a store that reads the first and loads the second",
        v.Config(5, 1, 1, 3, 4, **PINNED, **FETCHED),
        (a(2, 1, job_id="x"), b(3, 1, job_id="x", is_last_step=True)),
        resets=(True,), also=(v.PinEstimate("x", 2),),
        kv_offers=(offer("A", delays_free=True), offer("B", 2, is_async=True)),
        expected=Counts(2_198, 22_357, 7_421, 22)),
    World("kept", "a request of a job with a pin, and one without: which of them is preempted",
        v.Config(7, 1, 2, 3, 4, **PINNED, **UNRESERVED),
        (a(2, 2, job_id="x"), b(1, 3, token=1)), also=(v.PinEstimate("x", 1),),
        expected=Counts(710, 2_591, 2_745, 21)),
    World("warm", "two jobs and a pool for one: order of admission, preemption and reclaim",
        v.Config(5, 1, 2, 3, 4, **PINNED, **UNRESERVED),
        (a(2, 2, job_id="x"), b(2, 3, token=1, job_id="y"), c(1, 3, token=2)),
        also=(v.PinEstimate("x", 1), v.PinEstimate("y", 1)),
        expected=Counts(4_110, 19_581, 17_987, 20)),
)  # fmt: skip
