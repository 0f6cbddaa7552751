"""Quirks of transfers: each changes the behavior only where its profile turns it on."""

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
LOADING = Status.WAITING_FOR_REMOTE_KVS
both = pytest.mark.parametrize("quirk", [False, True])


def create(config: Config, *quirks: Quirk) -> Oracle:
    return Oracle(config, Profile("some", frozenset(quirks)))


def begin_load(oracle: Oracle, request: Request, num_tokens: int) -> Plan:
    """Plan a step in which an asynchronous load of `num_tokens` tokens starts."""
    oracle.submit(request)
    oracle.offer_kv(request.request_id, num_tokens, is_async=True)
    plan = oracle.schedule()
    assert oracle.state.requests[request.request_id].status is LOADING
    return plan


def answer(oracle: Oracle, plan: Plan, *invalid: int) -> Outputs:
    """Commit the oldest frame: every row that samples samples 7."""
    sampled = {row.request_id: (7,) for row in oracle.state.frames[0].rows if row.samples}
    return oracle.commit(plan, sampled, KVTransfers(invalid_block_ids=invalid))


def rows_of(plan: Plan) -> dict[RequestId, tuple[int, int]]:
    """Return, by request, its computed tokens and the scheduled tokens of its row."""
    return {
        row.request_id: (row.num_computed_tokens, row.num_scheduled_tokens) for row in plan.rows
    }


def is_published(oracle: Oracle, block_id: int) -> bool:
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
    assert rows_of(oracle.schedule()) == {"A": (0, 5)}, "nothing is loaded"
    stats = oracle.snapshot().stats
    counted = (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits)
    assert counted == ((5, 0) if quirk else (0, 0))


@both
def test_loaded_request_waits_behind_the_head(quirk: bool) -> None:
    """P10, upstream #57841: the head lacks blocks that a request with a confirmed load holds."""
    config = replace(CONFIG, num_blocks=6)
    quirks = [Quirk.LOADED_REQUEST_WAITS_BEHIND_THE_HEAD, Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS]
    oracle = create(config, *(quirks if quirk else quirks[1:]))
    oracle.submit(Request("B", (6,) * 9, max_tokens=1))
    oracle.offer_kv("B", None)
    oracle.schedule()
    begin_load(oracle, Request("A", (1, 2, 3), max_tokens=1), 2)
    oracle.offer_kv("B", 0)
    oracle.report(finished_recving=["A"])
    assert rows_of(oracle.schedule()) == ({} if quirk else {"A": (2, 1)})


@both
def test_loaded_request_keeps_its_blocks(quirk: bool) -> None:
    """P10: each of two requests lacks blocks that the other holds."""
    config = replace(CONFIG, num_blocks=5, scheduler_reserve_full_isl=False)
    oracle = create(config, *[Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS] * quirk)
    begin_load(oracle, A, 4)
    begin_load(oracle, replace(A, request_id="B", prompt_token_ids=(6,) * 5), 4)
    oracle.report(finished_recving=["A", "B"])
    assert len(rows_of(oracle.schedule())) == (0 if quirk else 1)


@both
def test_external_blocks_per_group(quirk: bool) -> None:
    """Upstream #33775: the load of the first group takes a block that the second group hits."""
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
def test_a_failed_block_rolls_back_only_the_first_request_that_shares_it(
    policy: KVLoadFailurePolicy, rows: dict[RequestId, tuple[int, int]]
) -> None:
    """P19, upstream #49250: B shares blocks of A and continues after them at once."""
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
    assert is_published(oracle, 1) is bool(rows), "the block that A computes again stays published"


def test_a_rolled_back_request_keeps_its_placeholders_and_later_tokens() -> None:
    """P12, P13: the token of the first frame is dropped, its placeholder stays."""
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
    begin_load(oracle, A, 4)
    (row,) = oracle.report(invalid_block_ids=[1]).rows
    assert row.num_cached_tokens == (-1 if quirk else 0)


@both
def test_first_transfer_frees_the_blocks(quirk: bool) -> None:
    """P17: the load still writes to the blocks of the aborted request."""
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
def test_finished_request_first_frees_blocks_outside_windows(quirk: bool) -> None:
    """With the quirk, the block in the window is last in the free queue."""
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
def test_blocks_outside_the_window_are_freed_while_a_load_writes_them(quirk: bool) -> None:
    """P17: the first token is loaded; the window after a prompt of 3 does not attend to it."""
    config = replace(
        CONFIG, block_size=1, groups=(KVGroup(GroupKind.SLIDING_WINDOW, 1, sliding_window=2),)
    )
    oracle = create(config, *[Quirk.FINISHED_REQUEST_FIRST_FREES_BLOCKS_OUTSIDE_WINDOWS] * quirk)
    (load,) = begin_load(oracle, Request("A", (1, 2, 3), max_tokens=2), 1).kv_loads
    assert load.block_ids == ((1,),)
    oracle.abort("A")
    assert (1 in oracle.state.pool.free_queue) is quirk
    oracle.report(finished_recving=["A"])
    assert oracle.num_free_blocks == 8


@both
def test_finished_request_first_frees_committed_blocks(quirk: bool) -> None:
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


def test_a_failed_load_is_repeated_with_the_latest_offer() -> None:
    oracle = create(RECOMPUTE, Quirk.CACHED_TOKENS_AS_THE_STORE_OFFERED)
    begin_load(oracle, A, 4)
    oracle.offer_kv("A", 2)
    oracle.report(finished_recving=["A"], invalid_block_ids=[1])
    (row,) = answer(oracle, oracle.schedule()).rows
    assert row.num_cached_tokens == 2


NARROW = replace(
    CONFIG, block_size=1, enable_prefix_caching=False,
    groups=(KVGroup(GroupKind.SLIDING_WINDOW, 1, sliding_window=1),),
)  # fmt: skip
"""Later tokens attend to no token that is loaded after the hit."""


@both
def test_skipped_load_blocks_count_as_cached(quirk: bool) -> None:
    oracle = create(NARROW, *[Quirk.SKIPPED_LOAD_BLOCKS_COUNT_AS_CACHED] * quirk)
    begin_load(oracle, Request("A", (1, 2), max_tokens=2), 1)
    (request,) = oracle.snapshot().requests
    assert request.block_tables == ((0,),)
    assert request.num_cached_blocks == (int(quirk),)


@both
def test_reset_ignores_transfers_without_blocks(quirk: bool) -> None:
    oracle = create(NARROW, *[Quirk.RESET_IGNORES_TRANSFERS_WITHOUT_BLOCKS] * quirk)
    begin_load(oracle, Request("A", (1, 2), max_tokens=2), 1)
    assert oracle.num_free_blocks == 8
    assert oracle.reset() is quirk
    oracle.submit(Request("B", (3,), max_tokens=2))
    answer(oracle, oracle.schedule())
    assert not oracle.reset(), "a block is held"


def test_null_blocks_of_a_repeated_load_stay_null() -> None:
    oracle = create(NARROW, Quirk.LAST_TOKEN_IS_LOADED)
    begin_load(oracle, Request("A", (1,), max_tokens=2), 1)
    for _ in range(3):
        oracle.report(finished_recving=["A"])
        (load,) = oracle.schedule().kv_loads
        assert load.block_ids == ((0,),)
    assert oracle.state.requests["A"].block_tables == ((0,),)


def test_a_window_that_skips_all_loaded_tokens_takes_no_block_for_them() -> None:
    """The quirk makes the window take its first block after those of the other group."""
    groups = (KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=1), KVGroup(GroupKind.FULL, 2))
    oracle = create(replace(CONFIG, groups=groups), Quirk.EXTERNAL_BLOCKS_PER_GROUP)
    oracle.submit(Request("A", (1, 2, 3, 4), max_tokens=1))
    oracle.offer_kv("A", 3)
    oracle.schedule()
    assert oracle.state.requests["A"].block_tables == ((0, 3), (1, 2))


def test_a_hit_longer_than_the_load_takes_no_block() -> None:
    """The second full group hits 4 blocks, more than the window; of 2 tokens, 1 is loaded.

    0.19.1 asks its pool for -2 blocks here, the specification for 0.
    """
    groups = (
        KVGroup(GroupKind.FULL, 1),
        KVGroup(GroupKind.SLIDING_WINDOW, 1, sliding_window=2),
        KVGroup(GroupKind.FULL, 2),
    )
    assert [compute_num_loaded(group, 2, 4) for group in groups] == [0, 0, 0]
    assert [compute_num_loaded(group, 4, 1) for group in groups] == [3, 3, 1]
    assert compute_num_loaded(groups[0], 4, 4) == 0


@both
def test_pool_and_store_reset_separately_without_a_store(quirk: bool) -> None:
    config = replace(CONFIG, kv_connector=False)
    oracle = create(config, *[Quirk.POOL_AND_STORE_RESET_SEPARATELY] * quirk)
    oracle.submit(A)
    answer(oracle, oracle.schedule())
    oracle.abort("A")
    assert not oracle.reset(reset_connector=True)
    assert is_published(oracle, 1) is not quirk


@both
@pytest.mark.parametrize("others", [(), (Quirk.POOL_AND_STORE_RESET_SEPARATELY,)], ids=len)
def test_reset_without_a_store_succeeds(quirk: bool, others: tuple[Quirk, ...]) -> None:
    """The quirk is tried alone, and with one that resets the pool but reports a failure."""
    quirks = (*others, *[Quirk.RESET_WITHOUT_A_STORE_SUCCEEDS] * quirk)
    oracle = create(replace(CONFIG, kv_connector=False), *quirks)
    oracle.submit(A)
    answer(oracle, oracle.schedule())
    assert not oracle.reset(reset_connector=True), "a block is held"
    oracle.abort("A")
    assert oracle.reset(reset_connector=True) is quirk
    assert is_published(oracle, 1) is not (quirk or bool(others))


def test_a_rejected_draft_does_not_roll_back_a_request_below_0_tokens() -> None:
    """The load fails, then a later frame whose commit still counts rejects its draft."""
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
def test_the_last_token_is_not_loaded_with_recurrent_groups(quirk: bool) -> None:
    config = replace(CONFIG, groups=(full(2), recurrent(2)))
    oracle = create(config, *[Quirk.LAST_TOKEN_IS_LOADED] * quirk)
    oracle.submit(Request("A", (1, 2, 3, 4)))
    oracle.offer_kv("A", 4, is_async=True)
    assert not oracle.schedule().kv_loads


def test_a_loaded_request_counts_cached_tokens_despite_draft_state_blocks() -> None:
    """Blocks for draft states come after the loaded ones, and no load has failed."""
    config = replace(
        CONFIG, num_blocks=10, groups=(recurrent(2, ALL, 1), full(2)),
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    oracle = create(config, Quirk.LOAD_ENDS_WITHOUT_ADMISSION)
    begin_load(oracle, Request("A", tuple(range(7)), max_tokens=1), 2)
    oracle.submit(Request("B", (9, 9, 9), max_tokens=3))
    answer(oracle, oracle.schedule())
    oracle.report(finished_recving=["A"])
    oracle.schedule()
    assert oracle.state.requests["A"].status is not Status.RUNNING
    assert oracle.state.requests["A"].num_cached_tokens == 2
