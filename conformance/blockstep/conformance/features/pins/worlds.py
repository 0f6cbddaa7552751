"""Small worlds with pins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blockstep.conformance.explore.world import (
    BOTH,
    FETCHED,
    UNRESERVED,
    Counts,
    Scope,
    World,
    a,
    b,
    c,
    offer,
)
from blockstep.spec import vocabulary as v
from blockstep.spec.core.state import State
from blockstep.spec.features.pins import PINS


def list_events(state: State) -> Iterator[v.Event]:
    """Yield clocks: time goes backwards, and advances tick by tick while there are pins."""
    pins = PINS.of(state)
    yield v.Clock(0)
    if any(pin.end > pins.now for pin in pins.pins):
        yield v.Clock(pins.now + 1)


def list_tables(state: State) -> Iterator[Sequence[v.BlockId]]:
    """Yield the block tables of pins."""
    for pin in PINS.of(state).pins:
        yield from pin.block_tables


def get_form(state: State, places: Mapping[v.BlockId, int]) -> tuple[Any, ...]:
    """Return the pins with the time left; the time itself does not matter."""
    pins = PINS.of(state)
    kept = [
        (
            pin.job_id,
            max(pin.end - pins.now, 0),
            *[tuple(places[block_id] for block_id in table) for table in pin.block_tables],
        )
        for pin in pins.pins
    ]
    return tuple(kept), tuple(sorted(pins.estimates.items()))


SCOPE = Scope(lambda config: config.has_pins, list_events, list_tables, get_form)
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
