"""Seats of adapters: each different adapter of a running request has one."""

from __future__ import annotations

from blockstep.impl.host.adapters import AdapterSeats


def test_seats_are_counted_by_name() -> None:
    seats = AdapterSeats(2, ("x", None, "x"))
    assert seats.has_seat("y")
    seats.take("y")
    seats.take(None)
    assert not seats.has_seat("z")
    assert seats.has_seat("x")
    assert seats.has_seat(None)
