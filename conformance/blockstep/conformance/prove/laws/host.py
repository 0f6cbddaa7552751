"""Laws about the host engine where it computes a result in another way.

PYTEST_DONT_REWRITE.

They are about outputs, the ring of free blocks, and whole plans. Laws about amounts are next to the
same laws about the specification.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.hosts import HOST, build_host
from blockstep.conformance.prove.law import Room
from blockstep.spec import vocabulary as v
from blockstep.spec.core.block_pool import allocate_blocks, free_blocks, touch_blocks
from blockstep.spec.core.endings import compute_stop
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.features.identity import get_item_keys
from blockstep.spec.features.repetition import is_repeating

ROOM = Room("host")


# Outputs.


@ROOM.law("P13", (7, 7, 9, 3, 2, 5))
def check_host_ends_a_request_for_its_text_at_the_same_token(
    last: int, eos: int, stop: int, num_outputs: int, min_tokens: int, max_tokens: int
) -> None:
    """The host checks this only for requests with such tokens, which it notes when they arrive."""
    assert 0 <= last and 0 <= eos and 0 <= stop and 0 <= min_tokens
    assert 1 <= num_outputs <= max_tokens < 8000
    request = h.build_request(
        "a",
        1,
        max_tokens=max_tokens,
        eos_token_id=eos,
        stop_token_ids=(stop,),
        min_tokens=min_tokens,
    )
    host = HOST(h.build_config(block_size=8192))
    host._submit(request.request)
    host.table.num_known[0] = 1 + num_outputs
    due = compute_stop(request, h.Tokens(num_outputs, last), 1 + num_outputs, 8192)
    assert host._stop_verdict(0, last) == due


@ROOM.law("P13", (1, 2, 1, 2, 2))
def check_host_sees_the_same_repetitions(
    first: int, second: int, third: int, fourth: int, max_size: int
) -> None:
    """Four outputs hold patterns of one or two tokens, twice. The host has a shortcut before it."""
    assert 0 <= first and 0 <= second and 0 <= third and 0 <= fourth and 1 <= max_size <= 3
    detection = v.RepetitionDetection(max_size)
    host = build_host(h.build_config(), h.build_request("a", 1, repetition_detection=detection))
    host.table.lineages[0].tokens = [1, first, second, third, fourth]
    host.table.num_known[0] = 5
    due = is_repeating((first, second, third, fourth), detection)
    assert host._repeats(0) == due


# Blocks: the ring of free blocks, and the items in keys.


@ROOM.law("P1 P16", (1, 2, 1, 2))
def check_ring_of_the_host_is_the_free_queue(
    first: int, second: int, third: int, num_taken: int
) -> None:
    """After a table is freed, a block touched and some taken, order and counts are equal."""
    assert 1 <= first and 1 <= second and 1 <= third and 0 <= num_taken <= 2
    host = build_host(h.build_config())
    host.pool.touch((1, 2, 3))
    host.pool.ref_counts = [0, first, second, third, 0, 0]
    pool = h.build_pool((0, first, second, third, 0, 0), (4, 5), published=())
    host.pool.free((1, 2, 3))
    pool = free_blocks(pool, (1, 2, 3))
    host.pool.touch((5, 2))
    pool = touch_blocks(pool, (5, 2))
    num_taken = min(num_taken, len(pool.free_queue))
    taken = host.pool.take(num_taken)
    pool, due = allocate_blocks(pool, num_taken)
    assert tuple(taken) == due
    assert tuple(host.pool.free_queue()) == pool.free_queue
    assert host.pool.num_free == len(pool.free_queue)
    assert tuple(host.pool.ref_counts) == pool.ref_counts


@ROOM.law("P6", (3, 4, 9, 2, 1, 4))
def check_host_names_the_same_items_of_a_block(
    offset: int, length: int, next_offset: int, next_length: int, index: int, block_size: int
) -> None:
    """The host finds the items by bisection instead of one by one."""
    assert 0 <= offset and 1 <= length and offset + length <= next_offset and 1 <= next_length
    assert 0 <= index <= 3 and 1 <= block_size <= v.MAX_INT
    items = (v.MultiModalItem("x", offset, length), v.MultiModalItem("y", next_offset, next_length))
    request = h.build_request("a", 1, items=items)
    host = build_host(h.build_config(block_size), request)
    start = index * block_size
    due = get_item_keys(request.request, start, start + block_size)
    assert host.table.lineages[0].items_of(index) == due


# Whole plans. Request a holds blocks 1 and 2, b holds 3; 4 and 5 are free.


def schedule_both(
    config: v.Config, runners: tuple[RequestState, ...], waiting: tuple[RequestState, ...] = ()
) -> tuple[State, v.Plan, Any, v.Plan]:
    """Run one step in the specification and in the host, and return state and plan of each."""
    host = build_host(config, *runners, *waiting)
    host.prev_frame_id = host.next_frame_id = 5
    state = replace(h.build_state(config, runners, waiting), next_frame_id=5)
    after, due = h.schedule(state)
    return after, due, host, host._schedule()


@ROOM.law("P9 P15 P26", (50, 20, 30, 8, 16), is_slow=True)
def check_host_plans_one_runner_as_the_specification_does(
    num_known: int, num_computed: int, budget: int, threshold: int, block_size: int
) -> None:
    """The plan, the counters and the free queue are equal, also if the request preempts itself."""
    assert 1 <= block_size <= v.MAX_INT and 1 <= budget <= v.MAX_INT and 0 <= threshold <= v.MAX_INT
    assert block_size < num_computed <= 2 * block_size and num_computed < num_known < 8192
    config = h.build_config(
        block_size, long_prefill_token_threshold=threshold, max_num_batched_tokens=budget
    )
    runner = h.build_runner("a", num_known, num_computed, (1, 2))
    after, due, host, plan = schedule_both(config, (runner,))
    assert plan == due
    assert host.table.num_computed[0] == after.requests["a"].num_computed_tokens
    assert bool(host.table.is_prefill_chunk[0]) == after.requests["a"].is_prefill_chunk
    assert tuple(host.pool.free_queue()) == after.pool.free_queue


@ROOM.law("P7 P8 P15 P26", (50, 60, 30, 16), is_slow=True)
def check_host_admits_two_newcomers_as_the_specification_does(
    known_a: int, known_b: int, budget: int, block_size: int
) -> None:
    """The plan, both queues and the free queue are equal, also if an admission fails."""
    assert 1 <= block_size <= v.MAX_INT and 1 <= budget <= v.MAX_INT
    assert 1 <= known_a < 8192 and 1 <= known_b < 8192
    config = h.build_config(block_size, max_num_batched_tokens=budget)
    waiting = (h.build_request("a", known_a), h.build_request("b", known_b))
    after, due, host, plan = schedule_both(config, (), waiting)
    assert plan == due
    assert len(host.running) == len(after.running)
    assert len(host.waiting) == len(after.waiting)
    assert tuple(host.pool.free_queue()) == after.pool.free_queue


@ROOM.law("P9 P15 P16 P26", (60, 20, 30, 20, 16), is_slow=True)
def check_host_plans_two_runners_as_the_specification_does(
    known_a: int, known_b: int, computed_a: int, budget: int, priority_a: int
) -> None:
    """Plan, order and free queue are equal with priorities and preemption, in blocks of 16."""
    assert 0 <= computed_a <= 32 and computed_a < known_a < 8192 and 1 <= known_b < 8192
    assert 1 <= budget <= v.MAX_INT
    config = h.build_config(max_num_batched_tokens=budget, policy=v.Policy.PRIORITY)
    first = h.build_runner("a", known_a, computed_a, (1, 2), priority=priority_a)
    second = h.build_runner("b", known_b, 0, (3,))
    after, due, host, plan = schedule_both(config, (first, second))
    assert plan == due
    names = [host.table.requests[slot].request_id for slot in host.running]
    assert tuple(names) == after.running
    assert tuple(host.table.num_computed[:2]) == tuple(
        after.requests[name].num_computed_tokens for name in "ab"
    )
    assert tuple(host.pool.free_queue()) == after.pool.free_queue
