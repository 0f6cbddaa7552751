"""Chunks with items: the host engine ends them where the specification does.

Chunks end between and within items, compute budget and cache fit one or two of them, and items may
not be cut, are read in part, or are in a store: random programs seldom combine these.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.protocol.program import Answer
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec import vocabulary as v

NUM_RUNS = 60
LENGTHS = dict(zip("abcdefg", (1, 1, 2, 2, 3, 3, 4), strict=True))
MASKS = {
    "b": (True,),
    "d": (False, True),
    "e": (True, False, False),
    "f": (True, False, False),
    "g": (False, True, False, False),
}


def draw_config(random: Random) -> v.Config:
    """Draw chunks of one to nine tokens; budget and cache fit the longest item, or two."""
    is_encoder_decoder, with_head = random.random() < 0.2, random.random() < 0.4
    return v.Config(
        num_blocks=60,
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=64 if is_encoder_decoder else random.randint(4, 20),
        long_prefill_token_threshold=0
        if is_encoder_decoder
        else random.choice((1, 2, 3, 4, 9, 9, 9)),
        enable_chunked_prefill=not is_encoder_decoder,
        max_model_len=24,
        is_encoder_decoder=is_encoder_decoder,
        disable_chunked_mm_input=is_encoder_decoder or random.random() < 0.5,
        enable_prefix_caching=not is_encoder_decoder and random.random() < 0.5,
        spec_method=v.SpecMethod.EAGLE
        if with_head and not is_encoder_decoder
        else v.SpecMethod.NONE,
        num_speculative_tokens=1 if with_head and not is_encoder_decoder else 0,
        encoder_compute_budget=random.choice((4, 4, 4, 5, 6)),
        encoder_cache_size=random.randint(4, 8),
    )


def draw_request(random: Random, number: int, config: v.Config) -> v.Request:
    """A prompt with items close to each other, some twice, or with one encoder-decoder input."""
    request = v.Request(f"r{number}", (random.randint(1, 2),) * random.randint(1, 16), 2)
    items: list[v.MultiModalItem] = []
    at = random.randint(0, 3)
    while True:
        name = random.choice(tuple(LENGTHS))
        item = v.MultiModalItem(name, at, LENGTHS[name], MASKS.get(name, ()))
        if config.is_encoder_decoder:
            return replace(request, items=(replace(item, offset=0, is_embed=()),))
        at += item.length + random.choice((0, 0, 1, 2))
        if item.offset + item.length > len(request.prompt_token_ids):
            return replace(request, items=tuple(items))
        items.append(item)


def play(seed: int) -> Counter[str]:
    """Run some dozens of steps and return the counts of the coverage goals."""
    random = Random(seed)
    config = draw_config(random)
    run = LockStep.start(config, load_engine("host"))
    for number in range(25):
        if random.random() < 0.5:
            assert run.perform(v.Submit(draw_request(random, number, config))) == [], seed
        if random.random() < 0.15:
            offered = tuple(sorted(random.sample(tuple(LENGTHS), 3)))
            assert run.perform(v.EncoderOffer(offered)) == [], seed
        if random.random() < 0.05:
            assert run.perform(v.Abort((f"r{random.randint(0, number)}",))) == [], seed
        assert run.perform(v.Schedule()) == [], seed
        if random.random() < 0.9:
            assert run.perform(Answer()) == [], seed
    return run.witnesses


def test_chunks_end_at_items_where_the_specification_ends_them() -> None:
    reached: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        reached += play(seed)
    assert reached["encoder_chunk_stops_before_an_item"] > 50
    assert reached["encoder_item_loaded"] > 30
    assert reached["encoder_row_waits_for_an_item"] > 3


def test_a_chunk_that_begins_within_a_whole_item_waits_for_its_rest() -> None:
    """A hit ends within the item, and the budget has two tokens for the three that are left."""
    config = v.Config(
        num_blocks=20,
        block_size=2,
        max_model_len=24,
        max_num_batched_tokens=4,
        disable_chunked_mm_input=True,
        encoder_compute_budget=4,
        encoder_cache_size=8,
    )
    items = (v.MultiModalItem("h", 1, 4),)
    run = LockStep.start(config, load_engine("host"))
    assert run.perform(v.Submit(v.Request("a", (1, 1, 1, 1, 1, 1), 1, items=items))) == []
    while run.spec.state.requests:
        assert run.perform(v.Schedule()) == run.perform(Answer()) == []
    assert run.perform(v.EncoderReset()) == []
    for name in ("c", "d"):
        assert run.perform(v.Submit(v.Request(name, (3,), 9))) == []
    assert run.perform(v.Schedule()) == run.perform(Answer()) == []
    assert run.perform(v.Submit(v.Request("b", (1, 1, 2, 2, 2, 2), 1, items=items))) == []
    assert run.perform(v.Schedule()) == []
    assert [row.request_id for row in run.plans[-1].rows] == ["c", "d"]
    assert run.perform(Answer()) == run.perform(v.Abort(("c",))) == run.perform(v.Schedule()) == []
    (row,) = run.plans[-1].new
    assert (row.num_computed_tokens, row.num_scheduled_tokens) == (2, 3)
