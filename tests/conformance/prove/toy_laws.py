"""A law for each verdict of `blockstep prove`, for `test_prove.py`.

pytest does not collect this file, as it would rewrite the asserts of the laws.
"""

from __future__ import annotations

from typing import Literal

from blockstep.conformance.prove.law import LawModule, instead

ROOM = LawModule("toys")


def half(number: int) -> int:
    return number // 2


half_is_half = instead(half)(half)


@instead(half)
def half_is_rounded_up(number: int) -> int:
    return -(-number // 2)


@instead(half)
def half_is_asserted_to_be_small(number: int) -> int:
    assert number < 10
    return number // 2


@instead(half)
def half_is_not_to_be_had() -> int:
    raise LookupError("no half")


@instead(half)
def half_is_shown_in_an_error(number: int) -> int:
    raise LookupError(number)


@ROOM.law("P1", (3,), half_is_rounded_up)
def check_confirmed(number: int) -> None:
    """Two halves are no more than the whole."""
    assert number >= 0
    pieces = 2 * half(number)
    assert pieces <= number


@ROOM.law("P1", (4,))
def check_refuted(number: int) -> None:
    assert number >= 0
    pieces = 2 * half(number)
    assert pieces == number


@ROOM.law("P1", (1,))
def check_vacuous(number: int) -> None:
    assert 0 < number < 0
    copy = number
    assert copy == 12345


@ROOM.law("P1", (1, 3))
def check_unknown(part: int, whole: int) -> None:
    assert 0 <= part <= whole
    assert whole >= 1
    share = part / whole
    assert share <= 1.0


@ROOM.law("P1", ((1,), (2,)))  # type: ignore[arg-type]
def check_spurious(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert len(first) == 1
    assert len(second) == 1
    assert first != second
    one, other = first[0], second[0]
    assert one != other


@ROOM.law("P1", (2000,), half_is_rounded_up)
def check_broken_all_leading(number: int) -> None:
    assert number > 0
    assert number > 1000


@ROOM.law("P1", (1,))
def check_broken_nothing_leading(number: int) -> None:
    more = number + 1
    assert more > number


@ROOM.law("P1", (1,))
def check_broken_early_return(number: int) -> None:
    assert number > 0
    if number > 1:
        return
    assert number == 1


@ROOM.law("P1", (1,))
def check_broken_with_a_result(number: int) -> bool:
    assert number > 0
    more = number + 1
    return more > number


@ROOM.law("P1", ("a",))  # type: ignore[arg-type]
def check_broken_engine(letter: Literal["a", "b"]) -> None:
    assert len(letter) == 1
    copy = letter
    assert copy in ("a", "b")
