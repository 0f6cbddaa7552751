"""Laws about pins: blocks, expiry and the order of requests. PYTEST_DONT_REWRITE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.block_pool import Pool, get_num_free_blocks
from blockstep.spec.core.endings import get_ended
from blockstep.spec.core.state import State
from blockstep.spec.features.pins import (
    PINS,
    Pins,
    free_pins,
    get_after_turn,
    get_pinned_jobs_first,
    list_expired,
    list_givers,
    select_cold_victim,
    set_time,
    take_estimate,
    without_pins,
)
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import (
    Config,
    Pin,
    PinEstimate,
    Policy,
    Status,
)

ROOM = LawModule("pins")
TABLE = (1, 2, 3)
"""The block table of a turn that finishes."""


def build_config() -> Config:
    """Return a config with five usable blocks and `Policy.CONTINUUM`."""
    return h.build_config(enable_prefix_caching=True, policy=Policy.CONTINUUM)


def build_turns(num_settled: int, ttl: int, is_last: bool) -> State:
    """Return a state in which a turn of job `x` with three blocks finishes, after one with a pin.

    `num_settled` of the three blocks are cached. The pin of the earlier turn has one block.
    """
    turn = h.build_runner("a", 48, 48, TABLE, num_settled, job_id="x", is_last_step=is_last)
    other = h.build_runner("b", 16, 16, (4,))
    state = h.build_state(build_config(), (turn, other))
    estimates = FrozenMap({"x": ttl}) if ttl else FrozenMap[str, int]()
    pins = Pins(0, (Pin("x", ((4,),), 9),), estimates)
    gone = state.requests.without("b")
    return PINS.put(replace(state, requests=gone, running=("a",)), pins)


# Mistakes: pinned blocks.


@instead(free_pins)
def pin_is_freed_with_its_last_holder(
    right: Right[tuple[Pool, Pins]], pool: Pool, gone: Sequence[Pin]
) -> tuple[Pool, Pins]:
    """The end of a pin also frees blocks that a request holds."""
    shared = [
        pin for pin in gone if any(pool.ref_counts[b] > 1 for t in pin.block_tables for b in t)
    ]
    pool, _ = right(gone=shared)
    return right(pool=pool)


# Laws.


@ROOM.law("P17 P18", (3, 5, 5))
def check_pin_expires_at_its_end(now: int, reported: int, end: int) -> None:
    """The latest time counts, even if an earlier one arrives after it."""
    assert 0 <= now and 0 <= reported and 0 <= end
    pins = set_time(Pins(now, (Pin("x", (TABLE,), end),)), reported)
    assert bool(list_expired(pins)) == (end <= now or end <= reported)


@ROOM.law("P17", (3, 5, 4, 9))
def check_estimate_counts_from_now(now: int, end: int, ttl: int, other_end: int) -> None:
    """It sets the end of the existing pin and of the next one; other jobs are not affected."""
    assert 0 <= now and 0 <= end and 0 <= ttl and 0 <= other_end
    other = Pin("y", ((4,),), other_end)
    pins = Pins(now, (Pin("x", (TABLE,), end), other), FrozenMap({"y": 1}))
    after = take_estimate(pins, PinEstimate("x", ttl))
    assert after.pins[0].end == now + ttl
    assert after.pins[1].end == other_end
    assert after.estimates.get("x") == (ttl if ttl else None)
    assert after.estimates.get("y") == 1


@ROOM.law("P1 P17", (2, 5, 0))
def check_pinned_and_freed_blocks_are_the_table(num_settled: int, ttl: int, is_last: int) -> None:
    """Cached blocks are pinned, and the older pin ends; after a last turn no block is pinned."""
    assert 0 <= num_settled <= 3 and 0 <= ttl and 0 <= is_last <= 1
    state = build_turns(num_settled, ttl, is_last == 1)
    after = get_ended(get_after_turn(state, "a"), ["a"])
    is_kept = num_settled > 0 and ttl > 0 and not is_last
    expected = () if is_last else PINS.of(state).pins
    if is_kept:
        expected = (Pin("x", (TABLE[:num_settled],), ttl),)
    assert PINS.of(after).pins == expected
    held = [block_id for pin in expected for table in pin.block_tables for block_id in table]
    assert [b for b in range(1, 6) if after.pool.ref_counts[b]] == held
    assert h.is_conserved(after.pool)


@ROOM.law("P1 P17", (2, 1), pin_is_freed_with_its_last_holder)
def check_end_of_a_pin_frees_no_block_of_other_holders(num_shared: int, is_twice: int) -> None:
    """Some leading blocks of the pin are also held by one or two running requests."""
    assert 0 <= num_shared <= 3 and 0 <= is_twice <= 1
    names = ("a", "b")[: 1 + is_twice]
    sharers = tuple([h.build_runner(name, 48, 48, TABLE[:num_shared]) for name in names])
    state = h.build_state(build_config(), (h.build_runner("p", 48, 48, TABLE), *sharers))
    pins = Pins(0, (Pin("x", (TABLE,), 9),))
    pool, after = free_pins(state.pool, pins, pins.pins)
    counts = [len(names) if index < num_shared else 0 for index in range(3)]
    assert [pool.ref_counts[block_id] for block_id in TABLE] == counts
    assert h.is_conserved(pool)
    assert after.pins == ()


@ROOM.law("P25", (3,))
def check_no_pin_outlives_a_reset(num_settled: int) -> None:
    """All pinned blocks are free, and the estimates are gone."""
    assert 1 <= num_settled <= 3
    ended = get_ended(get_after_turn(build_turns(num_settled, 5, False), "a"), ["a"])
    after = without_pins(ended)
    assert get_num_free_blocks(after.pool) == 5
    assert not PINS.of(after).pins
    assert not PINS.of(after).estimates


@ROOM.law("P10 P17", (7, 5, 40))
def check_step_frees_expired_pins_before_it_allocates(now: int, end: int, num_prompt: int) -> None:
    """A request runs, so no pin is reclaimed; another is admitted if the pins leave enough
    blocks.
    """
    assert 0 <= now and 0 <= end and 1 <= num_prompt <= 64
    holder = h.build_runner("p", 48, 48, TABLE)
    runner = h.build_runner("a", 17, 16, (4, 5), 1)
    keys = tuple(map(h.key_of, (6, 7, 8, 9)))
    asked = replace(h.build_request("b", num_prompt), block_keys=keys)
    state = h.build_state(build_config(), (holder, runner), (asked,))
    requests = state.requests.without("p")
    pins = Pins(now, (Pin("x", (TABLE,), end),))
    state = PINS.put(replace(state, requests=requests, running=("a",)), pins)
    after, _ = h.schedule(state)
    assert bool(PINS.of(after).pins) == (end > now)
    assert (after.running == ("a", "b")) == (end <= now and num_prompt <= 48)


@ROOM.law("P16", (1, 2, 0))
def check_queue_order_is_a_stable_partition(first: int, second: int, third: int) -> None:
    """Three requests wait: each is new or preempted (2 or more), with a pinned job or not (odd)."""
    assert 0 <= first <= 3 and 0 <= second <= 3 and 0 <= third <= 3
    kinds = (first, second, third)
    requests = {
        name: replace(
            h.build_request(name, 4, job_id="x" if kind % 2 else None),
            status=Status.PREEMPTED if kind >= 2 else Status.WAITING,
        )
        for name, kind in zip("abc", kinds, strict=True)
    }
    line = get_pinned_jobs_first(tuple(requests), requests, ["x"])
    preempted = [name for name, kind in zip("abc", kinds, strict=True) if kind >= 2]
    warm = [name for name, kind in zip("abc", kinds, strict=True) if kind == 1]
    cold = [name for name, kind in zip("abc", kinds, strict=True) if kind == 0]
    assert line == preempted + warm + cold


@ROOM.law("P16", (0, 0, 1))
def check_running_request_of_a_pinned_job_is_preempted_last(
    first: int, second: int, third: int
) -> None:
    """Three requests run, each with a pinned job (1) or not; the last one without a pin is the
    victim.
    """
    assert 0 <= first <= 1 and 0 <= second <= 1 and 0 <= third <= 1
    warmths = (first, second, third)
    requests = {
        name: h.build_request(name, 4, job_id="x" if is_warm else None)
        for name, is_warm in zip("abc", warmths, strict=True)
    }
    victim = select_cold_victim(list(requests), requests, ["x"])
    if first and second and third:
        assert victim == 2
    else:
        assert not warmths[victim]
        assert all(warmths[victim + 1 :])


@ROOM.law("P10 P17", (5, 3, 3, 1))
def check_pins_are_reclaimed_in_a_strict_order(one: int, two: int, three: int, owner: int) -> None:
    """Owner, end and age of the pins give a strict order, and each pin occurs once."""
    assert 0 <= one and 0 <= two and 0 <= three and 0 <= owner <= 3
    ends = (one, two, three)
    pins = tuple([Pin(job, ((index + 1,),), ends[index]) for index, job in enumerate("xyz")])
    givers = list_givers(Pins(0, pins), "xyz-"[owner])
    ranks = [(pin.job_id == "xyz-"[owner], pin.end, pin.job_id) for pin in givers]
    assert len(givers) == 3
    assert ranks[0] < ranks[1] < ranks[2]
