"""Quirks of transfers: each acts where its profile switches it on, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groups_support import ALL, full, recurrent

from blockstep.spec import Config, Oracle, Plan, Request
from blockstep.spec.profiles import Profile, Quirk
from blockstep.spec.releases.transfers import compute_num_loaded
from blockstep.spec.vocabulary import (
    FinishReason,
    GroupKind,
    KVGroup,
    KVLoadFailurePolicy,
    KVTransfers,
    Outputs,
    RequestId,
    SpecMethod,
    Status,
)

CONFIG = Config(num_blocks=9, block_size=2, max_model_len=12, kv_connector=True)
RECOMPUTE = replace(CONFIG, kv_load_failure_policy=KVLoadFailurePolicy.RECOMPUTE)
A = Request("A", (1, 2, 3, 4, 5), max_tokens=2)
PARKED = Status.WAITING_FOR_REMOTE_KVS
both = pytest.mark.parametrize("quirk", [False, True])


def create(config: Config, *quirks: Quirk) -> Oracle:
    return Oracle(config, Profile("some", frozenset(quirks)))


def park(oracle: Oracle, request: Request, num_tokens: int) -> Plan:
    """A step in which a load of so many tokens begins."""
    oracle.submit(request)
    oracle.offer_kv(request.request_id, num_tokens, is_async=True)
    plan = oracle.schedule()
    assert oracle.state.requests[request.request_id].status is PARKED
    return plan


def answer(oracle: Oracle, plan: Plan, *invalid: int) -> Outputs:
    """The answer to a plan: whoever samples samples 7."""
    sampled = {row.request_id: (7,) for row in oracle.state.frames[0].rows if row.samples}
    return oracle.commit(plan, sampled, KVTransfers(invalid_block_ids=invalid))


def rows_of(plan: Plan) -> dict[RequestId, tuple[int, int]]:
    """Per request: its computed tokens, and those of its row."""
    return {
        row.request_id: (row.num_computed_tokens, row.num_scheduled_tokens) for row in plan.rows
    }


def is_findable(oracle: Oracle, block_id: int) -> bool:
    return oracle.state.pool.block_keys[block_id] is not None


@both
def test_skip_cache_still_loads(quirk: bool) -> None:
    oracle = create(CONFIG, *[Quirk.SKIP_CACHE_STILL_LOADS] * quirk)
    oracle.submit(replace(A, skip_reading_prefix_cache=True))
    oracle.offer_kv("A", 2)
    assert rows_of(oracle.schedule()) == {"A": (2, 3) if quirk else (0, 5)}
    stats = oracle.snapshot().stats
    counted = (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits)
    assert counted == ((5, 2) if quirk else (0, 0))


@both
def test_skip_cache_counts_as_a_store_miss(quirk: bool) -> None:
    oracle = create(CONFIG, *[Quirk.SKIP_CACHE_COUNTS_AS_A_STORE_MISS] * quirk)
    oracle.submit(replace(A, skip_reading_prefix_cache=True))
    oracle.offer_kv("A", 2)
    assert rows_of(oracle.schedule()) == {"A": (0, 5)}, "nothing of it is loaded"
    stats = oracle.snapshot().stats
    counted = (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits)
    assert counted == ((5, 0) if quirk else (0, 0))


@both
def test_loaded_request_waits_behind_the_head(quirk: bool) -> None:
    """P10, upstream #57841: the head lacks the blocks of one whose load has come."""
    config = replace(CONFIG, num_blocks=6)
    quirks = [Quirk.LOADED_REQUEST_WAITS_BEHIND_THE_HEAD, Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS]
    oracle = create(config, *(quirks if quirk else quirks[1:]))
    oracle.submit(Request("B", (6,) * 9, max_tokens=1))
    oracle.offer_kv("B", None)
    oracle.schedule()
    park(oracle, Request("A", (1, 2, 3), max_tokens=1), 2)
    oracle.offer_kv("B", 0)
    oracle.report(finished_recving=["A"])
    assert rows_of(oracle.schedule()) == ({} if quirk else {"A": (2, 1)})


@both
def test_loaded_request_keeps_its_blocks(quirk: bool) -> None:
    """P10: two of whom each lacks what the other holds."""
    config = replace(CONFIG, num_blocks=5, scheduler_reserve_full_isl=False)
    oracle = create(config, *[Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS] * quirk)
    park(oracle, A, 4)
    park(oracle, replace(A, request_id="B", prompt_token_ids=(6,) * 5), 4)
    oracle.report(finished_recving=["A", "B"])
    assert len(rows_of(oracle.schedule())) == (0 if quirk else 1)


@both
def test_external_blocks_per_group(quirk: bool) -> None:
    """Upstream #33775: the first group's load takes a block of the second group's hit."""
    groups = (KVGroup(GroupKind.FULL, 2), KVGroup(GroupKind.FULL, 2))
    config = replace(CONFIG, num_blocks=13, groups=groups)
    oracle = create(config, *[Quirk.EXTERNAL_BLOCKS_PER_GROUP] * quirk)
    for request in (Request("A", (1, 2, 3), max_tokens=1), Request("C", (9,) * 8, max_tokens=1)):
        oracle.submit(request)
        answer(oracle, oracle.schedule())
    assert oracle.state.pool.free_queue[:4] == (2, 1, 4, 3), "1 and 3 are the hit"
    oracle.submit(Request("B", (1, 2, 3, 4, 5, 6, 7, 8, 9), max_tokens=1))
    oracle.offer_kv("B", 8)
    assert rows_of(oracle.schedule()) == {"B": (8, 1)}
    first, second = oracle.state.requests["B"].block_tables
    assert (first[0], second[0]) == (1, 3)
    assert set(first).intersection(second) == ({3} if quirk else set())


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        (KVLoadFailurePolicy.RECOMPUTE, {"A": (0, 5), "B": (4, 1)}),
        (KVLoadFailurePolicy.FAIL, {}),
    ],
)
def test_only_the_first_of_those_that_share_a_block_goes_back(
    policy: KVLoadFailurePolicy, rows: dict[RequestId, tuple[int, int]]
) -> None:
    """P19, upstream #49250: B has A's blocks, and goes on behind them at once."""
    config = replace(CONFIG, kv_load_failure_policy=policy)
    oracle = create(
        config,
        Quirk.LOADS_ARE_PUBLISHED_BEFORE_THEY_ARE_LOADED,
        Quirk.INVALID_BLOCK_ROLLS_BACK_ONE_REQUEST,
    )
    oracle.submit(A)
    oracle.offer_kv("A", 4)
    oracle.submit(replace(A, request_id="B"))
    outputs = answer(oracle, oracle.schedule(), 1)
    ended = [FinishReason.ERROR, FinishReason.ERROR] if not rows else []
    assert [row.finish_reason for row in outputs.rows] == ended
    assert rows_of(oracle.schedule()) == rows
    assert is_findable(oracle, 1) is bool(rows), "what is there to be computed can be found"


def test_a_request_that_goes_back_keeps_what_frames_promise_and_deliver() -> None:
    """P12, P13: of two frames the first is not heard, and its promise stays."""
    config = replace(RECOMPUTE, max_frames_in_flight=2, async_scheduling=True)
    oracle = create(
        config,
        Quirk.LOADS_ARE_PUBLISHED_BEFORE_THEY_ARE_LOADED,
        Quirk.INVALID_BLOCK_ROLLS_BACK_ONE_REQUEST,
    )
    oracle.submit(replace(A, max_tokens=5))
    oracle.offer_kv("A", 4)
    first, second = oracle.schedule(), oracle.schedule()
    assert answer(oracle, first, 2).rows == ()
    request = oracle.state.requests["A"]
    assert (request.num_computed_tokens, request.num_output_placeholders) == (2, 2)
    (row,) = answer(oracle, second).rows
    assert row.new_token_ids == (7,)


@both
def test_failed_request_reports_minus_one_cached_tokens(quirk: bool) -> None:
    oracle = create(CONFIG, *[Quirk.FAILED_REQUEST_REPORTS_MINUS_ONE_CACHED_TOKENS] * quirk)
    park(oracle, A, 4)
    (row,) = oracle.report(invalid_block_ids=[1]).rows
    assert row.num_cached_tokens == (-1 if quirk else 0)


@both
def test_first_transfer_frees_the_blocks(quirk: bool) -> None:
    """P17: the load still writes to the blocks of a request that has ended."""
    oracle = create(CONFIG, *[Quirk.FIRST_TRANSFER_FREES_THE_BLOCKS] * quirk)
    oracle.submit(A)
    oracle.offer_kv("A", 4, is_async=True, delays_free=True)
    oracle.schedule()
    oracle.abort("A")
    oracle.report(finished_sending=["A"])
    assert oracle.num_free_blocks == (8 if quirk else 6)
    oracle.report(finished_recving=["A"])
    assert oracle.num_free_blocks == 8


@both
def test_a_window_is_left_before_the_rest_of_a_request_that_ends(quirk: bool) -> None:
    """The last block is the one that is attended to: it is queued behind those before it."""
    config = replace(CONFIG, groups=(KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=2),))
    oracle = create(config, *[Quirk.FINISHED_REQUEST_FIRST_FREES_BLOCKS_OUTSIDE_WINDOWS] * quirk)
    oracle.submit(replace(A, max_tokens=1))
    oracle.offer_kv("A", 0, delays_free=True)
    answer(oracle, oracle.schedule())
    (held,) = oracle.snapshot().transfers.held  # type: ignore[union-attr]
    assert held.block_tables == (((0, 0, 3),) if quirk else ((1, 2, 3),))
    oracle.report(finished_sending=["A"])
    assert oracle.state.pool.free_queue[-3:] == ((2, 1, 3) if quirk else (3, 2, 1))


@both
def test_what_a_load_writes_may_be_left_with_the_window(quirk: bool) -> None:
    """P17: the first token is loaded, and the window behind a prompt of three has left it."""
    config = replace(
        CONFIG, block_size=1, groups=(KVGroup(GroupKind.SLIDING_WINDOW, 1, sliding_window=2),)
    )
    oracle = create(config, *[Quirk.FINISHED_REQUEST_FIRST_FREES_BLOCKS_OUTSIDE_WINDOWS] * quirk)
    (load,) = park(oracle, Request("A", (1, 2, 3), max_tokens=2), 1).kv_loads
    assert load.block_ids == ((1,),)
    oracle.abort("A")
    assert (1 in oracle.state.pool.free_queue) is quirk
    oracle.report(finished_recving=["A"])
    assert oracle.num_free_blocks == 8


@both
def test_what_is_answered_is_left_first_and_what_is_in_flight_stays(quirk: bool) -> None:
    config = replace(CONFIG, groups=(KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=2),))
    quirks = {Quirk.FINISHED_REQUEST_FIRST_FREES_COMMITTED_BLOCKS, Quirk.WINDOW_WAITS_FOR_COMMITS}
    for is_answered in (True, False):
        oracle = create(config, *quirks if quirk else ())
        oracle.submit(replace(A, max_tokens=2))
        oracle.offer_kv("A", 0, delays_free=True)
        plan = oracle.schedule()
        if is_answered:
            answer(oracle, plan)
        oracle.abort("A")
        (held,) = oracle.snapshot().transfers.held  # type: ignore[union-attr]
        assert held.block_tables == (((0, 0, 3),) if quirk and is_answered else ((1, 2, 3),))


def test_a_request_that_asks_again_gets_what_is_offered_then() -> None:
    oracle = create(RECOMPUTE, Quirk.CACHED_TOKENS_AS_THE_STORE_OFFERED)
    park(oracle, A, 4)
    oracle.offer_kv("A", 2)
    oracle.report(finished_recving=["A"], invalid_block_ids=[1])
    (row,) = answer(oracle, oracle.schedule()).rows
    assert row.num_cached_tokens == 2


NARROW = replace(
    CONFIG, block_size=1, enable_prefix_caching=False,
    groups=(KVGroup(GroupKind.SLIDING_WINDOW, 1, sliding_window=1),),
)  # fmt: skip
"""Of what is loaded behind its hit nothing is attended to."""


@both
def test_skipped_load_blocks_count_as_cached(quirk: bool) -> None:
    oracle = create(NARROW, *[Quirk.SKIPPED_LOAD_BLOCKS_COUNT_AS_CACHED] * quirk)
    park(oracle, Request("A", (1, 2), max_tokens=2), 1)
    (request,) = oracle.snapshot().requests
    assert request.block_tables == ((0,),)
    assert request.num_cached_blocks == (int(quirk),)


@both
def test_reset_ignores_transfers_without_blocks(quirk: bool) -> None:
    oracle = create(NARROW, *[Quirk.RESET_IGNORES_TRANSFERS_WITHOUT_BLOCKS] * quirk)
    park(oracle, Request("A", (1, 2), max_tokens=2), 1)
    assert oracle.num_free_blocks == 8
    assert oracle.reset() is quirk
    oracle.submit(Request("B", (3,), max_tokens=2))
    answer(oracle, oracle.schedule())
    assert not oracle.reset(), "a block is held"


def test_a_request_loaded_for_ever_keeps_its_null_blocks_as_they_are() -> None:
    oracle = create(NARROW, Quirk.LAST_TOKEN_IS_LOADED)
    park(oracle, Request("A", (1,), max_tokens=2), 1)
    for _ in range(3):
        oracle.report(finished_recving=["A"])
        (load,) = oracle.schedule().kv_loads
        assert load.block_ids == ((0,),)
    assert oracle.state.requests["A"].block_tables == ((0,),)


def test_a_group_that_skips_all_that_is_loaded_takes_no_block_for_it() -> None:
    """Upstream takes those of its window with what is computed: behind the other group's."""
    groups = (KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=1), KVGroup(GroupKind.FULL, 2))
    oracle = create(replace(CONFIG, groups=groups), Quirk.EXTERNAL_BLOCKS_PER_GROUP)
    oracle.submit(Request("A", (1, 2, 3, 4), max_tokens=1))
    oracle.offer_kv("A", 3)
    oracle.schedule()
    assert oracle.state.requests["A"].block_tables == ((0, 3), (1, 2))


def test_a_hit_that_is_longer_than_the_load_takes_no_block_for_it() -> None:
    """The second full group is not cut to the window's hit of a token, and has found four blocks;
    of two tokens a store loads one. 0.19.1 asks its pool for -2 blocks, the specification for 0."""
    groups = (
        KVGroup(GroupKind.FULL, 1),
        KVGroup(GroupKind.SLIDING_WINDOW, 1, sliding_window=2),
        KVGroup(GroupKind.FULL, 2),
    )
    assert [compute_num_loaded(group, 2, 4) for group in groups] == [0, 0, 0]
    assert [compute_num_loaded(group, 4, 1) for group in groups] == [3, 3, 1]
    assert compute_num_loaded(groups[0], 4, 4) == 0


@both
def test_a_pool_forgets_though_there_is_no_store(quirk: bool) -> None:
    config = replace(CONFIG, kv_connector=False)
    oracle = create(config, *[Quirk.POOL_AND_STORE_RESET_SEPARATELY] * quirk)
    oracle.submit(A)
    answer(oracle, oracle.schedule())
    oracle.abort("A")
    assert not oracle.reset(reset_connector=True)
    assert is_findable(oracle, 1) is not quirk


@both
@pytest.mark.parametrize("others", [(), (Quirk.POOL_AND_STORE_RESET_SEPARATELY,)], ids=len)
def test_a_reset_of_a_store_succeeds_without_one(quirk: bool, others: tuple[Quirk, ...]) -> None:
    """Alone, and in a release that also resets the pool without a store, but tells a failure."""
    quirks = (*others, *[Quirk.RESET_WITHOUT_A_STORE_SUCCEEDS] * quirk)
    oracle = create(replace(CONFIG, kv_connector=False), *quirks)
    oracle.submit(A)
    answer(oracle, oracle.schedule())
    assert not oracle.reset(reset_connector=True), "a block is held"
    oracle.abort("A")
    assert oracle.reset(reset_connector=True) is quirk
    assert is_findable(oracle, 1) is not (quirk or bool(others))


def test_a_request_back_at_nothing_has_no_rejected_draft_to_take_back() -> None:
    """A later frame, which is heard all the same, rejects its draft."""
    config = replace(
        RECOMPUTE, max_frames_in_flight=2, async_scheduling=True,
        spec_method=SpecMethod.NGRAM, num_speculative_tokens=1,
    )  # fmt: skip
    oracle = create(
        config,
        Quirk.LOADS_ARE_PUBLISHED_BEFORE_THEY_ARE_LOADED,
        Quirk.INVALID_BLOCK_ROLLS_BACK_ONE_REQUEST,
    )
    oracle.submit(replace(A, max_tokens=5))
    oracle.offer_kv("A", 4)
    first, second = oracle.schedule(), oracle.schedule()
    assert second.rows[0].num_scheduled_tokens == 2
    answer(oracle, first, 1)
    answer(oracle, second)
    assert oracle.state.requests["A"].num_computed_tokens == 0


@both
def test_the_last_token_is_not_loaded_beside_states(quirk: bool) -> None:
    config = replace(CONFIG, groups=(full(2), recurrent(2)))
    oracle = create(config, *[Quirk.LAST_TOKEN_IS_LOADED] * quirk)
    oracle.submit(Request("A", (1, 2, 3, 4)))
    oracle.offer_kv("A", 4, is_async=True)
    assert not oracle.schedule().kv_loads


def test_a_return_reports_what_is_cached_though_states_have_blocks_for_drafts() -> None:
    """Those stand behind what was loaded, of which nothing has failed."""
    config = replace(
        CONFIG, num_blocks=10, groups=(recurrent(2, ALL, 1), full(2)),
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    oracle = create(config, Quirk.LOAD_ENDS_WITHOUT_ADMISSION)
    park(oracle, Request("A", tuple(range(7)), max_tokens=1), 2)
    oracle.submit(Request("B", (9, 9, 9), max_tokens=3))
    answer(oracle, oracle.schedule())
    oracle.report(finished_recving=["A"])
    oracle.schedule()
    assert oracle.state.requests["A"].status is not Status.RUNNING
    assert oracle.state.requests["A"].num_cached_tokens == 2
