"""Recurrent groups, by hand: where chunks end, what is held and zeroed, which states are hit."""

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
    compute_max_doubt,
    compute_max_held_blocks,
    count_reserved_blocks,
)
from blockstep.spec.features.mamba import (
    compute_aligned_end,
    compute_num_new_states,
    compute_num_state_blocks,
    get_aligned_share,
    get_extended_states,
)
from blockstep.spec.invariants import get_broken_invariants
from blockstep.spec.vocabulary import (
    Ack,
    BlockTables,
    KVGroup,
    Plan,
    RejectCode,
    Rejected,
    Status,
    Submit,
)

ALIGNED = Config(32, 4, max_num_batched_tokens=8, max_model_len=64, groups=(full(4), recurrent(4)))


def tables(oracle: Oracle, name: str = "A") -> BlockTables:
    return oracle.state.requests[name].block_tables


def step(oracle: Oracle, drafts: tuple[int, ...] = (), num_accepted: int = 0) -> Plan:
    """One step, committed: who samples, samples 7 behind so many accepted drafts."""
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
    """`ALIGNED` with so many drafts a step, and a block of states for each."""
    return replace(
        ALIGNED,
        groups=(full(4), recurrent(4, ALIGN, num_drafts)),
        spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=num_drafts,
    )


class TestAligned:
    """Full attention and states, in blocks of four tokens; eight tokens a step."""

    def test_chunks_end_with_blocks_and_the_last_boundary_is_no_exception(self) -> None:
        oracle = Oracle(ALIGNED)
        oracle.submit(Request("A", tuple(range(19)), max_tokens=9))
        assert [sizes(step(oracle)) for _ in range(5)] == [{"A": n} for n in (8, 8, 3, 1, 1)]

    def test_a_chunk_takes_one_block_and_leaves_that_of_the_chunk_before_it(self) -> None:
        oracle = Oracle(ALIGNED)
        oracle.submit(Request("A", tuple(range(19)), max_tokens=9))
        told = []
        for _ in range(4):
            plan = step(oracle)
            blocks = plan.new[0].block_ids if plan.new else plan.cached[0].new_block_ids
            told.append((blocks[1], tables(oracle)[1]))
        assert told == [
            ((0, 3), (0, 3)),
            ((0, 6), (0, 3, 0, 6)),
            ((8,), (0, 0, 0, 6, 8)),
            ((), (0, 0, 0, 0, 8)),
        ]
        assert oracle.state.requests["A"].holdings[1].num_cached_blocks == 5

    @pytest.mark.parametrize(
        ("num_tokens", "table"),
        [(19, (0, 0, 0, 6)), (17, (0, 0, 0, 6)), (16, (0, 3)), (12, (0, 3)), (9, (0, 3)), (8, ())],
    )
    def test_states_are_hit_at_the_ends_of_chunks_only(
        self, num_tokens: int, table: tuple[int, ...]
    ) -> None:
        oracle = Oracle(ALIGNED)
        oracle.submit(Request("A", tuple(range(19)), max_tokens=1))
        for _ in range(3):
            step(oracle)
        oracle.submit(Request("B", tuple(range(num_tokens)), max_tokens=1))
        (row,) = oracle.schedule().new
        assert row.num_computed_tokens == 4 * len(table)
        assert row.block_ids[1][: len(table)] == table

    def test_less_than_a_block_goes_on_and_ends_with_the_block(self) -> None:
        """A budget of three never rounds to nothing, nor does what a decode leaves of four."""
        oracle = Oracle(replace(ALIGNED, max_num_batched_tokens=3))
        oracle.submit(Request("A", tuple(range(11)), max_tokens=2))
        assert [sizes(step(oracle)) for _ in range(5)] == [{"A": n} for n in (3, 1, 3, 1, 3)]
        oracle = Oracle(replace(ALIGNED, max_num_batched_tokens=4))
        oracle.submit(Request("A", (1, 2), max_tokens=9))
        step(oracle)
        oracle.submit(Request("B", tuple(range(9)), max_tokens=2))
        assert [sizes(step(oracle)) for _ in range(3)] == [
            {"A": 1, "B": 3}, {"A": 1, "B": 1}, {"A": 1, "B": 3}
        ]  # fmt: skip

    def test_a_threshold_below_a_block_goes_on_too(self) -> None:
        oracle = Oracle(replace(ALIGNED, long_prefill_token_threshold=2))
        oracle.submit(Request("A", tuple(range(9)), max_tokens=2))
        assert [sizes(step(oracle)) for _ in range(6)] == [{"A": n} for n in (2, 2, 2, 2, 1, 1)]

    def test_what_a_step_writes_can_be_hit_in_the_next(self) -> None:
        """In the same step attention could share, and a state not: the twin computes it again."""
        oracle = Oracle(replace(ALIGNED, max_num_batched_tokens=16))
        oracle.submit(Request("A", tuple(range(6)), max_tokens=3))
        oracle.submit(Request("B", tuple(range(6)), max_tokens=3))
        assert [row.num_computed_tokens for row in step(oracle).new] == [0, 0]
        oracle.submit(Request("C", tuple(range(6)), max_tokens=3))
        assert [row.num_computed_tokens for row in step(oracle).new] == [4]

    def test_nor_can_what_the_next_chunk_of_another_writes_in_this_step(self) -> None:
        config = replace(ALIGNED, max_num_batched_tokens=16, long_prefill_token_threshold=8)
        oracle = Oracle(config)
        oracle.submit(Request("A", tuple(range(19)), max_tokens=3))
        assert sizes(step(oracle)) == {"A": 8}
        oracle.submit(Request("B", tuple(range(19)), max_tokens=3))
        plan = step(oracle)
        assert sizes(plan) == {"A": 8, "B": 8}
        assert [row.num_computed_tokens for row in plan.new] == [8]

    def test_a_frame_in_flight_has_written_its_states_when_the_next_one_runs(self) -> None:
        oracle = Oracle(replace(ALIGNED, max_frames_in_flight=2))
        oracle.submit(Request("A", tuple(range(6)), max_tokens=3))
        oracle.schedule()
        oracle.abort("A")
        oracle.submit(Request("B", tuple(range(6)), max_tokens=3))
        assert [row.num_computed_tokens for row in oracle.schedule().new] == [4]

    def test_the_last_boundary_leaves_a_draft_head_its_block(self) -> None:
        config = replace(
            ALIGNED,
            groups=(full(4), recurrent(4, ALIGN, 1)),
            spec_method=SpecMethod.EAGLE,
            num_speculative_tokens=1,
            max_num_batched_tokens=64,
        )
        oracle = Oracle(config)
        oracle.submit(Request("A", tuple(range(14)), max_tokens=1))
        assert [sizes(step(oracle)) for _ in range(2)] == [{"A": 8}, {"A": 6}]
        oracle.submit(Request("B", tuple(range(14)), max_tokens=1))
        assert [row.num_computed_tokens for row in step(oracle).new] == [8]

    def test_a_boundary_among_accepted_drafts_is_found_before_its_block_is_left(self) -> None:
        oracle = Oracle(drafting(3))
        oracle.submit(Request("A", (1, 2), max_tokens=20))
        step(oracle)
        assert tables(oracle)[1] == (2, 3, 4, 5)
        step(oracle, (7, 7, 7), 3)
        assert tables(oracle)[1] == (2, 3, 4, 5, 7)
        assert oracle.state.requests["A"].num_computed_tokens == 6
        plan = step(oracle)
        assert plan.cached[0].new_block_ids == ((), ())
        assert oracle.state.requests["A"].holdings[1].num_cached_blocks == 1
        assert oracle.state.pool.block_keys[2] is not None

    def test_rejected_drafts_leave_more_than_enough(self) -> None:
        oracle = Oracle(drafting(2))
        oracle.submit(Request("A", (1, 2), max_tokens=20))
        step(oracle)
        step(oracle, (7, 7))
        before = tables(oracle)
        assert len(before[1]) == 4
        step(oracle)
        assert tables(oracle) == before


def test_all_boundaries_of_a_chunk_have_their_states() -> None:
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


def test_without_caching_one_state_is_written_over() -> None:
    groups = (full(4), recurrent(64, NONE, 2))
    config = replace(
        ALIGNED,
        groups=groups,
        enable_prefix_caching=False,
        spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=2,
    )
    oracle = Oracle(config)
    oracle.submit(Request("A", tuple(range(19)), max_tokens=9))
    for _ in range(5):
        step(oracle)
        assert tables(oracle)[1] == (3, 4, 5)


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


def test_what_a_session_has_kept_is_not_zeroed_when_it_goes_on() -> None:
    oracle = Oracle(ALIGNED)
    oracle.submit(Request("A", tuple(range(8)), max_tokens=1, resumable=True))
    for _ in range(3):
        step(oracle)
    kept = tables(oracle)[0]
    assert len(kept) == 2
    oracle.update(Request("A", (7, 8, 9), max_tokens=2, resumable=True))
    plan = step(oracle)
    assert plan.new_block_ids_to_zero == tables(oracle)[0][2:] != ()


@pytest.mark.parametrize(
    ("start", "end", "last", "unit", "sizes", "expected"),
    [
        (0, 19, 16, 4, (4,), 16),
        (0, 15, 16, 4, (4,), 12),
        (0, 16, 16, 4, (4,), 16),
        (16, 19, 16, 4, (4,), 19),
        (0, 3, 16, 4, (4,), 3),
        (3, 9, 16, 4, (4,), 4),
        (3, 4, 16, 4, (4,), 4),
        (18, 23, 16, 4, (4,), 20),
        (1, 9, 12, 12, (4, 6), 4),
        (4, 12, 12, 12, (4, 6), 6),
        (12, 20, 36, 12, (4, 6), 20),
        (0, 5, 0, 4, (4,), 5),
    ],
)
def test_where_a_chunk_ends(
    start: int, end: int, last: int, unit: int, sizes: tuple[int, ...], expected: int
) -> None:
    assert compute_aligned_end(start, end, last, unit, sizes) == expected


def test_blocks_of_drafts_move_behind_the_state_that_is_written() -> None:
    group = recurrent(4, ALIGN, 2)
    assert compute_num_new_states(group, 4, 3, 0) == 1
    assert get_extended_states(group, (7, 8, 9), True, 4, (5,)) == (7, 8, 9, 5)
    assert get_extended_states(group, (7, 8, 9), True, 5, (5,)) == (7, 0, 9, 8, 5)
    assert get_extended_states(group, (7, 8, 9), True, 6, (5,)) == (7, 0, 0, 8, 9, 5)
    assert get_extended_states(group, (7, 8, 9), True, 7, (5,)) == (7, 0, 0, 0, 8, 9, 5)
    assert get_extended_states(group, (0, 7), False, 6, (1, 2, 3)) == (0, 7, 0, 1, 2, 3)
    assert get_extended_states(group, (7, 8, 9), True, 3, ()) == (7, 8, 9)


def test_a_request_is_charged_what_it_holds_of_states() -> None:
    doubt = compute_max_doubt(replace(ALIGNED, max_frames_in_flight=3))
    assert doubt == 0
    drafts = replace(
        ALIGNED,
        spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=3,
        max_frames_in_flight=3,
        async_scheduling=True,
    )
    assert compute_max_doubt(drafts) == 6
    assert compute_max_held_blocks(recurrent(4), 60, 8) == 2
    assert compute_max_held_blocks(recurrent(4, ALIGN, 3), 60, 8) == 3 + 3
    assert compute_max_held_blocks(recurrent(4, ALIGN, 3), 60, 14, 6) == 4 + 3
    assert compute_max_held_blocks(recurrent(4, ALIGN, 3), 4, 8) == 1 + 3
    assert compute_max_held_blocks(recurrent(4, ALL), 60, 8) == 3
    assert compute_max_held_blocks(recurrent(4, ALL, 2), 60, 8) == 4 + 2
    assert compute_max_held_blocks(recurrent(64, NONE, 2), 60, 8) == 1 + 2


@pytest.mark.parametrize(
    ("group", "num_usable"),
    [
        (recurrent(32, NONE, 1), 2),
        (recurrent(2, ALL, 1), 5),
        (recurrent(2, ALIGN, 1), 4),
        (recurrent(4, ALIGN, 1), 3),
        (recurrent(2, ALIGN), 2),
    ],
)
def test_a_request_is_refused_whose_states_have_never_room(group: KVGroup, num_usable: int) -> None:
    for num_blocks, fits in ((num_usable + 1, True), (num_usable, False)):
        config = Config(
            num_blocks,
            group.block_size,
            max_num_batched_tokens=4,
            max_model_len=32,
            enable_prefix_caching=group.mamba_cache_mode is not NONE,
            groups=(group,),
        )
        answer = Oracle(config).apply(Submit(Request("A", tuple(range(25)), max_tokens=2)))
        assert answer == (Ack() if fits else Rejected(RejectCode.NEVER_FITS))


def test_a_group_of_states_is_charged_those_of_drafts_at_the_gate() -> None:
    pool = create_pool(32)
    for group, num_blocks in (
        (recurrent(64, NONE, 2), 1 + 2),
        (recurrent(4, ALL, 2), 2 + 2),
        (recurrent(4, ALIGN, 2), 2 + 2),
    ):
        config = replace(ALIGNED, groups=(group,))
        assert count_reserved_blocks(config, pool, group, 5, (), Holding()) == num_blocks


def test_lookahead_has_blocks_where_all_boundaries_are_kept() -> None:
    assert compute_num_state_blocks(recurrent(4, ALL, 2), 4, 6) == 2 + 2
    assert compute_num_state_blocks(recurrent(64, NONE, 2), 4, 6) == 1 + 2
    assert compute_num_state_blocks(recurrent(4, ALIGN, 2), 4, 6) == 1 + 2


def of_lengths(num_prompt: int, num_outputs: int) -> RequestState:
    request = RequestState(Request("A", (1,) * num_prompt, max_tokens=50), Status.RUNNING)
    return replace(request, output_token_ids=(7,) * num_outputs)


@pytest.mark.parametrize(
    ("num_prompt", "num_outputs", "num_computed", "num_new", "share"),
    [(19, 0, 0, 7, 4), (3, 12, 4, 7, 4), (3, 12, 12, 2, 2), (3, 12, 14, 1, 1), (9, 0, 8, 1, 1)],
)
def test_chunks_end_where_every_group_has_a_boundary_also_of_who_is_resumed(
    num_prompt: int, num_outputs: int, num_computed: int, num_new: int, share: int
) -> None:
    """Blocks of two tokens, states at every fourth."""
    config = replace(ALIGNED, block_size=2, groups=(full(2), recurrent(4)))
    request = of_lengths(num_prompt, num_outputs)
    assert get_aligned_share(config, request, num_computed, num_new) == share


def test_a_head_above_states_alone_drops_no_block_of_a_hit() -> None:
    config = replace(drafting(1), groups=(recurrent(4, ALIGN, 1),), spec_method=SpecMethod.EAGLE)
    assert get_aligned_share(config, of_lengths(8, 0), 0, 8) == 8


@pytest.mark.parametrize("table", [(4, 0, 5, 6), (0, 4, 0, 5), (0, 0, 4, 5), (4, 5, 0, 6)])
def test_each_state_is_found_by_its_own_key_whatever_stands_between(
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
