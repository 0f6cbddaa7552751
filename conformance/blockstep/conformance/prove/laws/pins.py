"""Laws about pins: blocks, expiry and the order of requests. PYTEST_DONT_REWRITE."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.law import Right, Room, instead
from blockstep.spec.lives.endings import get_ended
from blockstep.spec.lives.turns import get_turn_ended, without_pins
from blockstep.spec.maps import FrozenMap
from blockstep.spec.memory.pins import (
    Pins,
    free_pins,
    get_findable_tables,
    hold_pin,
    is_expired,
    list_expired,
    list_givers,
    take_estimate,
    tell_time,
)
from blockstep.spec.pool import Pool, get_num_free_blocks, touch_blocks
from blockstep.spec.requests import RequestState
from blockstep.spec.state import State
from blockstep.spec.step.queues import Requests, select_victim
from blockstep.spec.step.warmth import compute_coldness, get_warm_first, process_expiry
from blockstep.spec.step.work import Step
from blockstep.spec.vocabulary import (
    BlockTables,
    Config,
    Pin,
    PinEstimate,
    Policy,
    RequestId,
    Status,
)

ROOM = Room("pins")
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
    return replace(state, pins=pins, requests=gone, running=("a",))


# Mutants: expiry.


@instead(is_expired)
def pin_stays_while_its_end_is_now(end: int, now: int) -> bool:
    """A pin expires one tick too late."""
    return end < now


@instead(tell_time)
def last_word_is_the_time(pins: Pins, now: int) -> Pins:
    """An earlier time replaces a later one."""
    return replace(pins, now=now)


@instead(take_estimate)
def estimate_is_for_the_next_pin(right: Right[Pins], pins: Pins) -> Pins:
    """An estimate does not change the pin that exists."""
    return replace(right(), pins=pins.pins)


@instead(take_estimate)
def estimate_only_makes_longer(right: Right[Pins], pins: Pins) -> Pins:
    """An estimate can prolong a pin, but not shorten it."""
    told = right()
    kept = [
        replace(new, end=max(old.end, new.end))
        for old, new in zip(pins.pins, told.pins, strict=True)
    ]
    return replace(told, pins=tuple(kept))


@instead(take_estimate)
def time_is_added(right: Right[Pins], pins: Pins, estimate: PinEstimate) -> Pins:
    """The estimate is added to the end of the pin instead of to the present time."""
    kept = [
        replace(pin, end=pin.end + estimate.ttl) if pin.job_id == estimate.job_id else pin
        for pin in pins.pins
    ]
    return replace(right(), pins=tuple(kept))


@instead(take_estimate)
def estimate_of_nothing_is_kept(right: Right[Pins], estimate: PinEstimate) -> Pins:
    """An estimate of zero is stored."""
    told = right()
    return replace(told, estimates=told.estimates.having(estimate.job_id, estimate.ttl))


# Mutants: pinned blocks.


@instead(get_findable_tables)
def whole_table_stays(request: RequestState) -> BlockTables:
    """Blocks that are not cached are pinned, too, as in the seed."""
    return request.block_tables


@instead(get_findable_tables)
def last_findable_block_goes(request: RequestState) -> BlockTables:
    """The last cached block is not pinned."""
    (holding,) = request.holdings
    kept = holding.block_table[: max(holding.num_cached_blocks - 1, 0)]
    return (kept,) if kept else ()


@instead(hold_pin)
def pin_has_no_reference(pool: Pool, pins: Pins, pin: Pin) -> tuple[Pool, Pins]:
    """The request's end frees the blocks that the pin names."""
    return pool, replace(pins, pins=(*pins.pins, pin))


@instead(hold_pin)
def pin_holds_too_much(right: Right[tuple[Pool, Pins]], pool: Pool, pin: Pin) -> tuple[Pool, Pins]:
    """The pin has a reference to the other blocks of the table, too, which it does not name."""
    return right(pool=touch_blocks(pool, TABLE[len(pin.block_tables[0]) :]))


@instead(get_turn_ended)
def older_pin_is_forgotten(right: Right[State], state: State) -> State:
    """The blocks of the job's older pin are not freed when a new pin replaces it."""
    after = right()
    if after.pins.pins == state.pins.pins or not after.pins.pins:
        return after
    held = list(after.pool.ref_counts)
    held[4] = 1
    free = tuple([block_id for block_id in after.pool.free_queue if block_id != 4])
    return replace(after, pool=replace(after.pool, ref_counts=tuple(held), free_queue=free))


@instead(get_turn_ended)
def last_turn_is_a_turn(right: Right[State], state: State, request_id: RequestId) -> State:
    """The last turn of a job is pinned like any other, although no turn follows."""
    request = state.requests[request_id]
    asked = replace(request.request, is_last_step=False)
    requests = state.requests.having(request_id, replace(request, request=asked))
    return right(state=replace(state, requests=requests))


@instead(get_turn_ended)
def last_turn_leaves_the_older_pin(
    right: Right[State], state: State, request_id: RequestId
) -> State:
    """The last turn leaves the older pin of its job until it expires, as in the seed."""
    return state if state.requests[request_id].request.is_last_step else right()


@instead(get_turn_ended)
def blocks_stay_for_no_time(right: Right[State], state: State) -> State:
    """A turn is pinned although its job has no estimate."""
    if state.pins.estimates:
        return right()
    return right(state=replace(state, pins=replace(state.pins, estimates=FrozenMap({"x": 1}))))


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


@instead(without_pins)
def reset_keeps_pins(state: State) -> State:
    """A reset leaves the pins as they are, as in the seed."""
    return state


# Mutants: the order of requests.


@instead(process_expiry)
def what_is_over_goes_after_the_step(step: Step) -> None:
    """Expired pins still hold their blocks in this step."""


@instead(compute_coldness)
def warm_go_before_the_preempted(
    right: Right[int], request: RequestState, warm: Collection[str]
) -> int:
    """Requests of pinned jobs go before preempted ones, which have waited longest."""
    return 0 if request.request.job_id in warm else 1 + right()


@instead(compute_coldness)
def preempted_are_sorted_by_warmth(request: RequestState, warm: Collection[str]) -> int:
    """Preempted requests of pinned jobs go before other preempted requests."""
    is_preempted = request.status is Status.PREEMPTED
    return 2 * (not is_preempted) + (request.request.job_id not in warm)


@instead(get_warm_first)
def line_is_turned_round(right: Right[list[RequestId]]) -> list[RequestId]:
    """Requests of equal rank change their order."""
    return right(waiting=right()[::-1])


@instead(select_victim)
def last_goes_though_it_is_warm(running: list[RequestId]) -> int:
    """The victim is the last running request, as under FCFS."""
    return len(running) - 1


@instead(select_victim)
def first_cold_one_goes(running: list[RequestId], requests: Requests, warm: Collection[str]) -> int:
    """The victim is the first request without a pin instead of the last one."""
    jobs = [requests[name].request.job_id for name in running]
    cold = [index for index, job_id in enumerate(jobs) if job_id not in warm]
    return min(cold, default=len(running) - 1)


@instead(list_givers)
def own_pin_goes_first(pins: Pins, job_id: str | None) -> list[Pin]:
    """The pin of the requesting job, whose blocks it is about to hit, is reclaimed first."""
    return sorted(pins.pins, key=lambda pin: (pin.job_id != job_id, pin.end))


@instead(list_givers)
def longest_goes_first(pins: Pins, job_id: str | None) -> list[Pin]:
    """The pin with the latest end is reclaimed first."""
    return sorted(pins.pins, key=lambda pin: (pin.job_id == job_id, -pin.end))


@instead(list_givers)
def newest_of_equals_goes_first(pins: Pins, job_id: str | None) -> list[Pin]:
    """The newest of several pins with equal ends is reclaimed first."""
    return sorted(pins.pins, key=lambda pin: (pin.job_id == job_id, pin.end, -pins.pins.index(pin)))


# Laws.


@ROOM.law("P17 P18", (3, 5, 5), pin_stays_while_its_end_is_now, last_word_is_the_time)
def check_a_pin_is_over_from_its_end_on(now: int, told: int, end: int) -> None:
    """The latest time counts, even if an earlier one arrives after it."""
    assert 0 <= now and 0 <= told and 0 <= end
    pins = tell_time(Pins(now, (Pin("x", (TABLE,), end),)), told)
    assert bool(list_expired(pins)) == (end <= now or end <= told)


@ROOM.law(
    "P17",
    (3, 5, 4, 9),
    *(estimate_is_for_the_next_pin, estimate_only_makes_longer, time_is_added),
    estimate_of_nothing_is_kept,
)
def check_an_estimate_counts_from_now(now: int, end: int, ttl: int, other_end: int) -> None:
    """It sets the end of the existing pin and of the next one; other jobs are not affected."""
    assert 0 <= now and 0 <= end and 0 <= ttl and 0 <= other_end
    other = Pin("y", ((4,),), other_end)
    pins = Pins(now, (Pin("x", (TABLE,), end), other), FrozenMap({"y": 1}))
    after = take_estimate(pins, PinEstimate("x", ttl))
    assert after.pins[0].end == now + ttl
    assert after.pins[1].end == other_end
    assert after.estimates.get("x") == (ttl if ttl else None)
    assert after.estimates.get("y") == 1


@ROOM.law(
    "P1 P17",
    (2, 5, 0),
    *(whole_table_stays, last_findable_block_goes, pin_has_no_reference, pin_holds_too_much),
    *(older_pin_is_forgotten, last_turn_is_a_turn, last_turn_leaves_the_older_pin),
    blocks_stay_for_no_time,
)
def check_what_stays_and_what_is_freed_is_the_table(
    num_settled: int, ttl: int, is_last: int
) -> None:
    """Cached blocks are pinned, and the older pin ends; after a last turn no block is pinned."""
    assert 0 <= num_settled <= 3 and 0 <= ttl and 0 <= is_last <= 1
    state = build_turns(num_settled, ttl, is_last == 1)
    after = get_ended(get_turn_ended(state, "a"), ["a"])
    is_kept = num_settled > 0 and ttl > 0 and not is_last
    expected = () if is_last else state.pins.pins
    if is_kept:
        expected = (Pin("x", (TABLE[:num_settled],), ttl),)
    assert after.pins.pins == expected
    held = [block_id for pin in expected for table in pin.block_tables for block_id in table]
    assert [b for b in range(1, 6) if after.pool.ref_counts[b]] == held
    assert h.is_conserved(after.pool)


@ROOM.law("P1 P17", (2, 1), pin_is_freed_with_its_last_holder)
def check_the_end_of_a_pin_takes_nothing_from_who_shares_it(num_shared: int, is_twice: int) -> None:
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


@ROOM.law("P25", (3,), reset_keeps_pins)
def check_no_pin_outlives_a_reset(num_settled: int) -> None:
    """All pinned blocks are free, and the estimates are gone."""
    assert 1 <= num_settled <= 3
    ended = get_ended(get_turn_ended(build_turns(num_settled, 5, False), "a"), ["a"])
    after = without_pins(ended)
    assert get_num_free_blocks(after.pool) == 5
    assert not after.pins.pins
    assert not after.pins.estimates


@ROOM.law("P10 P17", (7, 5, 40), what_is_over_goes_after_the_step, pin_stays_while_its_end_is_now)
def check_a_step_takes_what_is_over_before_it_takes_a_block(
    now: int, end: int, num_prompt: int
) -> None:
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
    state = replace(state, requests=requests, running=("a",), pins=pins)
    after, _ = h.schedule(state)
    assert bool(after.pins.pins) == (end > now)
    assert (after.running == ("a", "b")) == (end <= now and num_prompt <= 48)


@ROOM.law(
    "P16",
    (1, 2, 0),
    *(warm_go_before_the_preempted, preempted_are_sorted_by_warmth, line_is_turned_round),
)
def check_the_line_is_a_stable_partition(first: int, second: int, third: int) -> None:
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
    line = get_warm_first(tuple(requests), requests, ["x"])
    preempted = [name for name, kind in zip("abc", kinds, strict=True) if kind >= 2]
    warm = [name for name, kind in zip("abc", kinds, strict=True) if kind == 1]
    cold = [name for name, kind in zip("abc", kinds, strict=True) if kind == 0]
    assert line == preempted + warm + cold


@ROOM.law("P16", (0, 0, 1), last_goes_though_it_is_warm, first_cold_one_goes)
def check_who_is_warm_is_preempted_last(first: int, second: int, third: int) -> None:
    """Three requests run, each with a pinned job (1) or not; the last one without a pin is the
    victim.
    """
    assert 0 <= first <= 1 and 0 <= second <= 1 and 0 <= third <= 1
    warmths = (first, second, third)
    requests = {
        name: h.build_request(name, 4, job_id="x" if is_warm else None)
        for name, is_warm in zip("abc", warmths, strict=True)
    }
    victim = select_victim(Policy.CONTINUUM, list(requests), requests, warm=["x"])
    if first and second and third:
        assert victim == 2
    else:
        assert not warmths[victim]
        assert all(warmths[victim + 1 :])


@ROOM.law(
    "P10 P17",
    (5, 3, 3, 1),
    *(own_pin_goes_first, longest_goes_first, newest_of_equals_goes_first),
)
def check_pins_give_way_in_one_order(one: int, two: int, three: int, owner: int) -> None:
    """Owner, end and age of the pins give a strict order, and each pin occurs once."""
    assert 0 <= one and 0 <= two and 0 <= three and 0 <= owner <= 3
    ends = (one, two, three)
    pins = tuple([Pin(job, ((index + 1,),), ends[index]) for index, job in enumerate("xyz")])
    givers = list_givers(Pins(0, pins), "xyz-"[owner])
    ranks = [(pin.job_id == "xyz-"[owner], pin.end, pin.job_id) for pin in givers]
    assert len(givers) == 3
    assert ranks[0] < ranks[1] < ranks[2]
