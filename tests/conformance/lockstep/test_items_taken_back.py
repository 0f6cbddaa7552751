"""Items of withdrawn rows and of restarted sessions: the host engine agrees with the specification.

In random runs a new request outranks the running ones, blocks are few, and prompts are items one
after the other. So a step preempts a request that has just got an item, which another request may
share, or for which the item of another request was evicted.
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
    """Return a request that mostly outranks earlier ones, with seldom a token between two items.

    Half of the requests have the items of the request before, with `ahead` tokens less in front of
    them: then both requests reach an item in the same step.
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
    """Run some dozens of steps; a new request is submitted before most of them."""
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


def test_items_of_withdrawn_rows_are_those_of_the_specification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned: list[int] = []
    get_with_evicted = cache.get_with_evicted

    def note(encoder: cache.Encoder) -> cache.Encoder:
        after = get_with_evicted(encoder)
        returned.append(len(encoder.evicted) - len(after.evicted))
        return after

    monkeypatch.setattr(cache, "get_with_evicted", note)
    for seed in range(NUM_RUNS):
        play(seed)
    assert sum(number > 0 for number in returned) > 10, "evicted items return"
    assert max(returned) > 1, "also several at once"


CAT, DOG, OWL = "cat", "dog", "owl"
NARROW = v.Config(
    num_blocks=5,
    block_size=2,
    policy=v.Policy.PRIORITY,
    enable_prefix_caching=False,
    encoder_compute_budget=1,
    encoder_cache_size=1,
)
"""The encoder encodes an item of one embedding per step, and its cache keeps one."""


def begin(config: v.Config) -> LockStep:
    return LockStep.start(config, load_engine("host"))


def submit(
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
    submit(run, "D", 8, v.MultiModalItem(CAT, 1, 2), v.MultiModalItem(DOG, 4, 1), resumable=True)
    step(run)
    step(run)
    others = (v.MultiModalItem(DOG, 1, 1), v.MultiModalItem(OWL, 2, 3), v.MultiModalItem(DOG, 5, 1))
    submit(run, "G", 11, *others)
    step(run)
    update = v.StreamingUpdate(v.Request("D", (1,), max_tokens=1, resumable=True))
    assert run.perform(update) == []
    (row,) = plan_step(run).new
    assert isinstance(row, v.NewRow)
    assert (row.request_id, row.num_computed_tokens, row.num_scheduled_tokens) == ("D", 0, 1)


def test_an_item_evicted_for_a_withdrawn_row_returns() -> None:
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
    submit(run, "A", 4, *items)
    plan_step(run)
    submit(run, "B", 1, max_tokens=2, priority=-1)
    plan_step(run)
    plan = plan_step(run)
    assert (plan.preempted_req_ids, plan.free_encoder_mm_hashes) == (("A",), ())
    encoder = run.spec.snapshot().encoder
    assert encoder is not None
    assert encoder.freeable == (DOG,)


def test_an_item_evicted_for_a_withdrawn_row_returns_without_drafts() -> None:
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
    submit(run, "B", 4, v.MultiModalItem(CAT, 0, 1), v.MultiModalItem(DOG, 3, 1))
    plan_step(run)
    submit(run, "A", 1, max_tokens=2)
    plan_step(run)
    plan_step(run)
    plan = plan_step(run)
    assert (plan.preempted_req_ids, plan.free_encoder_mm_hashes) == (("B",), ())


def test_another_request_encodes_the_item_of_a_withdrawn_row() -> None:
    """The row of G before it has a hit of another item, which does not change."""
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
    submit(run, "Z", 1, v.MultiModalItem(DOG, 0, 1))
    step(run)
    submit(run, "A", 4, v.MultiModalItem(CAT, 3, 1), priority=2)
    step(run)
    submit(run, "G", 3, v.MultiModalItem(DOG, 2, 1))
    submit(run, "H", 3, v.MultiModalItem(CAT, 2, 1))
    step(run)
    submit(run, "B", 2, priority=1)
    step(run)
    plan = step(run)
    assert plan.preempted_req_ids == ("A",)
    made = {one.request_id: one.item_indices for one in plan.scheduled_encoder_inputs}
    assert made == {"H": (0,)}


def test_an_item_that_was_encoded_again_does_not_return_with_the_others() -> None:
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
    submit(
        run, "Z", 4, *[v.MultiModalItem(n, at, 1) for at, n in enumerate((CAT, DOG, OWL, "elk"))]
    )
    step(run)
    step(run)
    submit(run, "V", 9, v.MultiModalItem("large", 6, 3), priority=2)
    step(run)
    submit(run, "H", 5, v.MultiModalItem(OWL, 4, 1), priority=1)
    step(run)
    submit(run, "G", 4)
    step(run)
    plan = step(run)
    assert plan.preempted_req_ids == ("V",)
    made = {one.request_id: one.item_indices for one in plan.scheduled_encoder_inputs}
    assert (made, plan.free_encoder_mm_hashes) == ({"H": (0,)}, ())
    encoder = run.spec.snapshot().encoder
    assert encoder is not None
    assert sorted(encoder.freeable) == [CAT, DOG, "elk", OWL]
