"""Laws about the tiers of a store, swap-out and admission thresholds.

PYTEST_DONT_REWRITE.

The store of these laws has two tiers, which may already hold two blocks of another token sequence.
"""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule
from blockstep.spec.core.requests import Holding
from blockstep.spec.features.admission_control import is_admission_closed
from blockstep.spec.features.offload import compute_break_even, compute_num_saved, get_save
from blockstep.spec.features.tiers import Names, Tiers, clear, count_held, create_tiers, fetch, keep
from blockstep.spec.vocabulary import KVSave

ROOM = LawModule("tiers")
TEXT: Names = ("a", "b", "c")
OTHER: Names = ("p", "q")
SIZES = (2, 4, 6)
"""Block sizes of three groups: twelve tokens are whole blocks of each."""


def build_tiers(upper: int, lower: int, num_kept: int) -> Tiers:
    """Return two tiers that got blocks of another sequence, and then `num_kept` of this one."""
    return keep(keep(create_tiers((upper, lower)), OTHER), TEXT[:num_kept])


def is_sound(tiers: Tiers) -> bool:
    """Whether each tier keeps to its capacity, and each name is in at most one tier."""
    names = [name for tier in tiers.tiers for name in tier]
    fits = [len(tier) <= room for tier, room in zip(tiers.tiers, tiers.capacities, strict=True)]
    return all(fits) and len({*names}) == len(names)


def list_held(tiers: Tiers) -> list[bool]:
    """Return for each block of the sequence whether it is kept."""
    return [count_held(tiers, (name,)) == 1 for name in TEXT]


# Laws.


@ROOM.law("P1 P16", (2, 1, 1))
def check_tier_stays_within_its_capacity_without_duplicates(
    upper: int, lower: int, num_kept: int
) -> None:
    """This holds after blocks are kept and fetched."""
    assert 0 <= upper <= 2 and 0 <= lower <= 2 and 0 <= num_kept <= 3
    tiers = build_tiers(upper, lower, num_kept)
    assert is_sound(tiers)
    tiers = keep(tiers, TEXT, num_kept)
    assert is_sound(tiers)
    assert is_sound(fetch(tiers, OTHER)[0])


@ROOM.law("P5 P16", (2, 1, 1))
def check_stored_blocks_are_a_prefix(upper: int, lower: int, num_kept: int) -> None:
    """Kept are as many blocks as fit, and all that were kept before."""
    assert 0 <= upper <= 3 and 0 <= lower <= 3 and 0 <= num_kept <= 3
    before = build_tiers(upper, lower, num_kept)
    num_before = count_held(before, TEXT)
    after = keep(before, TEXT, num_before)
    held = list_held(after)
    assert held == sorted(held, reverse=True)
    assert sum(held) == min(upper + lower, 3)


@ROOM.law("P5 P19", (2, 2, 1))
def check_fetch_drops_the_unreadable_block_only(upper: int, lower: int, unreadable: int) -> None:
    """The unreadable block is dropped, and the blocks after it stay."""
    assert 0 <= upper <= 3 and 0 <= lower <= 3 and 0 <= unreadable <= 3
    before = build_tiers(upper, lower, 3)
    num_held = count_held(before, TEXT)
    after, found = fetch(before, TEXT, TEXT[unreadable : unreadable + 1])
    assert found == TEXT[: min(num_held, unreadable)]
    held = [index < num_held and index != unreadable for index in range(3)]
    assert list_held(after) == held


@ROOM.law("P25", (2, 1))
def check_fetch_finds_nothing_from_before_a_reset(upper: int, lower: int) -> None:
    """After a reset, a fetch finds no block in either tier."""
    assert 0 <= upper <= 3 and 0 <= lower <= 3
    tiers = clear(build_tiers(upper, lower, 3))
    assert fetch(tiers, TEXT)[1] == () == fetch(tiers, OTHER)[1]
    assert tiers.capacities == (upper, lower)


@ROOM.law("P4 P5", (30, 26, 13))
def check_saved_tokens_are_computed_full_blocks_above_the_threshold(
    num_computed: int, num_known: int, min_tokens: int
) -> None:
    """All such tokens are swapped out, or none."""
    assert 0 <= num_computed and 0 <= num_known and 0 <= min_tokens
    num_saved = compute_num_saved(num_computed, num_known, SIZES, min_tokens)
    num_settled = min(num_computed, num_known)
    assert num_saved % 12 == 0
    assert 0 <= num_saved <= num_settled
    if num_saved == 0:
        assert min_tokens == 0 or num_settled < 12 or num_settled // 12 * 12 < min_tokens
    else:
        assert num_settled < num_saved + 12
        assert 0 < min_tokens <= num_saved


@ROOM.law("P4 P19", (9, 10, 0))
def check_victim_is_saved_unless_its_load_is_unconfirmed(
    num_computed: int, num_known: int, has_unconfirmed_kv: int
) -> None:
    """Blocks have four slots; three are held."""
    assert 0 <= num_computed <= 12 and 0 <= num_known <= 14 and 0 <= has_unconfirmed_kv <= 1
    table = (4, 5, 6)
    victim = h.build_runner("a", num_known, num_computed, table)
    victim = replace(victim, has_unconfirmed_kv=has_unconfirmed_kv == 1, holdings=(Holding(table),))
    config = replace(h.build_config(4), kv_connector=True, swap_min_tokens=1)
    save = get_save(config, victim)
    num_blocks = min(num_computed, num_known) // 4
    assert (save is None) == (has_unconfirmed_kv == 1 or num_blocks == 0)
    if save is not None:
        assert save == KVSave("a", (table[:num_blocks],), 4 * num_blocks)


@ROOM.law("P8", (100, 3, 4, 120))
def check_from_the_break_even_length_on_swapping_is_not_slower(
    num_setup: int, num_moved: int, num_computed: int, num_tokens: int
) -> None:
    """Below it, moving costs more. If it is 0, moving always costs more, or gains nothing."""
    assert 0 <= num_setup and 0 <= num_moved <= 4 and 1 <= num_computed <= 4 and 1 <= num_tokens
    least = compute_break_even(num_setup, num_moved, num_computed)
    is_worth_it = num_setup + num_tokens * num_moved <= num_tokens * num_computed
    if num_computed > num_moved:
        assert is_worth_it == (num_tokens >= least)
    else:
        assert least == 0
        assert not is_worth_it or (num_setup == 0 and num_moved == num_computed)


@ROOM.law("P10 P16", (4, 2, 6, 1))
def check_admission_keeps_its_state_between_the_thresholds(
    num_free: int, low: int, high: int, num_running: int
) -> None:
    """This holds while requests run and none is preempted; outside the thresholds it changes."""
    assert 0 <= num_free and 0 <= low <= high and 1 <= high and 1 <= num_running
    for was_closed in (False, True):
        now = is_admission_closed(was_closed, num_running, False, num_free, low, high)
        if low <= num_free < high:
            assert now == was_closed
        else:
            assert now == (num_free < low)


@ROOM.law("P10 P16", (4, 2, 6, 1, 1))
def check_preemption_closes_admission_and_an_empty_engine_opens_it(
    num_free: int, low: int, high: int, num_running: int, was_closed: int
) -> None:
    """The number of free blocks does not matter; without a high threshold it is always open."""
    assert 0 <= num_free and 0 <= low <= high and 0 <= num_running and 0 <= was_closed <= 1
    now = is_admission_closed(was_closed == 1, num_running, True, num_free, low, high)
    assert now == (num_running > 0 and high > 0)
    assert not is_admission_closed(was_closed == 1, 0, False, num_free, low, high)
