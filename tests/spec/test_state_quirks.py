"""Quirks where recurrent groups take from the pool: chunks, fresh states, what is zeroed."""

from __future__ import annotations

import pytest
from groups_support import full, recurrent, window

from blockstep.spec import Config, Oracle, Policy, Request
from blockstep.spec.profiles import Profile, Quirk
from blockstep.spec.vocabulary import MambaCacheMode, Plan


def oracle_of(config: Config, *quirks: Quirk) -> Oracle:
    return Oracle(config, Profile("some", frozenset(quirks)))


def answer(oracle: Oracle, plan: Plan) -> None:
    (frame,) = oracle.state.frames
    oracle.commit(plan, {row.request_id: [50] for row in frame.rows if row.samples})


@pytest.mark.parametrize(("quirk", "expected"), [(False, [2, 2, 2, 2, 1]), (True, [])])
def test_chunks_round_to_nothing(quirk: bool, expected: list[int]) -> None:
    """Upstream #40707: no step has room for a whole block of the prompt."""
    config = Config(20, 4, max_num_batched_tokens=2, max_model_len=16, groups=(recurrent(4),))
    oracle = oracle_of(config, *([Quirk.CHUNKS_ROUND_TO_NOTHING] if quirk else []))
    oracle.submit(Request("A", tuple(range(9)), max_tokens=1))
    amounts = []
    for _ in range(6):
        plan = oracle.schedule()
        amounts += [row.num_scheduled_tokens for row in plan.rows]
        if plan.rows:
            answer(oracle, plan)
    assert amounts == expected


def test_chunks_round_by_the_smallest_block() -> None:
    """A window in smaller blocks lets a chunk end where no state of the other group is kept."""
    config = Config(
        40, 1, max_num_batched_tokens=5, max_model_len=16, groups=(recurrent(2), window(1, 2))
    )
    amounts = []
    for oracle in (oracle_of(config), oracle_of(config, Quirk.CHUNKS_ROUND_TO_NOTHING)):
        oracle.submit(Request("A", tuple(range(9)), max_tokens=1))
        amounts.append(oracle.schedule().rows[0].num_scheduled_tokens)
    assert amounts == [4, 5]


@pytest.mark.parametrize(("quirk", "expected"), [(False, ["A", "B", "C"]), (True, ["A"])])
def test_fresh_states_are_waited_for(quirk: bool, expected: list[str]) -> None:
    """B shares its first block with A, C nothing; neither is admitted beside A."""
    config = Config(30, 2, max_model_len=16, groups=(recurrent(2),))
    oracle = oracle_of(config, *([Quirk.FRESH_STATES_ARE_WAITED_FOR] if quirk else []))
    for name, prompt in (("A", (1, 1)), ("B", (1, 1, 2)), ("C", (5,))):
        oracle.submit(Request(name, prompt, max_tokens=2))
    plan = oracle.schedule()
    assert [row.request_id for row in plan.rows] == expected
    assert all(row.num_computed_tokens == 0 for row in plan.new)
    answer(oracle, plan)
    if quirk:
        admitted = oracle.schedule().new
        assert [(row.request_id, row.num_computed_tokens) for row in admitted] == [
            ("B", 2),
            ("C", 0),
        ]


def test_a_state_that_is_named_again_is_fresh() -> None:
    """The block of A, free and findable, is taken by B for the same tokens, and written anew."""
    config = Config(4, 2, max_model_len=16, groups=(recurrent(2),))
    oracle = oracle_of(config, Quirk.FRESH_STATES_ARE_WAITED_FOR)
    oracle.submit(Request("A", (1, 1), max_tokens=1))
    answer(oracle, oracle.schedule())
    oracle.submit(Request("X", (7,), max_tokens=1))
    oracle.submit(Request("Y", (8,), max_tokens=9))
    answer(oracle, oracle.schedule())
    assert oracle.state.pool.free_queue == (1, 2)
    oracle.submit(Request("B", (1, 1), max_tokens=1))
    oracle.submit(Request("C", (1, 1, 2), max_tokens=1))
    plan = oracle.schedule()
    assert [(row.request_id, row.block_ids) for row in plan.new] == [("B", ((1,),))]
    assert oracle.state.waiting == ("C",)


@pytest.mark.parametrize(("quirk", "expected"), [(False, (1, 2, 3, 4)), (True, (1, 2))])
def test_only_full_attention_is_zeroed(quirk: bool, expected: tuple[int, ...]) -> None:
    config = Config(20, 1, max_model_len=16, groups=(full(1), window(1, 2), recurrent(1)))
    oracle = oracle_of(config, *([Quirk.ONLY_FULL_ATTENTION_IS_ZEROED] if quirk else []))
    oracle.submit(Request("A", (1, 2), max_tokens=2))
    assert oracle.schedule().new_block_ids_to_zero == expected


@pytest.mark.parametrize("quirk", [False, True])
def test_withdrawn_blocks_are_zeroed(quirk: bool) -> None:
    """The low one takes a block, and is preempted for the high one behind it."""
    config = Config(
        10, 1, max_model_len=8, policy=Policy.PRIORITY, enable_prefix_caching=False,
        scheduler_reserve_full_isl=False, groups=(full(1), recurrent(8, MambaCacheMode.NONE)),
    )  # fmt: skip
    oracle = oracle_of(config, *([Quirk.WITHDRAWN_BLOCKS_ARE_ZEROED] if quirk else []))
    oracle.submit(Request("low", (1,), max_tokens=6, priority=1))
    answer(oracle, oracle.schedule())
    oracle.submit(Request("high", (2, 3), max_tokens=6))
    plan = oracle.schedule()
    while not plan.preempted_req_ids:
        answer(oracle, plan)
        plan = oracle.schedule()
    (row,) = plan.cached
    taken = row.new_block_ids[0]
    assert (row.request_id, len(taken)) == ("high", 1)
    assert plan.new_block_ids_to_zero[-1:] == taken
    assert len(plan.new_block_ids_to_zero) == 1 + quirk
