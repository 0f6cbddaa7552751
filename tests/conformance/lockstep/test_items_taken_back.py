"""Items of rows that a step takes back, and of sessions that begin anew: the host does as the spec.

In what is drawn whoever comes outranks those who run, blocks are few, and prompts are items one
after the other: so a step preempts whom it has just given an item, which others may share, or have
lost room to.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.program import Answer
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v
from blockstep.spec.features.encoder import cache

NUM_RUNS = 70
LENGTHS = dict(zip("abcdefghi", (1, 1, 1, 1, 1, 1, 2, 2, 3), strict=True))


def draw_config(random: Random) -> v.Config:
    """Few blocks, rows of a token or two, and room for two or three items."""
    depth, with_head = random.choice((1, 1, 2, 3)), random.random() < 0.3
    return v.Config(
        num_blocks=random.randint(9, 14),
        block_size=random.randint(1, 2),
        max_num_seqs=6,
        max_num_batched_tokens=random.randint(4, 8),
        long_prefill_token_threshold=random.randint(1, 2),
        max_model_len=20,
        policy=v.Policy.PRIORITY,
        enable_prefix_caching=random.random() < 0.3,
        scheduler_reserve_full_isl=False,
        spec_method=v.SpecMethod.EAGLE if with_head else v.SpecMethod.NONE,
        num_speculative_tokens=1 if with_head else 0,
        max_frames_in_flight=depth,
        async_scheduling=depth > 1,
        encoder_compute_budget=random.randint(3, 7),
        encoder_cache_size=random.randint(3, 7),
    )


def draw_request(random: Random, number: int, before: v.Request | None, ahead: int) -> v.Request:
    """One that outranks those before it, most often; items with seldom a token between two.

    Half of them have the items of the one before, and `ahead` tokens less in front: then both come
    to an item at once.
    """
    items: list[v.MultiModalItem] = []
    if before is not None and random.random() < 0.5:
        items = [replace(item, offset=item.offset - ahead) for item in before.items]
    if not items or items[0].offset < 0:
        items, end = [], random.randint(0, 4)
        while end < 8:
            name = random.choice(tuple(LENGTHS))
            items.append(v.MultiModalItem(name, end, LENGTHS[name]))
            end += LENGTHS[name] + (random.random() < 0.2)
    num_prompt = random.randint(1, 12)
    kept = tuple([item for item in items if item.offset + item.length <= num_prompt])
    priority = -number if random.random() < 0.8 else random.randint(-number, 0)
    name = f"{random.choice('pqr')}{number}"
    return v.Request(name, (number,) * num_prompt, 2, priority=priority, items=kept)


def play(seed: int) -> None:
    """A run of some dozens of steps, before most of which somebody comes."""
    random, before = Random(seed), None
    config = draw_config(random)
    run = LockStep.start(config, load_engine("host"))
    for number in range(30):
        if random.random() < 0.8:
            before = draw_request(random, number, before, config.long_prefill_token_threshold)
            assert run.perform(v.Submit(before)) == [], seed
        if random.random() < 0.1:
            offered = tuple(sorted(random.sample(tuple(LENGTHS), 2)))
            assert run.perform(v.EncoderOffer(offered)) == [], seed
        assert run.perform(v.Schedule()) == [], seed
        if random.random() < 0.8:
            assert run.perform(Answer()) == [], seed


def test_items_of_rows_that_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    get_with_evicted = cache.get_with_evicted

    def note(encoder: cache.Encoder) -> cache.Encoder:
        after = get_with_evicted(encoder)
        returned.append(len(encoder.evicted) - len(after.evicted))
        return after

    monkeypatch.setattr(cache, "get_with_evicted", note)
    for seed in range(NUM_RUNS):
        play(seed)
    assert sum(number > 0 for number in returned) > 10, "items that had made room return"
    assert max(returned) > 1, "several at once, too"


CAT, DOG, OWL = "cat", "dog", "owl"
NARROW = v.Config(
    num_blocks=5,
    block_size=2,
    policy=v.Policy.PRIORITY,
    enable_prefix_caching=False,
    encoder_compute_budget=1,
    encoder_cache_size=1,
)
"""The encoder makes an item of one embedding a step, and keeps one."""


def begin(config: v.Config) -> LockStep:
    return LockStep.start(config, load_engine("host"))


def come(
    run: LockStep, name: str, num_prompt: int, *items: v.MultiModalItem, **fields: Any
) -> None:
    request = v.Request(name, (1,) * num_prompt, **{"max_tokens": 1, **fields}, items=items)
    assert run.perform(v.Submit(request)) == []


def plan_step(run: LockStep) -> v.Plan:
    assert run.perform(v.Schedule()) == []
    assert run.last is not None
    assert isinstance(run.last.seen, v.Plan)
    return run.last.seen


def step(run: LockStep) -> v.Plan:
    plan = plan_step(run)
    assert run.perform(Answer()) == []
    return plan


def test_a_preempted_request_may_stop_before_an_item_that_it_had() -> None:
    run = begin(
        v.Config(
            num_blocks=4,
            block_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=7,
            max_model_len=32,
            enable_prefix_caching=False,
            long_prefill_token_threshold=4,
            scheduler_reserve_full_isl=False,
            encoder_compute_budget=5,
            encoder_cache_size=5,
        )
    )
    come(run, "D", 8, v.MultiModalItem(CAT, 1, 2), v.MultiModalItem(DOG, 4, 1), resumable=True)
    step(run)
    step(run)
    others = (v.MultiModalItem(DOG, 1, 1), v.MultiModalItem(OWL, 2, 3), v.MultiModalItem(DOG, 5, 1))
    come(run, "G", 11, *others)
    step(run)
    update = v.StreamingUpdate(v.Request("D", (1,), max_tokens=1, resumable=True))
    assert run.perform(update) == []
    (row,) = plan_step(run).new
    assert isinstance(row, v.NewRow)
    assert (row.request_id, row.num_computed_tokens, row.num_scheduled_tokens) == ("D", 0, 1)


def test_what_made_room_for_a_row_that_was_taken_back_returns() -> None:
    run = begin(
        replace(
            NARROW,
            max_model_len=64,
            spec_method=v.SpecMethod.DRAFT_MODEL,
            num_speculative_tokens=1,
            max_frames_in_flight=3,
            async_scheduling=True,
        )
    )
    items = (v.MultiModalItem(CAT, 0, 1), v.MultiModalItem(DOG, 1, 1), v.MultiModalItem(OWL, 2, 1))
    come(run, "A", 4, *items)
    plan_step(run)
    come(run, "B", 1, max_tokens=2, priority=-1)
    plan_step(run)
    plan = plan_step(run)
    assert (plan.preempted_req_ids, plan.free_encoder_mm_hashes) == (("A",), ())
    encoder = run.spec.snapshot().encoder
    assert encoder is not None
    assert encoder.freeable == (DOG,)


def test_what_made_room_for_a_row_without_a_head_returns() -> None:
    """A takes the block of B in the step in which B has evicted its first item for its second."""
    run = begin(
        replace(
            NARROW,
            num_blocks=4,
            max_model_len=8,
            max_num_batched_tokens=8,
            long_prefill_token_threshold=1,
            max_frames_in_flight=4,
            async_scheduling=True,
        )
    )
    come(run, "B", 4, v.MultiModalItem(CAT, 0, 1), v.MultiModalItem(DOG, 3, 1))
    plan_step(run)
    come(run, "A", 1, max_tokens=2)
    plan_step(run)
    plan_step(run)
    plan = plan_step(run)
    assert (plan.preempted_req_ids, plan.free_encoder_mm_hashes) == (("B",), ())


def test_a_request_with_an_item_that_is_taken_back_brings_it_in() -> None:
    """A row before it has found another one, which stays as it is."""
    run = begin(
        replace(
            NARROW,
            num_blocks=12,
            block_size=1,
            max_model_len=32,
            long_prefill_token_threshold=1,
            scheduler_reserve_full_isl=False,
            encoder_cache_size=3,
        )
    )
    come(run, "Z", 1, v.MultiModalItem(DOG, 0, 1))
    step(run)
    come(run, "A", 4, v.MultiModalItem(CAT, 3, 1), priority=2)
    step(run)
    come(run, "G", 3, v.MultiModalItem(DOG, 2, 1))
    come(run, "H", 3, v.MultiModalItem(CAT, 2, 1))
    step(run)
    come(run, "B", 2, priority=1)
    step(run)
    plan = step(run)
    assert plan.preempted_req_ids == ("A",)
    made = {one.request_id: one.item_indices for one in plan.scheduled_encoder_inputs}
    assert made == {"H": (0,)}


def test_what_was_made_anew_is_passed_over_as_others_return() -> None:
    config = v.Config(
        num_blocks=9,
        block_size=2,
        policy=v.Policy.PRIORITY,
        max_num_batched_tokens=8,
        max_model_len=32,
        enable_prefix_caching=False,
        long_prefill_token_threshold=2,
        scheduler_reserve_full_isl=False,
        encoder_compute_budget=4,
        encoder_cache_size=4,
    )
    run = begin(config)
    come(run, "Z", 4, *[v.MultiModalItem(n, at, 1) for at, n in enumerate((CAT, DOG, OWL, "elk"))])
    step(run)
    step(run)
    come(run, "V", 9, v.MultiModalItem("large", 6, 3), priority=2)
    step(run)
    come(run, "H", 5, v.MultiModalItem(OWL, 4, 1), priority=1)
    step(run)
    come(run, "G", 4)
    step(run)
    plan = step(run)
    assert plan.preempted_req_ids == ("V",)
    made = {one.request_id: one.item_indices for one in plan.scheduled_encoder_inputs}
    assert (made, plan.free_encoder_mm_hashes) == ({"H": (0,)}, ())
    encoder = run.spec.snapshot().encoder
    assert encoder is not None
    assert sorted(encoder.freeable) == [CAT, DOG, "elk", OWL]
