"""Quirks of the core: each changes the behavior only where its profile turns it on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockstep.spec import (
    Config,
    Drafts,
    MultiModalItem,
    Oracle,
    Plan,
    Policy,
    Request,
    Reset,
    SpecMethod,
)
from blockstep.spec.profiles import (
    PROFILES,
    QUIRKS,
    RELEASES,
    STRICT,
    Profile,
    Quirk,
    get_profile,
)
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    DraftsTaken,
    FinishReason,
    Outputs,
    PoolOrder,
    RequestId,
    RowTokens,
)


def both(config: Config, quirk: Quirk) -> tuple[Oracle, Oracle]:
    """Return the strict specification, and one with `quirk`."""
    return Oracle(config), Oracle(config, Profile("one", frozenset({quirk})))


def steps(oracle: Oracle, count: int, token: int = 50) -> None:
    """Run `count` steps, in which every row that can sample samples `token`."""
    for _ in range(count):
        plan = oracle.schedule()
        if plan.rows:
            frame = oracle.state.frames[-1]
            oracle.commit(plan, {row.request_id: [token] for row in frame.rows if row.samples})


def hit(oracle: Oracle, request: Request) -> int:
    """Return the length of the prefix hit of a new request."""
    oracle.submit(request)
    (row,) = (row for row in oracle.schedule().new if row.request_id == request.request_id)
    return row.num_computed_tokens


def test_every_quirk_has_a_story_and_a_profile() -> None:
    assert {story.quirk for story in QUIRKS} == set(Quirk)
    assert all(story.title and story.upstream and story.program for story in QUIRKS)
    assert len(QUIRKS) == len(Quirk)
    assert get_profile("strict") is STRICT
    assert STRICT.quirks == frozenset()
    assert get_profile("no such") is None
    assert set().union(*(profile.quirks for profile in PROFILES)) == set(Quirk)


@pytest.mark.parametrize("profile", RELEASES, ids=lambda profile: profile.name)
def test_a_profile_has_every_quirk_that_was_seen_in_its_release(profile: Profile) -> None:
    seen = {story.quirk for story in QUIRKS if profile.name[5:] in story.seen_in.split()}
    assert seen <= profile.quirks
    assert profile.spares


def test_unwritten_keys_stay() -> None:
    """Upstream #43569: a key stays cached although its block was never written."""
    config = Config(
        num_blocks=9,
        block_size=1,
        max_model_len=9,
        policy=Policy.PRIORITY,
        long_prefill_token_threshold=2,
    )
    found = []
    for oracle in both(config, Quirk.UNWRITTEN_KEYS_STAY):
        oracle.submit(Request("A", (1, 2, 3, 4, 5, 6, 7), max_tokens=1, priority=1))
        steps(oracle, 1)
        oracle.submit(Request("B", (7, 8), max_tokens=2))
        steps(oracle, 2)
        assert oracle.state.waiting == ("A",)
        oracle.abort("A", "B")
        found.append(hit(oracle, Request("C", (1, 2, 3, 4, 5, 9), max_tokens=1)))
    assert found == [4, 5]


def test_equals_preempt_the_first() -> None:
    config = Config(
        num_blocks=5,
        block_size=1,
        max_model_len=9,
        policy=Policy.PRIORITY,
        max_num_batched_tokens=3,
        long_prefill_token_threshold=1,
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
    )
    unfinished: list[set[RequestId]] = []
    for oracle in both(config, Quirk.EQUALS_PREEMPT_THE_FIRST):
        oracle.submit(Request("B", (5, 8, 0), max_tokens=2))
        oracle.submit(Request("C", (8, 0, 0, 8), max_tokens=1))
        steps(oracle, 500)
        unfinished.append(set(oracle.state.requests))
    assert unfinished == [set(), {"B", "C"}]


def test_min_tokens_mask_length() -> None:
    config = Config(num_blocks=9, block_size=1, max_model_len=4)
    strict, quirky = both(config, Quirk.MIN_TOKENS_MASK_LENGTH)
    for oracle in (strict, quirky):
        oracle.submit(Request("A", (1, 2), max_tokens=8, min_tokens=8))
        steps(oracle, 9)
    assert not strict.state.requests
    assert len(quirky.state.requests["A"].output_token_ids) == 2
    assert quirky.state.running == ("A",)
    assert quirky.schedule().rows == (), "it can neither be scheduled nor end"


@pytest.mark.parametrize(("quirk", "expected"), [(None, 4), ("last", 8)])
def test_output_block_key_has_only_the_last_item(quirk: str | None, expected: int) -> None:
    config = Config(num_blocks=20, block_size=4, max_model_len=40)
    oracle = both(config, Quirk.OUTPUT_BLOCK_KEY_HAS_ONLY_THE_LAST_ITEM)[quirk is not None]
    items = (MultiModalItem("cat", 4, 1), MultiModalItem("dog", 5, 1))
    oracle.submit(Request("A", (1,) * 7, max_tokens=3, items=items))
    steps(oracle, 3, token=1)
    # The second block of A: four ones, the cat and the dog; B has no cat.
    assert hit(oracle, Request("B", (1,) * 9, max_tokens=1, items=items[1:])) == expected


def answer(oracle: Oracle, plan: Plan, token: int = 50) -> Outputs:
    """Commit `plan`: every row that can sample samples `token`."""
    (frame,) = (frame for frame in oracle.state.frames if frame.frame_id == plan.frame_id)
    return oracle.commit(plan, {row.request_id: [token] for row in frame.rows if row.samples})


@pytest.mark.parametrize("quirk", [False, True])
def test_stale_draft_placeholders(quirk: bool) -> None:
    """Upstream #46899: placeholders of dropped drafts are still scheduled."""
    config = Config(
        num_blocks=9,
        max_num_batched_tokens=2,
        spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=1,
        max_frames_in_flight=2,
        async_scheduling=True,
    )
    oracle = both(config, Quirk.STALE_DRAFT_PLACEHOLDERS)[quirk]
    oracle.submit(Request("A", (1,), max_tokens=8, eos_token_id=0))
    oracle.submit(Request("B", (2,), max_tokens=8))
    first, second = oracle.schedule(), oracle.schedule()
    assert [row.request_id for row in second.rows] == ["A"], "A and its draft leave B out"
    expected = (DRAFT_PLACEHOLDER,) if quirk else ()
    assert oracle.state.requests["B"].spec_token_ids == expected
    oracle.commit(first, {"A": [0], "B": [5]})
    (row,) = oracle.schedule().rows
    assert row.request_id == "B"
    assert row.draft_token_ids == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, ["B", "C"]), (True, ["B"])])
def test_victim_without_a_row_skips_a_request(quirk: bool, expected: list[RequestId]) -> None:
    config = Config(
        num_blocks=8, block_size=1, max_model_len=7, max_frames_in_flight=2, async_scheduling=True,
        policy=Policy.PRIORITY, enable_prefix_caching=False,
    )  # fmt: skip
    oracle = both(config, Quirk.VICTIM_WITHOUT_A_ROW_SKIPS_A_REQUEST)[quirk]
    oracle.submit(Request("A", (1, 2), max_tokens=2, priority=9))
    answer(oracle, oracle.schedule())
    oracle.submit(Request("B", (3, 4), max_tokens=4))
    oracle.submit(Request("C", (5, 6), max_tokens=4))
    oracle.schedule()
    plan = oracle.schedule()  # A has its last token in flight, and B needs a block
    assert plan.preempted_req_ids == ("A",)
    assert [row.request_id for row in plan.rows] == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, 0), (True, 4)])
def test_item_offset_not_in_key(quirk: bool, expected: int) -> None:
    """Upstream #36708."""
    config = Config(num_blocks=9, block_size=4, max_model_len=16)
    oracle = both(config, Quirk.ITEM_OFFSET_NOT_IN_KEY)[quirk]
    oracle.submit(Request("A", (1,) * 8, max_tokens=1, items=(MultiModalItem("cat", 0, 1),)))
    steps(oracle, 1)
    other = Request("B", (1,) * 8, max_tokens=1, items=(MultiModalItem("cat", 1, 1),))
    assert hit(oracle, other) == expected


@pytest.mark.parametrize("quirk", [False, True])
def test_adjacent_item_in_output_block_key(quirk: bool) -> None:
    config = Config(num_blocks=9, block_size=1, max_model_len=16)
    oracle = both(config, Quirk.ADJACENT_ITEM_IN_OUTPUT_BLOCK_KEY)[quirk]
    oracle.submit(Request("A", (1,), max_tokens=5, items=(MultiModalItem("cat", 0, 1),)))
    steps(oracle, 4)
    named = [bool(key.items) for key in oracle.state.requests["A"].block_keys]
    assert named[:3] == [True, quirk, False]


@pytest.mark.parametrize(("quirk", "expected"), [(False, 0), (True, 2)])
def test_no_full_isl_reserve(quirk: bool, expected: int) -> None:
    config = Config(num_blocks=7, block_size=1, max_model_len=7, max_num_batched_tokens=3)
    oracle = both(config, Quirk.NO_FULL_ISL_RESERVE)[quirk]
    oracle.submit(Request("A", (1,), max_tokens=6))
    steps(oracle, 3)
    oracle.submit(Request("B", (2, 3, 4, 5), max_tokens=1))
    amounts = {row.request_id: row.num_scheduled_tokens for row in oracle.schedule().rows}
    assert amounts.get("B", 0) == expected


def test_queues_and_order_of_skipped_requests() -> None:
    """Skipped requests have their own queue, or return to the waiting queue in two orders."""
    config = Config(num_blocks=9)
    reversing = {Quirk.SINGLE_WAITING_QUEUE, Quirk.SKIPPED_REQUESTS_RETURN_REVERSED}
    quirks: list[set[Quirk]] = [set(), {Quirk.SINGLE_WAITING_QUEUE}, reversing]
    found = []
    for some in quirks:
        oracle = Oracle(config, Profile("some", frozenset(some)))
        oracle.submit(Request("A", (1,), structured_output=True))
        oracle.submit(Request("B", (2,), structured_output=True))
        oracle.schedule()
        found.append((oracle.state.waiting, oracle.state.skipped_waiting))
    assert found == [((), ("A", "B")), (("A", "B"), ()), (("B", "A"), ())]


@pytest.mark.parametrize(("quirk", "expected"), [(False, ()), (True, (7,))])
def test_drafts_outlive_preemption(quirk: bool, expected: tuple[int, ...]) -> None:
    config = Config(
        num_blocks=6, block_size=1, max_num_seqs=2, max_num_batched_tokens=2, max_model_len=8,
        spec_method=SpecMethod.NGRAM, num_speculative_tokens=1,
    )  # fmt: skip
    oracle = both(config, Quirk.DRAFTS_OUTLIVE_PREEMPTION)[quirk]
    oracle.submit(Request("A", (1,), max_tokens=4))
    oracle.submit(Request("B", (2,), max_tokens=2))
    steps(oracle, 1)
    oracle.apply(Drafts((RowTokens("A", (6,)), RowTokens("B", (7,)))))
    oracle.commit(oracle.schedule(), {"A": [6, 5]})
    assert oracle.schedule().preempted_req_ids == ("B",)
    assert oracle.state.requests["B"].spec_token_ids == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, 0), (True, 2)])
def test_cached_tokens_of_the_latest_hit(quirk: bool, expected: int) -> None:
    config = Config(
        num_blocks=8, block_size=1, max_model_len=8, max_num_batched_tokens=3,
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    oracle = both(config, Quirk.CACHED_TOKENS_OF_THE_LATEST_HIT)[quirk]
    oracle.submit(Request("A", (9, 9), max_tokens=4))
    steps(oracle, 1)
    oracle.submit(Request("B", (1, 2, 3, 4, 5, 6), max_tokens=1))
    steps(oracle, 3)
    assert oracle.state.requests["B"].num_preemptions == 1
    oracle.abort("A")
    oracle.schedule()
    assert oracle.state.requests["B"].num_cached_tokens == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, 3), (True, 5)])
def test_admitted_with_lookahead(quirk: bool, expected: int) -> None:
    config = Config(
        num_blocks=20, block_size=1, spec_method=SpecMethod.EAGLE, num_speculative_tokens=2,
        max_model_len=16,
    )  # fmt: skip
    oracle = both(config, Quirk.ADMITTED_WITH_LOOKAHEAD)[quirk]
    oracle.submit(Request("A", (1, 2, 3), max_tokens=4))
    (row,) = oracle.schedule().new
    assert len(row.block_ids[0]) == expected


@pytest.mark.parametrize(
    ("quirk", "caching", "expected"),
    [
        (None, True, (3, 4, 2, 1)),
        (Quirk.BLOCKS_WITHOUT_KEYS_REUSED_FIRST, True, (2, 3, 4, 1)),
        (Quirk.BLOCKS_WITHOUT_KEYS_REUSED_FIRST, False, (3, 4, 2, 1)),
        (Quirk.LIFO_REUSE_WITHOUT_CACHING, True, (3, 4, 2, 1)),
        (Quirk.LIFO_REUSE_WITHOUT_CACHING, False, (2, 1, 3, 4)),
    ],
)
def test_order_of_freed_blocks_in_the_free_queue(
    quirk: Quirk | None, caching: bool, expected: tuple[int, ...]
) -> None:
    config = Config(num_blocks=5, block_size=2, max_model_len=8, enable_prefix_caching=caching)
    oracle = Oracle(config, Profile("some", frozenset({quirk} if quirk else ())))
    oracle.submit(Request("A", (1, 2, 3)))
    oracle.schedule()
    oracle.abort("A")
    assert oracle.state.pool.free_queue == expected


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "quirk", [Quirk.BLOCKS_WITHOUT_KEYS_REUSED_FIRST, Quirk.LIFO_REUSE_WITHOUT_CACHING]
)
def test_lifo_order_has_each_freed_block_once_with_reuse_quirks(
    quirk: Quirk, caching: bool
) -> None:
    """Freed blocks are at the head of a LIFO queue; the quirks once looked for them at its tail."""
    config = Config(
        num_blocks=5,
        block_size=2,
        max_model_len=8,
        enable_prefix_caching=caching,
        pool_order=PoolOrder.LIFO,
    )
    oracle = Oracle(config, Profile("some", frozenset({quirk})))
    oracle.submit(Request("A", (1, 2, 3)))
    oracle.schedule()
    oracle.abort("A")
    assert oracle.state.pool.free_queue == (2, 1, 3, 4)


@pytest.mark.parametrize(("quirk", "expected"), [(False, ["A"]), (True, [])])
def test_preempted_wait_for_all_their_frames(quirk: bool, expected: list[RequestId]) -> None:
    config = Config(
        num_blocks=9, max_num_batched_tokens=2, max_frames_in_flight=2, async_scheduling=True
    )
    oracle = both(config, Quirk.PREEMPTED_WAIT_FOR_ALL_THEIR_FRAMES)[quirk]
    oracle.submit(Request("A", (1, 2, 3)))
    plan = oracle.schedule()  # a chunk of the prompt, which does not sample
    oracle.apply(Reset(reset_running_requests=True))
    assert [row.request_id for row in oracle.schedule().rows] == expected
    oracle.commit(plan, {})
    if quirk:
        assert [row.request_id for row in oracle.schedule().rows] == ["A"]


@pytest.mark.parametrize(("quirk", "delivered"), [(False, 1), (True, 0)])
def test_reset_drops_tokens(quirk: bool, delivered: int) -> None:
    """Upstream #42043: with the quirk the token is dropped and sampled again."""
    config = Config(num_blocks=9, max_frames_in_flight=2, async_scheduling=True)
    oracle = both(config, Quirk.RESET_DROPS_TOKENS)[quirk]
    oracle.submit(Request("A", (1, 2)))
    plan = oracle.schedule()
    oracle.apply(Reset(reset_running_requests=True))
    assert oracle.state.requests["A"].num_output_placeholders == 1 - quirk
    assert len(oracle.schedule().rows) == quirk, "without a token to wait for, A resumes at once"
    assert len(answer(oracle, plan).rows) == delivered


@pytest.mark.parametrize(("quirk", "expected"), [(False, ()), (True, ("A",))])
def test_next_plan_names_victims_of_a_reset(quirk: bool, expected: tuple[RequestId, ...]) -> None:
    oracle = both(Config(num_blocks=9), Quirk.NEXT_PLAN_NAMES_VICTIMS_OF_A_RESET)[quirk]
    oracle.submit(Request("A", (1, 2)))
    steps(oracle, 1)
    oracle.apply(Reset(reset_running_requests=True))
    plan = oracle.schedule()
    assert plan.preempted_req_ids == expected
    answer(oracle, plan)
    assert oracle.schedule().preempted_req_ids == ()


@pytest.mark.parametrize(("quirk", "expected"), [(False, 2), (True, 6)])
def test_single_request_has_no_threshold(quirk: bool, expected: int) -> None:
    config = Config(num_blocks=20, long_prefill_token_threshold=2)
    oracle = both(config, Quirk.SINGLE_REQUEST_HAS_NO_THRESHOLD)[quirk]
    oracle.submit(Request("A", (1,) * 6))
    plan = oracle.schedule()
    assert plan.rows[0].num_scheduled_tokens == expected
    answer(oracle, plan)
    oracle.submit(Request("B", (2,) * 6))
    amounts = {row.request_id: row.num_scheduled_tokens for row in oracle.schedule().rows}
    assert amounts["B"] == 2


@pytest.mark.parametrize(("quirk", "expected"), [(False, []), (True, ["B"])])
def test_step_continues_after_self_preemption(quirk: bool, expected: list[RequestId]) -> None:
    config = Config(
        num_blocks=5, block_size=2, max_model_len=8, policy=Policy.PRIORITY,
        enable_prefix_caching=False,
    )  # fmt: skip
    oracle = both(config, Quirk.STEP_CONTINUES_AFTER_SELF_PREEMPTION)[quirk]
    oracle.submit(Request("A", (1, 2, 3), max_tokens=3, priority=9))
    steps(oracle, 1)
    oracle.submit(Request("B", (4, 5, 6), max_tokens=3))
    steps(oracle, 1)
    plan = oracle.schedule()  # A needs a block, none is left, and no request ranks below A
    assert plan.preempted_req_ids == ("A",)
    assert [row.request_id for row in plan.rows] == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, None), (True, FinishReason.STOP)])
def test_stop_tokens_ignore_min_tokens(quirk: bool, expected: FinishReason | None) -> None:
    oracle = both(Config(num_blocks=9), Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS)[quirk]
    oracle.submit(Request("A", (1,), max_tokens=9, min_tokens=3, eos_token_id=5))
    (row,) = answer(oracle, oracle.schedule(), token=5).rows
    assert row.finish_reason is expected


@pytest.mark.parametrize(
    ("quirk", "expected"), [(False, FinishReason.STOP), (True, FinishReason.LENGTH)]
)
def test_length_comes_before_stop(quirk: bool, expected: FinishReason) -> None:
    oracle = both(Config(num_blocks=9), Quirk.LENGTH_COMES_BEFORE_STOP)[quirk]
    oracle.submit(Request("A", (1,), max_tokens=1, eos_token_id=5))
    (row,) = answer(oracle, oracle.schedule(), token=5).rows
    assert row.finish_reason is expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, ["A"]), (True, ["A", "C"])])
def test_prompt_beyond_the_budget_is_skipped(quirk: bool, expected: list[RequestId]) -> None:
    config = Config(
        num_blocks=9, block_size=1, max_model_len=5, max_num_batched_tokens=5,
        enable_chunked_prefill=False,
    )  # fmt: skip
    oracle = both(config, Quirk.PROMPT_BEYOND_THE_BUDGET_IS_SKIPPED)[quirk]
    for name, prompt in (("A", (1, 2, 3)), ("B", (4, 5, 6)), ("C", (7,))):
        oracle.submit(Request(name, prompt, max_tokens=1))
    assert [row.request_id for row in oracle.schedule().rows] == expected


def padded(quirks: set[Quirk], config: Config, *requests: Request) -> tuple[Oracle, Plan]:
    """Return a plan that admits the last of these requests while the others decode."""
    oracle = Oracle(config, Profile("some", frozenset(quirks)))
    for request in requests[:-1]:
        oracle.submit(request)
        steps(oracle, 1)
    oracle.submit(requests[-1])
    return oracle, oracle.schedule()


PADDING = Config(
    num_blocks=12, block_size=1, max_model_len=8, spec_method=SpecMethod.NGRAM,
    num_speculative_tokens=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("quirk", "budget", "expected"), [(False, 9, 1), (True, 9, 3), (False, 3, 1), (True, 3, 0)]
)
def test_padding_on_admission(quirk: bool, budget: int, expected: int) -> None:
    """Upstream #45237: the row of a new request has the shape of the others, or it waits."""
    config = replace(PADDING, max_num_batched_tokens=budget)
    quirks = {Quirk.PADDING_ON_ADMISSION} if quirk else set()
    requests = Request("A", (1,), max_tokens=4), Request("B", (2,), max_tokens=4)
    oracle, plan = padded(quirks, config, *requests)
    assert sum(row.num_scheduled_tokens for row in plan.new) == expected
    assert all(row.draft_token_ids == (DRAFT_PLACEHOLDER,) * (expected - 1) for row in plan.new)
    answer(oracle, plan)
    if expected:
        assert oracle.state.requests["B"].num_computed_tokens == 1, "they are rejected"


@pytest.mark.parametrize(("quirk", "expected"), [(False, [1]), (True, [])])
def test_padding_waits_at_max_model_len(quirk: bool, expected: list[int]) -> None:
    """Upstream #53962."""
    quirks = {Quirk.PADDING_ON_ADMISSION, Quirk.PADDING_WAITS_AT_MAX_MODEL_LEN}
    requests = Request("A", (1, 2), max_tokens=2), Request("B", (1, 2, 3), max_tokens=1)
    quirks = quirks if quirk else {Quirk.PADDING_ON_ADMISSION}
    _, plan = padded(quirks, replace(PADDING, max_model_len=4), *requests)
    assert [row.num_scheduled_tokens for row in plan.new] == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, set()), (True, {"B"})])
def test_padding_on_hit_without_other_requests(quirk: bool, expected: set[RequestId]) -> None:
    """Upstream #55126: B waits for budget for its padding although no other request runs."""
    quirks = {Quirk.PADDING_ON_ADMISSION} | (
        {Quirk.PADDING_ON_HIT_WITHOUT_OTHER_REQUESTS} if quirk else set()
    )
    requests = Request("A", (1,), max_tokens=1), Request("B", (1, 2), max_tokens=1)
    oracle, plan = padded(quirks, replace(PADDING, max_num_batched_tokens=2), *requests)
    assert {row.request_id for row in plan.rows} == {"B"} - expected
    if plan.rows:
        answer(oracle, plan)
    steps(oracle, 50)
    assert set(oracle.state.requests) == expected, "it waits for ever"


@pytest.mark.parametrize(("quirk", "expected"), [(False, 2), (True, 3)])
def test_drafts_publish_at_commit(quirk: bool, expected: int) -> None:
    config = Config(
        num_blocks=9, block_size=2, max_model_len=16, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=1,
    )  # fmt: skip
    oracle = both(config, Quirk.DRAFTS_PUBLISH_AT_COMMIT)[quirk]
    oracle.submit(Request("A", (1, 2, 3, 4), max_tokens=8))
    steps(oracle, 1)
    oracle.apply(Drafts((RowTokens("A", (6,)),)))
    oracle.commit(oracle.schedule(), {"A": [6, 7]})
    (held,) = oracle.state.requests["A"].holdings
    assert held.num_cached_blocks == expected


@pytest.mark.parametrize(("quirk", "expected"), [(False, []), (True, ["A"])])
def test_resumed_with_token_in_flight(quirk: bool, expected: list[RequestId]) -> None:
    """Two frames without placeholders sample the same position."""
    config = Config(num_blocks=3, max_frames_in_flight=2)
    oracle = both(config, Quirk.RESUMED_WITH_TOKEN_IN_FLIGHT)[quirk]
    oracle.submit(Request("A", (1,)))
    oracle.schedule()
    oracle.reset(reset_running_requests=True)
    assert [row.request_id for row in oracle.schedule().rows] == expected


def test_no_common_prefix_while_blocks_are_short() -> None:
    """B lacks blocks while A runs alone, and is admitted after A has finished."""
    config = Config(num_blocks=4, block_size=1, scheduler_reserve_full_isl=False)
    counts = []
    for oracle in both(config, Quirk.NO_COMMON_PREFIX_WHILE_BLOCKS_ARE_SHORT):
        oracle.submit(Request("A", (0, 0), max_tokens=2))
        plan = oracle.schedule()
        oracle.submit(Request("B", (1, 2), max_tokens=1))
        counts.append([plan.num_common_prefix_blocks])
        for token in (3, 4):
            oracle.commit(plan, {"A": [token]})
            plan = oracle.schedule()
            counts[-1].append(plan.num_common_prefix_blocks)
    assert counts == [[(2,), (3,), (2,)], [(2,), (0,), (2,)]]


@pytest.mark.parametrize("quirk", [False, True])
def test_chunks_take_drafts(quirk: bool) -> None:
    """With the quirk, a draft proposed during the prompt is scheduled with its last token."""
    config = Config(
        num_blocks=9, max_num_batched_tokens=2, spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=1,
    )  # fmt: skip
    oracle = both(config, Quirk.CHUNKS_TAKE_DRAFTS)[quirk]
    oracle.submit(Request("A", (1, 2, 3), max_tokens=4))
    oracle.commit(oracle.schedule(), {})
    taken = oracle.apply(Drafts((RowTokens("A", (7,)),)))
    assert taken == DraftsTaken(("A",) * quirk)
    (row,) = oracle.schedule().rows
    assert row.num_scheduled_tokens == 1 + quirk
