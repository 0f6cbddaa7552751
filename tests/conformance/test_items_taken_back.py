"""Items of rows that a step takes back: our engine does with them what the specification does.

Whoever comes outranks those who run, blocks are few, and prompts are items one after the other: so
a step preempts whom it has just given an item, which others may share, or have lost room to.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.program import Answer
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.beside import encoder as rules
from blockstep.spec.vocabulary import (
    Config,
    EncoderOffer,
    MultiModalItem,
    Policy,
    Request,
    Schedule,
    SpecMethod,
    Submit,
)

NUM_RUNS = 70
LENGTHS = dict(zip("abcdefghi", (1, 1, 1, 1, 1, 1, 2, 2, 3), strict=True))


def draw_config(random: Random) -> Config:
    """Few blocks, rows of a token or two, and room for two or three items."""
    depth, with_head = random.choice((1, 1, 2, 3)), random.random() < 0.3
    return Config(
        num_blocks=random.randint(9, 14),
        block_size=random.randint(1, 2),
        max_num_seqs=6,
        max_num_batched_tokens=random.randint(4, 8),
        long_prefill_token_threshold=random.randint(1, 2),
        max_model_len=20,
        policy=Policy.PRIORITY,
        enable_prefix_caching=random.random() < 0.3,
        scheduler_reserve_full_isl=False,
        spec_method=SpecMethod.EAGLE if with_head else SpecMethod.NONE,
        num_speculative_tokens=1 if with_head else 0,
        max_frames_in_flight=depth,
        async_scheduling=depth > 1,
        encoder_compute_budget=random.randint(3, 7),
        encoder_cache_size=random.randint(3, 7),
    )


def draw_request(random: Random, number: int, before: Request | None, ahead: int) -> Request:
    """One that outranks those before it, most often; items with seldom a token between two.

    Half of them have the items of the one before, and `ahead` tokens less in front: then both come
    to an item at once.
    """
    items: list[MultiModalItem] = []
    if before is not None and random.random() < 0.5:
        items = [replace(item, offset=item.offset - ahead) for item in before.items]
    if not items or items[0].offset < 0:
        items, end = [], random.randint(0, 4)
        while end < 8:
            name = random.choice(tuple(LENGTHS))
            items.append(MultiModalItem(name, end, LENGTHS[name]))
            end += LENGTHS[name] + (random.random() < 0.2)
    num_prompt = random.randint(1, 12)
    kept = tuple([item for item in items if item.offset + item.length <= num_prompt])
    priority = -number if random.random() < 0.8 else random.randint(-number, 0)
    name = f"{random.choice('pqr')}{number}"
    return Request(name, (number,) * num_prompt, 2, priority=priority, items=kept)


def play(seed: int) -> None:
    """A run of some dozens of steps, before most of which somebody comes."""
    random, before = Random(seed), None
    config = draw_config(random)
    run = LockStep.start(config, load_engine("host"))
    for number in range(30):
        if random.random() < 0.8:
            before = draw_request(random, number, before, config.long_prefill_token_threshold)
            assert run.perform(Submit(before)) == [], seed
        if random.random() < 0.1:
            offered = tuple(sorted(random.sample(tuple(LENGTHS), 2)))
            assert run.perform(EncoderOffer(offered)) == [], seed
        assert run.perform(Schedule()) == [], seed
        if random.random() < 0.8:
            assert run.perform(Answer()) == [], seed


def test_items_of_rows_that_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    get_with_evicted = rules.get_with_evicted

    def note(encoder: rules.Encoder) -> rules.Encoder:
        after = get_with_evicted(encoder)
        returned.append(len(encoder.evicted) - len(after.evicted))
        return after

    monkeypatch.setattr(rules, "get_with_evicted", note)
    for seed in range(NUM_RUNS):
        play(seed)
    assert sum(number > 0 for number in returned) > 10, "items that had made room return"
    assert max(returned) > 1, "several at once, too"
