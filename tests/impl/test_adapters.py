"""A cap on adapters: different ones among all who run, whoever has a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockstep.impl.host.adapters import AdapterSeats
from blockstep.spec.vocabulary import Abort, Plan

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession

SMALL: dict[str, Any] = {"num_blocks": 40, "block_size": 2, "max_model_len": 16}


def names(plan: Plan) -> list[str]:
    return [row.request_id for row in plan.rows]


def test_who_brings_one_too_many_is_passed_over(session: OpenSession) -> None:
    s = session(max_loras=1, **SMALL)
    for name, adapter in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        s.submit(name, range(3), adapter=adapter, max_tokens=4)
    assert names(s.plan()) == ["a", "c", "d"]
    assert s.state().skipped_waiting == ("b",)


def test_one_without_a_row_keeps_its_seat(session: OpenSession) -> None:
    """Its last token is on its way, so it has no row, and yet it runs."""
    s = session(max_loras=1, max_frames_in_flight=2, async_scheduling=True, **SMALL)
    s.submit("a", range(3), adapter="x", max_tokens=1)
    first = s.plan()
    s.submit("b", range(3), adapter="y")
    assert names(s.plan()) == []
    assert s.state().running == ("a",)
    assert s.state().skipped_waiting == ("b",)
    s.commit(first, a=(1,))
    assert names(s.plan()) == ["b"]


def test_a_seat_is_free_when_the_last_of_its_adapter_has_gone(session: OpenSession) -> None:
    s = session(max_loras=1, **SMALL)
    for name, adapter in (("a", "x"), ("b", "x"), ("c", "y")):
        s.submit(name, range(3), adapter=adapter, max_tokens=9)
    s.step(a=(1,), b=(1,))
    s.apply(Abort(("a",)))
    assert names(s.step(b=(1,))[0]) == ["b"]
    s.apply(Abort(("b",)))
    assert names(s.plan()) == ["c"]


def test_without_a_cap_all_run(session: OpenSession) -> None:
    s = session(**SMALL)
    for name in "abc":
        s.submit(name, range(3), adapter=name)
    assert names(s.plan()) == ["a", "b", "c"]


def test_seats_are_counted_by_name() -> None:
    seats = AdapterSeats(2, ("x", None, "x"))
    assert seats.has_seat("y")
    seats.take("y")
    seats.take(None)
    assert not seats.has_seat("z")
    assert seats.has_seat("x")
    assert seats.has_seat(None)
