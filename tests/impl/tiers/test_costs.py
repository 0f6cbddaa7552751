"""Costs of swapping and recomputing: rules that hold for all sizes and speeds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockstep.impl.tiers import Costs, KVShape, Link, Prefill, Way

MS = 10**6
NUM_TOKENS_MAX = 400
"""Lengths that are tried one by one."""

few = st.integers(1, 6)
shapes = st.builds(KVShape, few, few, few, st.integers(1, 9), st.sampled_from((1, 2, 4)))
latencies = st.sampled_from((0, 1, 7)) | st.integers(0, 3 * 10**9)
links = st.builds(Link, st.integers(1, 900), latencies, latencies)
prefills = st.builds(Prefill, st.integers(1, 40), latencies)
costs = st.builds(Costs, shapes, st.none() | links, links, prefills)


def list_choices(one: Costs) -> list[Way]:
    return [one.choose(num_tokens) for num_tokens in range(1, NUM_TOKENS_MAX)]


@given(costs)
def test_swapping_is_chosen_for_all_lengths_from_the_break_even(one: Costs) -> None:
    break_even, block = one.get_break_even(), one.shape.block_size
    far = [one.choose(10**9 * block + place) for place in range(block)]
    if break_even is None:
        assert Way.RECOMPUTE in far
        return
    next_blocks = [one.choose(break_even + more) for more in range(3 * block)]
    assert {*next_blocks, *far} == {Way.SWAP}
    if break_even > 1:
        assert one.choose(break_even - 1) is Way.RECOMPUTE


@given(costs, st.integers(0, NUM_TOKENS_MAX))
def test_the_cheaper_way_is_chosen_and_recomputing_at_equal_cost(
    one: Costs, num_tokens: int
) -> None:
    is_cheaper = one.compute_swap_time(num_tokens) < one.compute_recompute_time(num_tokens)
    assert (one.choose(num_tokens) is Way.SWAP) is is_cheaper


def reach(one: Costs) -> float:
    """Return the break-even as a number that can be compared; infinity for none."""
    break_even = one.get_break_even()
    return float("inf") if break_even is None else break_even


@given(costs, st.integers(1, 10**9))
def test_a_more_expensive_swap_does_not_lower_the_break_even(one: Costs, more: int) -> None:
    back, prefill = one.back, one.prefill
    dearer = (
        replace(one, back=replace(back, ns_per_copy=back.ns_per_copy + more)),
        replace(one, back=replace(back, ns_per_block=back.ns_per_block + more)),
        replace(one, back=replace(back, bytes_per_second=max(back.bytes_per_second - more, 1))),
        replace(one, prefill=replace(prefill, tokens_per_second=prefill.tokens_per_second + more)),
        replace(one, out=one.out or back),
    )
    for other in dearer:
        assert reach(other) >= reach(one)
    cheaper = replace(prefill, ns_per_prefill=prefill.ns_per_prefill + more)
    assert reach(replace(one, prefill=cheaper)) <= reach(one)


@given(costs, st.integers(0, NUM_TOKENS_MAX), st.integers(0, 20))
def test_more_tokens_never_cost_less(one: Costs, num_tokens: int, more: int) -> None:
    assert one.compute_swap_time(num_tokens) <= one.compute_swap_time(num_tokens + more)
    assert one.compute_recompute_time(num_tokens) <= one.compute_recompute_time(num_tokens + more)


@given(costs, st.integers(1, 50), st.integers(1, 9))
def test_a_block_costs_the_same_however_full_it_is(one: Costs, num_blocks: int, used: int) -> None:
    size = one.shape.block_size
    whole = one.compute_swap_time(num_blocks * size)
    assert one.compute_swap_time((num_blocks - 1) * size + min(used, size)) == whole


@given(links, st.integers(1, 10**6), few, few)
def test_two_copies_cost_one_setup_more_than_one(
    link: Link, block_bytes: int, one: int, two: int
) -> None:
    apart = sum(link.compute_copy_time(count, block_bytes) for count in (one, two))
    together = link.compute_copy_time(one + two, block_bytes)
    assert apart - together == Fraction(link.ns_per_copy, 10**9)


@given(shapes, st.integers(0, 10**7))
def test_count_fitting_is_the_largest_number_that_fits(shape: KVShape, memory_bytes: int) -> None:
    count = shape.count_fitting(memory_bytes)
    assert count * shape.block_bytes <= memory_bytes < (count + 1) * shape.block_bytes


@given(shapes, st.integers(0, 10**6))
def test_less_than_a_block_is_wasted(shape: KVShape, num_tokens: int) -> None:
    wasted = shape.count_blocks(num_tokens) * shape.block_size - num_tokens
    assert 0 <= wasted < shape.block_size


def test_zero_tokens_cost_nothing() -> None:
    link = Link(1, ns_per_copy=MS, ns_per_block=MS)
    one = Costs(KVShape(1, 1, 1, 1, 1), link, link, Prefill(1, ns_per_prefill=MS))
    assert one.compute_swap_time(0) == one.compute_recompute_time(0) == 0
    assert one.choose(0) is Way.RECOMPUTE


def test_both_directions_are_counted() -> None:
    shape = KVShape(1, 1, 1, 1, 1)  # two bytes a block
    there, back = Link(2, ns_per_copy=MS), Link(1, ns_per_block=2 * MS)
    one = Costs(shape, there, back, Prefill(1))
    assert one.compute_swap_time(3) == Fraction(3001, 1000) + Fraction(6006, 1000)
    assert replace(one, out=None).compute_swap_time(3) == Fraction(6006, 1000)


def test_the_choice_may_flip_more_than_once_below_the_break_even() -> None:
    # Four tokens a block, half a second to move one, a fifth for a token.
    one = Costs(KVShape(1, 1, 1, 4, 1), None, Link(16), Prefill(5))
    letters = "".join(way[0] for way in list_choices(one)[:12])
    assert letters == "rrssrsssssss"
    assert one.get_break_even() == 6


def test_there_is_no_break_even_if_moving_is_slower_than_computing() -> None:
    one = Costs(KVShape(1, 1, 1, 4, 1), None, Link(8), Prefill(5, ns_per_prefill=10**9))
    assert one.choose(1) is Way.SWAP
    assert one.get_break_even() is None


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        (KVShape, (0, 1, 1, 1, 1), "num_layers = 0: must be a whole number, 1 or more"),
        (KVShape, (1, 1, 1, 1, 0.5), "dtype_bytes = 0.5: must be"),
        (KVShape, (1, True, 1, 1, 1), "num_kv_heads = True: must be"),
        (Link, (0,), "bytes_per_second = 0: must be a whole number, 1 or more"),
        (Link, (2.8e10,), r"bytes_per_second = 28000000000\.0: must be"),
        (Link, (1, -1), "ns_per_copy = -1: must be a whole number, 0 or more"),
        (Link, (1, 0, -1), "ns_per_block = -1"),
        (Prefill, (0,), "tokens_per_second = 0"),
        (Prefill, (1, -1), "ns_per_prefill = -1"),
    ],
)
def test_invalid_numbers_are_rejected(kind: Any, given: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(*given)
