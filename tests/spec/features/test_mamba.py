"""Recurrent groups, worked examples: ends of chunks, held and zeroed blocks, hits of states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groups_support import ALIGN, ALL, NONE, chunks, full, recurrent, window

from blockstep.spec import Config, Oracle, Request, SpecMethod
from blockstep.spec.core.block_pool import create_pool, find_block
from blockstep.spec.core.prefix_cache import extend_block_keys, get_group_keys
from blockstep.spec.core.requests import Holding, RequestState
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.core.slots import publish_slots
from blockstep.spec.features.groups.kinds import (
    count_reserved_blocks,
)
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import (
    BlockTables,
    Plan,
    Status,
)

ALIGNED = Config(32, 4, max_num_batched_tokens=8, max_model_len=64, groups=(full(4), recurrent(4)))


def tables(oracle: Oracle, name: str = "A") -> BlockTables:
    return oracle.state.requests[name].block_tables


def step(oracle: Oracle, drafts: tuple[int, ...] = (), num_accepted: int = 0) -> Plan:
    """Plan a step and commit it: rows sample 7 after `num_accepted` accepted drafts."""
    if drafts:
        oracle.propose(dict.fromkeys(oracle.state.running, drafts))
    plan = oracle.schedule()
    if plan.rows:
        (frame,) = oracle.state.frames
        sampled = {
            row.request_id: [*row.draft_token_ids[:num_accepted], 7] * row.samples
            for row in frame.rows
        }
        oracle.commit(plan, sampled)
    assert get_broken_invariants(oracle.state) == ()
    return plan


def sizes(plan: Plan) -> dict[str, int]:
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}


def drafting(num_drafts: int) -> Config:
    """Return `ALIGNED` with `num_drafts` drafts a step and a state block for each."""
    return replace(
        ALIGNED,
        groups=(full(4), recurrent(4, ALIGN, num_drafts)),
        spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=num_drafts,
    )


class TestAligned:
    """Full attention and a recurrent group in blocks of 4 tokens, 8 tokens a step."""

    def test_a_prompt_progresses_with_a_threshold_below_the_block_size(self) -> None:
        oracle = Oracle(replace(ALIGNED, long_prefill_token_threshold=2))
        oracle.submit(Request("A", tuple(range(9)), max_tokens=2))
        assert [sizes(step(oracle)) for _ in range(6)] == [{"A": n} for n in (2, 2, 2, 2, 1, 1)]

    def test_a_state_can_be_hit_in_the_step_after_it_was_written(self) -> None:
        """B computes the state again, since it cannot be shared in the same step."""
        oracle = Oracle(replace(ALIGNED, max_num_batched_tokens=16))
        oracle.submit(Request("A", tuple(range(6)), max_tokens=3))
        oracle.submit(Request("B", tuple(range(6)), max_tokens=3))
        assert [row.num_computed_tokens for row in step(oracle).new] == [0, 0]
        oracle.submit(Request("C", tuple(range(6)), max_tokens=3))
        assert [row.num_computed_tokens for row in step(oracle).new] == [4]

    def test_blocks_of_rejected_drafts_are_used_by_the_next_step(self) -> None:
        oracle = Oracle(drafting(2))
        oracle.submit(Request("A", (1, 2), max_tokens=20))
        step(oracle)
        step(oracle, (7, 7))
        before = tables(oracle)
        assert len(before[1]) == 4
        step(oracle)
        assert tables(oracle) == before


def test_mode_all_keeps_the_state_at_every_block_boundary() -> None:
    config = replace(ALIGNED, groups=(full(4), recurrent(4, ALL)), max_num_batched_tokens=10)
    oracle = Oracle(config)
    oracle.submit(Request("A", tuple(range(19)), max_tokens=3))
    assert sizes(step(oracle)) == {"A": 10}
    assert tables(oracle)[1] == (4, 5, 6)
    assert sizes(step(oracle)) == {"A": 9}
    assert tables(oracle)[1] == (0, 0, 6, 9, 10)
    oracle.submit(Request("B", tuple(range(10)), max_tokens=1))
    plan = step(oracle)
    assert plan.new[0].num_computed_tokens == 8
    assert plan.new[0].block_ids[1][:2] == (0, 5)


def test_new_blocks_of_attention_are_zeroed_by_group_in_the_order_of_the_rows() -> None:
    groups = (full(4), recurrent(4), window(4, 3), chunks(4, 8))
    config = replace(ALIGNED, groups=groups, max_num_batched_tokens=16)
    oracle = Oracle(config)
    oracle.submit(Request("A", (1, 2, 3, 4, 5), max_tokens=4))
    assert step(oracle).new_block_ids_to_zero == (1, 3, 4)
    assert step(oracle).new_block_ids_to_zero == (5, 7, 8)
    oracle.submit(Request("B", (1, 2, 3, 4, 9, 9), max_tokens=4))
    oracle.submit(Request("C", (8,), max_tokens=4))
    plan = step(oracle)
    assert [row.num_computed_tokens for row in plan.new] == [4, 0]
    b, c = (row.block_ids for row in plan.new)
    assert plan.new_block_ids_to_zero == (b[0][1], c[0][0], b[2][1], c[2][0], b[3][1], c[3][0])
    assert Oracle(replace(config, groups=(full(4), window(4, 3)))).schedule() == Plan(0)


def test_blocks_that_a_session_kept_are_not_zeroed() -> None:
    oracle = Oracle(ALIGNED)
    oracle.submit(Request("A", tuple(range(8)), max_tokens=1, resumable=True))
    for _ in range(3):
        step(oracle)
    kept = tables(oracle)[0]
    assert len(kept) == 2
    oracle.update(Request("A", (7, 8, 9), max_tokens=2, resumable=True))
    plan = step(oracle)
    assert plan.new_block_ids_to_zero == tables(oracle)[0][2:] != ()


def test_the_gate_reserves_state_blocks_for_drafts() -> None:
    pool = create_pool(32)
    for group, num_blocks in (
        (recurrent(64, NONE, 2), 1 + 2),
        (recurrent(4, ALL, 2), 2 + 2),
        (recurrent(4, ALIGN, 2), 2 + 2),
    ):
        config = replace(ALIGNED, groups=(group,))
        assert count_reserved_blocks(config, pool, group, 5, (), Holding()) == num_blocks


@pytest.mark.parametrize("table", [(4, 0, 5, 6), (0, 4, 0, 5), (0, 0, 4, 5), (4, 5, 0, 6)])
def test_each_state_is_found_by_its_own_key(
    table: tuple[int, ...],
) -> None:
    config = Config(16, 1, groups=(full(1), recurrent(1)))
    request = RequestState(Request("A", (1, 2, 3, 4)), Status.RUNNING)
    keys = extend_block_keys(request, 1, STRICT_RULES)
    holdings = (Holding((1, 2, 3, 7), 4), Holding(table, 0))
    request = replace(request, holdings=holdings, block_keys=keys)
    pool, request = publish_slots(config, create_pool(16), request, [4, 4])
    named = get_group_keys(keys, 1, 1, 0, 4)
    found = tuple([find_block(pool, key) or 0 for key in named])
    assert found == table
    assert request.holdings[1].num_cached_blocks == 4
