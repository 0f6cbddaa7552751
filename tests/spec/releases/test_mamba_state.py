"""Quirks of recurrent groups: sizes of chunks, reuse of fresh states, zeroed blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from groups_support import full, recurrent, window

from blockstep.spec import Config, Oracle, Policy, Request, SpecMethod
from blockstep.spec.core.block_pool import withdraw_blocks
from blockstep.spec.profiles import Profile, Quirk, get_profile
from blockstep.spec.vocabulary import MambaCacheMode, Plan


def oracle_of(config: Config, *quirks: Quirk) -> Oracle:
    return Oracle(config, Profile("some", frozenset(quirks)))


def answer(oracle: Oracle, plan: Plan) -> None:
    (frame,) = oracle.state.frames
    oracle.commit(plan, {row.request_id: [50] for row in frame.rows if row.samples})


@pytest.mark.parametrize(("quirk", "expected"), [(False, [2, 2, 2, 2, 1]), (True, [])])
def test_chunk_rounds_down_to_zero(quirk: bool, expected: list[int]) -> None:
    """Upstream #40707: the token budget is smaller than a block."""
    config = Config(20, 4, max_num_batched_tokens=2, max_model_len=16, groups=(recurrent(4),))
    oracle = oracle_of(config, *([Quirk.CHUNK_ROUNDS_DOWN_TO_ZERO] if quirk else []))
    oracle.submit(Request("A", tuple(range(9)), max_tokens=1))
    amounts = []
    for _ in range(6):
        plan = oracle.schedule()
        amounts += [row.num_scheduled_tokens for row in plan.rows]
        if plan.rows:
            answer(oracle, plan)
    assert amounts == expected


def test_chunks_round_by_the_smallest_block() -> None:
    """With a window in smaller blocks, a chunk ends where no state of the other group is kept."""
    config = Config(
        40, 1, max_num_batched_tokens=5, max_model_len=16, groups=(recurrent(2), window(1, 2))
    )
    amounts = []
    for oracle in (oracle_of(config), oracle_of(config, Quirk.CHUNK_ROUNDS_DOWN_TO_ZERO)):
        oracle.submit(Request("A", tuple(range(9)), max_tokens=1))
        amounts.append(oracle.schedule().rows[0].num_scheduled_tokens)
    assert amounts == [4, 5]


@pytest.mark.parametrize(("quirk", "expected"), [(False, (1, 2, 3, 4)), (True, (1, 2))])
def test_only_full_attention_is_zeroed(quirk: bool, expected: tuple[int, ...]) -> None:
    config = Config(20, 1, max_model_len=16, groups=(full(1), window(1, 2), recurrent(1)))
    oracle = oracle_of(config, *([Quirk.ONLY_FULL_ATTENTION_IS_ZEROED] if quirk else []))
    oracle.submit(Request("A", (1, 2), max_tokens=2))
    assert oracle.schedule().new_block_ids_to_zero == expected


@pytest.mark.parametrize("quirk", [False, True])
def test_blocks_of_withdrawn_rows_are_zeroed(quirk: bool) -> None:
    """`low` takes a block and is then preempted for `high` in the same step."""
    config = Config(
        10, 1, max_model_len=8, policy=Policy.PRIORITY, enable_prefix_caching=False,
        scheduler_reserve_full_isl=False, groups=(full(1), recurrent(8, MambaCacheMode.NONE)),
    )  # fmt: skip
    oracle = oracle_of(config, *([Quirk.BLOCKS_OF_WITHDRAWN_ROWS_ARE_ZEROED] if quirk else []))
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


@pytest.mark.parametrize(("quirk", "expected"), [(False, ()), (True, (1, 2))])
def test_blocks_of_loads_are_zeroed(quirk: bool, expected: tuple[int, ...]) -> None:
    """Upstream #48481: the plan that starts an asynchronous load zeroes its blocks."""
    config = Config(9, 2, max_model_len=8, kv_connector=True, groups=(full(2), recurrent(2)))
    oracle = oracle_of(config, *([Quirk.BLOCKS_OF_LOADS_ARE_ZEROED] if quirk else []))
    oracle.submit(Request("A", (1, 2, 3, 4, 5)))
    oracle.offer_kv("A", 4, is_async=True)
    assert oracle.schedule().new_block_ids_to_zero == expected


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_also_waits_for_a_state_of_the_same_step(is_async: bool) -> None:
    """A load with the quirk waits although it does not use that state: it loads another one."""
    config = Config(20, 2, max_model_len=16, kv_connector=True, groups=(full(2), recurrent(2)))
    for quirks in ((), (Quirk.REQUESTS_WAIT_FOR_STATES_OF_THE_SAME_STEP,)):
        oracle = oracle_of(config, *quirks)
        oracle.submit(Request("A", (1, 2)))
        oracle.submit(Request("B", (1, 2, 3, 4, 5)))
        oracle.offer_kv("B", 4, is_async=is_async)
        assert len(oracle.schedule().kv_loads) == 1 - len(quirks)


def run_prompt(oracle: Oracle, name: str, prompt: tuple[int, ...]) -> list[int]:
    """Return the number of tokens of each row until the request finishes."""
    oracle.submit(Request(name, prompt, max_tokens=1))
    amounts: list[int] = []
    while oracle.state.requests and len(amounts) < 9:
        plan = oracle.schedule()
        amounts += [row.num_scheduled_tokens for row in plan.rows]
        if plan.rows:
            answer(oracle, plan)
        else:
            amounts.append(0)
    return amounts


@pytest.mark.parametrize(
    ("num_prompt", "budget", "more", "right", "quirk"),
    [
        (6, 64, {}, [6], [4, 2]),  # the last boundary before the last token
        (7, 64, {}, [6, 1], [6, 1]),
        (1, 64, {}, [1], [1]),
        (7, 5, {}, [4, 2, 1], [4, 2, 1]),
        (5, 1, {}, [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),  # no step has room for a block
        (9, 64, {"long_prefill_token_threshold": 3}, [2, 2, 2, 2, 1], [2, 2, 2, 2, 1]),
    ],
)
def test_chunks_end_at_checkpoints(
    num_prompt: int, budget: int, more: dict[str, Any], right: list[int], quirk: list[int]
) -> None:
    config = Config(
        30, 2, max_num_batched_tokens=budget, max_model_len=16, groups=(recurrent(2),), **more
    )
    found = [
        run_prompt(oracle, "A", tuple(range(num_prompt)))
        for oracle in (oracle_of(config), oracle_of(config, Quirk.CHUNKS_END_AT_CHECKPOINTS))
    ]
    assert found == [right, quirk]


@pytest.mark.parametrize(("num_prompt", "expected"), [(1, 3), (2, 1)])
def test_padding_is_left_out_if_a_state_block_would_cut_it(num_prompt: int, expected: int) -> None:
    """A session continues with 1 token, padded with two drafts or with none."""
    config = Config(
        40, 4, max_model_len=32, spec_method=SpecMethod.NGRAM, num_speculative_tokens=2,
        groups=(recurrent(4, num_speculative=2),),
    )  # fmt: skip
    profile = get_profile("vllm-0.33.0")
    assert profile is not None
    oracle = Oracle(config, profile)
    oracle.submit(Request("A", (1,) * num_prompt, max_tokens=1, resumable=True))
    oracle.update(Request("A", (1,), max_tokens=1, resumable=True))
    answer(oracle, oracle.schedule())
    assert [row.num_scheduled_tokens for row in oracle.schedule().rows] == [expected]


def test_a_chunk_shorter_than_a_block_waits_for_a_larger_budget() -> None:
    """B waits with the quirk; otherwise it gets the 1 token that A leaves."""
    config = Config(40, 2, max_num_batched_tokens=3, max_model_len=16, groups=(recurrent(2),))
    for quirk in (False, True):
        oracle = oracle_of(config, *([Quirk.CHUNKS_END_AT_CHECKPOINTS] if quirk else []))
        oracle.submit(Request("A", (1, 2, 3), max_tokens=1))
        oracle.submit(Request("B", (4, 5, 6, 7), max_tokens=1))
        rows = {row.request_id: row.num_scheduled_tokens for row in oracle.schedule().rows}
        assert rows == ({"A": 2} if quirk else {"A": 2, "B": 1})


def test_a_chunk_ends_where_the_hit_of_one_group_ended() -> None:
    """Full attention has a hit of 6 tokens, but its state was evicted.

    With the quirk a chunk ends there, so that the next request hits the state.
    """
    config = Config(30, 2, max_model_len=16, groups=(full(2), recurrent(2)))
    for quirk, expected in ((False, [8, 1]), (True, [6, 2, 1])):
        oracle = oracle_of(config, *([Quirk.CHUNKS_END_AT_CHECKPOINTS] if quirk else []))
        prompt = (1, 2, 3, 4, 5, 6)
        assert sum(run_prompt(oracle, "A", (*prompt, 7))) == 7
        pool = oracle.state.pool
        states = [b for b, key in enumerate(pool.block_keys) if key is not None and key.group == 1]
        oracle.state = replace(oracle.state, pool=withdraw_blocks(pool, states))
        assert run_prompt(oracle, "B", (*prompt, 8, 9, 10)) == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, 0), (True, 1)])
def test_states_are_freed_at_once(quirk: bool, expected: int) -> None:
    config = Config(
        20, 1, max_model_len=16, spec_method=SpecMethod.NGRAM, num_speculative_tokens=1,
        groups=(recurrent(1, MambaCacheMode.ALL, 1),),
    )  # fmt: skip
    oracle = oracle_of(config, *([Quirk.STATES_ARE_FREED_AT_ONCE] if quirk else []))
    oracle.submit(Request("A", (1, 2), max_tokens=4))
    answer(oracle, oracle.schedule())
    oracle.schedule()
    (table,) = oracle.state.requests["A"].block_tables
    assert table.count(0) == expected
