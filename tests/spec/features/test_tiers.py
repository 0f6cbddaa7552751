"""Tiers of the store: what each tier keeps, in examples and in random walks.

The walk compares them with a model without tiers, which notes what was kept and last used.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from blockstep.spec.features.tiers import Names, Tiers, clear, count_held, create_tiers, fetch, keep

TEXTS: tuple[Names, ...] = (("a", "b", "c", "d"), ("a", "b", "x"), ("p", "q"), ("r",), ("a", "y"))


def test_a_full_tier_moves_the_least_recently_used_block_down() -> None:
    tiers = keep(create_tiers((3, 2)), ("a", "b"))
    tiers = keep(tiers, ("p", "q"))
    assert tiers.tiers == (("a", "q", "p"), ("b",))
    tiers = keep(tiers, ("r", "s"))
    assert tiers.tiers == (("p", "s", "r"), ("a", "q")), "b is gone: it went down first"


def test_blocks_hit_in_a_lower_tier_move_up_and_others_move_down() -> None:
    tiers = Tiers((2, 2), (("q", "p"), ("b", "a")))
    tiers, found = fetch(tiers, ("a", "b", "c"))
    assert found == ("a", "b")
    assert tiers.tiers == (("b", "a"), ("q", "p"))


def test_blocks_without_space_in_the_upper_tier_stay_below() -> None:
    tiers = Tiers((1, 3), ((), ("c", "b", "a")))
    tiers, found = fetch(tiers, ("a", "b", "c"))
    assert found == ("a", "b", "c")
    assert tiers.tiers == (("a",), ("c", "b"))


def test_a_sequence_longer_than_a_tier_is_continued_in_the_next() -> None:
    tiers = keep(create_tiers((1, 0, 2)), ("a", "b", "c", "d"))
    assert tiers.tiers == (("a",), (), ("c", "b"))
    assert count_held(tiers, ("a", "b", "c", "d")) == 3


def test_a_fetch_after_a_clear_finds_no_block() -> None:
    tiers = keep(create_tiers((2, 2)), ("a", "b", "c"))
    assert fetch(clear(tiers), ("a", "b", "c")) == (create_tiers((2, 2)), ())
    assert keep(create_tiers(()), ("a",)) == create_tiers(())


@given(
    st.lists(st.integers(0, 3), max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from(("keep", "fetch", "clear", "keep", "fetch")),
            st.sampled_from(TEXTS),
            st.integers(0, 3),
            st.frozensets(st.sampled_from("abcdxpqry"), max_size=1),
        ),
        max_size=25,
    ),
)
def test_random_walks_agree_with_a_model_without_tiers(
    capacities: list[int], calls: list[tuple[str, Names, int, frozenset[str]]]
) -> None:
    tiers = create_tiers(capacities)
    given_since: set[object] = set()
    last_used: dict[object, int] = {}
    for time, (call, names, first, unreadable) in enumerate(calls):
        before = [name for tier in tiers.tiers for name in tier]
        used: Names = ()
        if call == "keep":
            num_there = min(count_held(tiers, names), first)
            tiers = keep(tiers, names, num_there)
            used, lost = names, set()
            given_since |= set(names[num_there:])
            added = [name for name in names if name not in before and count_held(tiers, [name])]
            assert added == [n for n in names[num_there:] if n not in before][: len(added)]
        elif call == "fetch":
            num_held = count_held(tiers, names)
            tiers, used = fetch(tiers, names, unreadable)
            lost = {name for name in names[len(used) : len(used) + 1] if len(used) < num_held}
            assert lost <= unreadable, "what can be read is returned"
            assert not set(used) & unreadable
            assert set(used) <= given_since, "only what was kept since is returned (P25)"
        else:
            tiers, given_since, lost = clear(tiers), set(), set(before)
        last_used |= dict.fromkeys(used, time)
        held = [name for tier in tiers.tiers for name in tier]
        assert len(held) == len(set(held)), "a name is in one tier"
        assert all(map(fits, tiers.tiers, tiers.capacities))
        gone = set(before) - set(held) - lost
        if gone:
            assert len(held) == sum(capacities), "nothing goes while there is room below"
            assert not gone & set(used), "nothing goes for others of its own text"
        times = [last_used[name] for tier in tiers.tiers[:1] for name in tier]
        assert all(one <= two for one, two in pairwise(times)), "the least recent is first"


def fits(tier: Names, capacity: int) -> bool:
    """Return whether the tier is within its capacity."""
    return len(tier) <= capacity
