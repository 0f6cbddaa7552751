"""Quirks: each acts where its profile switches it on, and nowhere else."""

from __future__ import annotations

import pytest

from blockstep.spec import Config, MultiModalItem, Oracle, Plan, Policy, Request, SpecMethod
from blockstep.spec.profiles import PROFILES, QUIRKS, STRICT, Profile, Quirk, get_profile
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, Outputs, RequestId


def both(config: Config, quirk: Quirk) -> tuple[Oracle, Oracle]:
    """The specification, and the same with one quirk."""
    return Oracle(config), Oracle(config, Profile("one", frozenset({quirk})))


def steps(oracle: Oracle, count: int, token: int = 50) -> None:
    """So many steps, in which every row that can sample samples `token`."""
    for _ in range(count):
        plan = oracle.schedule()
        if plan.rows:
            frame = oracle.state.frames[-1]
            oracle.commit(plan, {row.request_id: [token] for row in frame.rows if row.samples})


def hit(oracle: Oracle, request: Request) -> int:
    """Tokens that a newcomer finds in the cache."""
    oracle.submit(request)
    (row,) = (row for row in oracle.schedule().new if row.request_id == request.request_id)
    return row.num_computed_tokens


def test_every_quirk_has_a_story_and_a_profile() -> None:
    assert {story.quirk for story in QUIRKS} == set(Quirk)
    assert all(story.property_ids and story.upstream and story.program for story in QUIRKS)
    assert get_profile("strict") is STRICT
    assert STRICT.quirks == frozenset()
    assert get_profile("no such") is None
    assert set().union(*(profile.quirks for profile in PROFILES)) == set(Quirk)


def test_unwritten_keys_stay() -> None:
    """Upstream #43569: the cache promises what nobody wrote."""
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
def test_output_blocks_name_the_last_item(quirk: str | None, expected: int) -> None:
    config = Config(num_blocks=20, block_size=4, max_model_len=40)
    oracle = both(config, Quirk.OUTPUT_BLOCKS_NAME_THE_LAST_ITEM)[quirk is not None]
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
def test_placeholders_outlive_a_gap(quirk: bool) -> None:
    """Upstream #46899: what was proposed before the gap is gone, and is dispatched all the same."""
    config = Config(
        num_blocks=9,
        max_num_batched_tokens=2,
        spec_method=SpecMethod.NGRAM,
        num_speculative_tokens=1,
        max_frames_in_flight=2,
    )
    oracle = both(config, Quirk.PLACEHOLDERS_OUTLIVE_A_GAP)[quirk]
    oracle.submit(Request("A", (1,), max_tokens=8, eos_token_id=0))
    oracle.submit(Request("B", (2,), max_tokens=8))
    first, second = oracle.schedule(), oracle.schedule()
    assert [row.request_id for row in second.rows] == ["A"], "A and its draft leave B out"
    expected = (DRAFT_PLACEHOLDER,) if quirk else ()
    assert oracle.state.requests["B"].spec_token_ids == expected
    oracle.commit(first, {"A": [0], "B": [5]})
    (row,) = oracle.schedule().rows
    assert row.request_id == "B"
    assert row.draft_token_ids == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(("quirk", "expected"), [(False, ["B", "C"]), (True, ["B"])])
def test_a_victim_without_a_row_shifts_the_next(quirk: bool, expected: list[RequestId]) -> None:
    config = Config(
        num_blocks=8, block_size=1, max_model_len=7, max_frames_in_flight=2,
        policy=Policy.PRIORITY, enable_prefix_caching=False,
    )  # fmt: skip
    oracle = both(config, Quirk.VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT)[quirk]
    oracle.submit(Request("A", (1, 2), max_tokens=2, priority=9))
    answer(oracle, oracle.schedule())
    oracle.submit(Request("B", (3, 4), max_tokens=4))
    oracle.submit(Request("C", (5, 6), max_tokens=4))
    oracle.schedule()
    plan = oracle.schedule()  # A has its last token in flight, and B needs a block
    assert plan.preempted_req_ids == ("A",)
    assert [row.request_id for row in plan.rows] == expected
