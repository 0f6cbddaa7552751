"""Deferred frees: with a store, freed blocks of a frame in flight wait for its commit."""

from __future__ import annotations

from typing import Any

import pytest
from groups_support import full, window

from blockstep.spec import Config, Oracle, Policy, Request
from blockstep.spec.features.kv_transfer.transfers import TRANSFERS
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.profiles import STRICT, Profile, Quirk
from blockstep.spec.vocabulary import (
    BlockId,
    KVLoadFailurePolicy,
    KVTransfers,
    Plan,
    PoolOrder,
    RequestId,
    Status,
)

UNFENCED = Profile("unfenced", frozenset({Quirk.BLOCKS_FREED_WHILE_FRAMES_WRITE}))


def build(profile: Profile = STRICT, **changes: Any) -> Oracle:
    """Return an oracle with blocks of 2 tokens, a store, and two frames in flight."""
    fields: dict[str, Any] = {"num_blocks": 9, "block_size": 2, "max_model_len": 32}
    fields |= {"kv_connector": True, "max_frames_in_flight": 2, "async_scheduling": True}
    fields |= {"scheduler_reserve_full_isl": False, "enable_prefix_caching": False}
    return Oracle(Config(**fields | changes), profile)


def submit(oracle: Oracle, name: str, num_tokens: int, max_tokens: int = 4, **more: Any) -> None:
    prompt = tuple(range(10 * ord(name), 10 * ord(name) + num_tokens))
    oracle.submit(Request(name, prompt, max_tokens=max_tokens, **more))


def answer(oracle: Oracle, plan: Plan, token: int = 7, **report: Any) -> None:
    frame = next(f for f in oracle.state.frames if f.frame_id == plan.frame_id)
    sampled = {row.request_id: (token,) * row.samples for row in frame.rows}
    oracle.commit(plan, sampled, KVTransfers(**report))
    assert get_broken_invariants(oracle.state) == ()


def waiting(oracle: Oracle) -> tuple[tuple[int, tuple[BlockId, ...]], ...]:
    """Return frame ids with the blocks that wait for their commit."""
    assert get_broken_invariants(oracle.state) == ()
    return tuple((one.frame_id, one.block_ids) for one in oracle.state.pool.deferred_frees)


def free(oracle: Oracle) -> tuple[BlockId, ...]:
    return oracle.state.pool.free_queue


def run_names(plan: Plan) -> list[RequestId]:
    return [row.request_id for row in plan.rows]


# A load does not get blocks that a frame in flight writes.


@pytest.mark.parametrize("is_async", [True, False])
def test_a_load_does_not_get_blocks_that_a_frame_in_flight_writes(is_async: bool) -> None:
    oracle = build(num_blocks=4)
    submit(oracle, "A", 4, max_tokens=2)
    first = oracle.schedule()
    oracle.abort("A")
    assert waiting(oracle) == ((0, (1, 2)),)
    submit(oracle, "B", 5, max_tokens=1)
    oracle.offer_kv("B", 4, is_async=is_async)
    plan = oracle.schedule()
    assert (plan.kv_loads, free(oracle)) == ((), (3,))
    answer(oracle, first)
    assert (waiting(oracle), free(oracle)) == ((), (3, 2, 1))
    (load,) = oracle.schedule().kv_loads
    assert load.block_ids == ((3, 2),)


def test_a_release_without_deferred_frees_loads_into_these_blocks() -> None:
    oracle = build(UNFENCED, num_blocks=2)
    submit(oracle, "A", 2, max_tokens=1)
    oracle.schedule()
    oracle.abort("A")
    submit(oracle, "B", 2, max_tokens=1)
    oracle.offer_kv("B", 2, is_async=True)
    (load,) = oracle.schedule().kv_loads
    assert load.block_ids == ((1,),)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_connector": False},
        {"max_frames_in_flight": 1, "async_scheduling": False},
    ],
    ids=["no store", "one frame"],
)
def test_blocks_are_free_at_once_without_a_store_or_a_second_frame(fields: dict[str, Any]) -> None:
    oracle = build(**fields)
    submit(oracle, "A", 4)
    oracle.schedule()
    oracle.abort("A")
    assert (waiting(oracle), free(oracle)[-2:]) == ((), (2, 1))


# Which frame a block waits for, and the order in the free queue.


def test_blocks_of_a_request_that_never_ran_are_free_at_once() -> None:
    oracle = build()
    submit(oracle, "A", 2)
    oracle.schedule()
    submit(oracle, "B", 4)
    oracle.offer_kv("B", 2, is_async=True)
    oracle.schedule()
    oracle.report(["B"])
    assert oracle.state.requests["B"].status is Status.WAITING_FOR_REMOTE_KVS
    oracle.abort("B")
    assert waiting(oracle) == ()


def test_deferred_blocks_are_reused_next_with_lifo_order() -> None:
    oracle = build(pool_order=PoolOrder.LIFO)
    submit(oracle, "A", 4)
    plan = oracle.schedule()
    oracle.abort("A")
    assert free(oracle)[0] == 3
    answer(oracle, plan)
    assert free(oracle)[:2] == (2, 1)


# Every way to free blocks: a finish, a transfer, a failed load, a reset.


def test_a_finish_in_the_newest_frame_frees_blocks_at_once() -> None:
    oracle = build()
    submit(oracle, "A", 2, max_tokens=1)
    answer(oracle, oracle.schedule())
    assert (waiting(oracle), len(free(oracle))) == ((), 8)


def test_blocks_wait_for_the_frame_after_their_transfer_has_ended() -> None:
    oracle = build()
    submit(oracle, "A", 4)
    oracle.offer_kv("A", 0, delays_free=True)
    plan = oracle.schedule()
    oracle.abort("A")
    assert (waiting(oracle), len(TRANSFERS.of(oracle.state).held)) == ((), 1)
    oracle.report(finished_sending=["A"])
    assert waiting(oracle) == ((0, (1, 2)),)
    answer(oracle, plan)
    assert waiting(oracle) == ()


def test_blocks_of_a_failed_load_wait_for_later_frames() -> None:
    oracle = build(
        num_blocks=20,
        groups=(full(2), window(2, 3)),
        max_num_batched_tokens=4,
        kv_load_failure_policy=KVLoadFailurePolicy.RECOMPUTE,
    )
    submit(oracle, "A", 12)
    oracle.offer_kv("A", 4)
    first, second = oracle.schedule(), oracle.schedule()
    (load,) = first.kv_loads
    answer(oracle, first, invalid_block_ids=(load.block_ids[0][0],))
    assert oracle.state.requests["A"].status is Status.PREEMPTED
    assert {frame_id for frame_id, _ in waiting(oracle)} == {1}
    answer(oracle, second)
    assert len(free(oracle)) == 19


def test_a_forced_reset_unpublishes_deferred_blocks() -> None:
    oracle = build(enable_prefix_caching=True)
    submit(oracle, "A", 5)
    plan = oracle.schedule()
    assert not oracle.reset()
    assert oracle.reset(reset_running_requests=True)
    assert waiting(oracle) == ((0, (1, 2, 3)),)
    assert not oracle.state.pool.cached
    assert not oracle.reset(), "blocks are held still"
    answer(oracle, plan)
    assert oracle.reset()


# A request that lacks blocks waits for the commit.


def short(**changes: Any) -> tuple[Oracle, Plan]:
    """Return a state where A lacks a block for the second plan; A and B are in flight."""
    oracle = build(num_blocks=3, **changes)
    submit(oracle, "A", 2, max_tokens=2)
    submit(oracle, "B", 2, max_tokens=2, priority=1)
    return oracle, oracle.schedule()


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_a_victim_in_flight_is_not_preempted_before_its_commit(policy: Policy) -> None:
    oracle, first = short(policy=policy)
    second = oracle.schedule()
    assert (run_names(second), second.preempted_req_ids) == ([], ())
    assert oracle.state.running == ("A", "B")
    answer(oracle, first)
    third = oracle.schedule()
    assert (run_names(third), third.preempted_req_ids) == (["A"], ("B",))
    assert (waiting(oracle), oracle.state.requests["B"].status) == ((), Status.PREEMPTED)


def test_blocks_of_a_session_in_flight_are_reclaimed_after_its_commit() -> None:
    oracle = build(num_blocks=3)
    oracle.submit(Request("S", (1, 2), max_tokens=2, eos_token_id=7, resumable=True))
    first, second = oracle.schedule(), oracle.schedule()
    answer(oracle, first)
    assert oracle.state.requests["S"].status is Status.WAITING_FOR_STREAMING_REQ
    submit(oracle, "B", 4, max_tokens=1)
    third = oracle.schedule()
    assert (run_names(third), waiting(oracle)) == ([], ())
    assert oracle.state.requests["S"].block_tables == ((1, 2),)
    answer(oracle, second)
    assert run_names(oracle.schedule()) == ["B"]
    assert not any(oracle.state.requests["S"].block_tables)
