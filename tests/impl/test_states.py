"""Groups of recurrent layers on the host: where states are kept and hit, and what is zeroed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from groups_support import ALIGN, ALL, NONE, chunks, full, recurrent, window
from tests.impl.test_groups import AHEAD, EAGLE, hit_of, open_with

from blockstep.spec.vocabulary import (
    Ack,
    Drafts,
    KVGroup,
    Policy,
    RejectCode,
    Rejected,
    RowTokens,
    SpecMethod,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession

NGRAM: dict[str, Any] = {"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 1}


def tables_after(s: Any, num_steps: int, **tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The one table of request a after each of so many steps."""
    found = []
    for _ in range(num_steps):
        plan = s.plan()
        found.append(s.request("a").block_tables[0])
        s.commit(plan, **tokens)
    return found


def test_one_state_is_written_over_and_over(session: OpenSession) -> None:
    s = open_with(session, recurrent(32, NONE, 2), enable_prefix_caching=False)
    s.submit("a", range(20), max_tokens=9)
    assert tables_after(s, 2) == [(1, 2, 3)] * 2


def test_a_state_at_the_end_of_each_block_is_kept_until_it_has_been_read(
    session: OpenSession,
) -> None:
    s = open_with(session, recurrent(2, ALL), max_num_batched_tokens=3)
    s.submit("a", range(10), max_tokens=9)
    # 3 computed: the state is in the second block, the next step reads it there.
    assert tables_after(s, 3) == [(1, 2), (0, 2, 3), (0, 0, 3, 4, 5)]
    assert sorted(key.index for key in s.state().cached) == [0, 1, 2, 3]


def test_chunks_end_where_blocks_do_and_keep_one_state_each(session: OpenSession) -> None:
    s = open_with(session, recurrent(2), max_num_batched_tokens=5)
    s.submit("a", range(11), max_tokens=9)
    assert tables_after(s, 3) == [(0, 1), (0, 1, 0, 2), (0, 0, 0, 2, 3)]
    assert s.request("a").num_computed_tokens == 10
    assert sorted(key.index for key in s.state().cached) == [1, 3, 4]
    assert tables_after(s, 2, a=(7,)) == [(0, 0, 0, 0, 3, 4), (0, 0, 0, 0, 0, 4)]


def test_a_budget_below_a_block_is_used_and_the_block_ended_first(session: OpenSession) -> None:
    s = open_with(session, recurrent(4), max_num_batched_tokens=3)
    s.submit("a", range(9), max_tokens=9)
    seen = []
    for _ in range(5):
        plan = s.plan()
        seen.append(plan.total_num_scheduled_tokens)
        s.commit(plan, **({"a": (1,)} if s.request("a").num_computed_tokens == 9 else {}))
    assert seen == [3, 1, 3, 1, 1]


@pytest.mark.parametrize(
    ("groups", "extra", "ends"),
    [
        ((recurrent(2),), {}, [12, 13]),
        ((recurrent(2),), EAGLE, [12, 13]),
        ((recurrent(2, ALIGN, 1), full(2)), EAGLE, [10, 13]),
        ((recurrent(2), full(8)), {}, [8, 13]),
        ((recurrent(6), recurrent(4), full(2)), {}, [12, 13]),
    ],
)
def test_the_last_chunk_begins_at_the_last_state_that_can_be_hit(
    session: OpenSession, groups: tuple[KVGroup, ...], extra: dict[str, Any], ends: list[int]
) -> None:
    groups = tuple(
        g if g.kind is not recurrent(2).kind else recurrent(g.block_size, ALIGN, 1) for g in groups
    )
    s = open_with(session, *groups, num_blocks=60, max_num_batched_tokens=32, **extra)
    s.submit("a", range(13), max_tokens=9)
    seen = []
    for tokens in ((), (7,)):
        s.step(a=tokens)
        seen.append(s.request("a").num_computed_tokens)
    assert seen == ends


def test_spare_blocks_move_on_behind_the_state(session: OpenSession) -> None:
    s = open_with(session, recurrent(3, ALIGN, 2), max_num_batched_tokens=12, num_blocks=12)
    s.submit("a", range(14), max_tokens=9)
    # 12 tokens: the state in the fourth place. Two more begin the fifth, which a spare block takes.
    assert tables_after(s, 1) == [(0, 0, 0, 1, 2, 3)]
    assert tables_after(s, 1, a=(7,)) == [(0, 0, 0, 1, 2, 3, 4)]
    s = open_with(session, recurrent(3, ALIGN, 2), max_num_batched_tokens=3, num_blocks=12)
    s.submit("a", range(14), max_tokens=9)
    assert tables_after(s, 3) == [(1, 2, 3), (1, 2, 3, 4), (0, 2, 3, 4, 5)]
    s = open_with(session, recurrent(3, ALIGN, 2), max_num_batched_tokens=6, num_blocks=12)
    s.submit("a", range(14), max_tokens=9)
    # Of the two spare ones the first stands where nothing is kept: it goes behind the second.
    assert tables_after(s, 2) == [(0, 1, 2, 3), (0, 1, 0, 3, 2, 4)]


def test_a_state_is_hit_alone_and_by_no_row_of_the_step_that_writes_it(
    session: OpenSession,
) -> None:
    s = open_with(session, recurrent(2), full(2), num_blocks=40, max_num_batched_tokens=16)
    s.submit("a", range(8), max_tokens=9)
    s.submit("b", range(8), max_tokens=9)
    first, second = s.plan().new
    assert (first.num_computed_tokens, second.num_computed_tokens) == (0, 0)
    s = open_with(session, recurrent(2), full(2), num_blocks=40, max_num_batched_tokens=16)
    s.submit("a", range(9), max_tokens=1)
    s.step()
    s.step(a=(7,))
    hit, (states, blocks) = hit_of(s, "b", range(9))
    assert hit == 8
    assert states[:4] == (0, 0, 0, 1)
    assert 0 not in blocks


def test_drafts_that_may_be_rejected_keep_the_state_before_them(session: OpenSession) -> None:
    s = open_with(session, recurrent(2, ALIGN, 1), **NGRAM)
    s.submit("a", range(4), max_tokens=9)
    assert tables_after(s, 1, a=(1,)) == [(0, 1, 2)]
    s.apply(Drafts((RowTokens("a", (9,)),)))
    # The token and a draft fill the third block, the first spare one.
    assert tables_after(s, 1, a=(3,)) == [(0, 1, 2, 3)]
    assert s.request("a").num_computed_tokens == 5


@pytest.mark.parametrize("extra", [{}, AHEAD])
def test_what_attention_takes_beside_states_is_zeroed_group_by_group(
    session: OpenSession, extra: dict[str, Any]
) -> None:
    s = open_with(
        session, full(2), recurrent(2, ALL), chunks(2, 4), num_blocks=60,
        max_num_batched_tokens=16, **extra,
    )  # fmt: skip
    s.submit("a", range(6), max_tokens=9)
    s.submit("b", range(10, 14), max_tokens=9)
    plan = s.plan()
    assert plan.new_block_ids_to_zero == (1, 2, 3, 10, 11, 7, 8, 9, 14, 15)
    assert open_zeroed(session) == ()


def open_zeroed(session: OpenSession) -> tuple[int, ...]:
    """What is zeroed where no group has states."""
    s = open_with(session, full(2), window(2, 3))
    s.submit("a", range(6), max_tokens=9)
    zeroed: tuple[int, ...] = s.plan().new_block_ids_to_zero
    return zeroed


def test_who_is_preempted_in_the_step_has_nothing_zeroed(session: OpenSession) -> None:
    s = open_with(
        session, full(1), recurrent(1, ALL), num_blocks=12, max_num_batched_tokens=8,
        scheduler_reserve_full_isl=False, policy=Policy.PRIORITY,
    )  # fmt: skip
    s.submit("a", range(3), max_tokens=3, priority=1)
    s.step(a=(1,))
    s.submit("b", range(20, 22), max_tokens=3)
    s.step(a=(1,), b=(1,))
    plan = s.plan()
    assert plan.preempted_req_ids == ("a",)
    (row,) = plan.cached
    assert plan.new_block_ids_to_zero == row.new_block_ids[0]


@pytest.mark.parametrize(
    ("group", "num_usable"),
    [
        (recurrent(32, NONE, 1), 2), (recurrent(2, ALL, 1), 5), (recurrent(2, ALIGN, 1), 4),
        (recurrent(4, ALIGN, 1), 3), (recurrent(2, ALIGN), 2),
    ],
)  # fmt: skip
def test_states_are_charged_with_what_is_held_at_once(
    session: OpenSession, group: KVGroup, num_usable: int
) -> None:
    caching = group.mamba_cache_mode is not NONE
    for count, answer in ((num_usable, Ack()), (num_usable - 1, Rejected(RejectCode.NEVER_FITS))):
        s = open_with(
            session, group, num_blocks=count + 1, max_num_batched_tokens=4,
            enable_prefix_caching=caching,
        )  # fmt: skip
        assert s.submit("a", range(25), max_tokens=2) == answer


def test_a_state_that_a_frame_in_flight_has_written_is_hit(session: OpenSession) -> None:
    s = open_with(session, recurrent(4, ALL), num_blocks=12, **AHEAD)
    s.submit("a", range(3), max_tokens=9)
    first = s.plan()
    s.plan()  # runs the fourth token, which nobody knows yet
    s.commit(first, a=(7,))
    # Only now has the block a name; its state is of the frame before, and not of this step.
    assert hit_of(s, "b", (0, 1, 2, 7, 9))[0] == 4
