"""Random settings and random clients, under check; each text is what a lone request would get.

Every other model has a layer with a window, and so two KV groups.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_support.models import VOCAB_SIZE, Checkpoint, make_checkpoint, make_prompts

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import LLM, RequestError, SamplingParams
from blockstep.spec.vocabulary import FinishReason

NUM_TESTS, NUM_RUNS = 3, 40
"""Runs that are a test, and those that `make soak` has in all."""
Asked = tuple[str, list[int], SamplingParams]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    names = ("qwen3", "qwen2")
    return [make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in names]


def draw_settings(draw: random.Random, checkpoint: Checkpoint) -> dict[str, Any]:
    """A small pool, mostly, and anything else."""
    block_size, max_model_len = draw.choice((1, 2, 4, 16)), draw.choice((20, 40, 84))
    method = draw.choice(("none", "ngram", "draft_model"))
    num_drafts = 0 if method == "none" else draw.choice((1, 2, 4))
    num_tables = 2 if checkpoint.family == "qwen2" else 1
    needed = num_tables * -(-(max_model_len + 2 * num_drafts) // block_size) + 1
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": needed + draw.choice((0, 0, 1, 5, 40)),
        "max_num_seqs": draw.choice((1, 2, 4, 16)),
        "max_num_batched_tokens": draw.choice((1, 3, 16, 100)),
        "long_prefill_token_threshold": draw.choice((0, 0, 3)),
        "enable_prefix_caching": draw.random() < 0.8,
        "scheduler_reserve_full_isl": draw.random() < 0.5,
        "policy": draw.choice(("fcfs", "priority")),
        "max_frames_in_flight": draw.choice((1, 2, 3)),
        "spec_method": method,
        "num_speculative_tokens": num_drafts,
        "draft_model": checkpoint.draft_folder if method == "draft_model" else None,
    }


def run_clients(draw: random.Random, llm: LLM) -> list[Asked]:
    """Requests come, some are aborted, and all others are served to their end."""
    asked: list[Asked] = []
    for number in range(draw.randrange(5, 20)):
        prompt = draw.choice(make_prompts())[: draw.randrange(1, 50)]
        params = SamplingParams(
            max_tokens=draw.randrange(1, 30),
            temperature=draw.choice((0.0, 0.0, 0.7)),
            seed=number,
            stop_token_ids=(draw.randrange(VOCAB_SIZE),),
        )
        try:
            asked.append((llm.add_request(prompt, params), prompt, params))
        except RequestError:
            continue
        for _ in range(draw.randrange(3)):
            llm.step()
        if draw.random() < 0.15:
            llm.abort(draw.choice(asked)[0])
    while llm.has_unfinished_requests:
        llm.step()
    return asked


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_TESTS),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(NUM_TESTS, NUM_RUNS)),
    ],
)
def test_every_client_gets_its_own_text(checkpoints: list[Checkpoint], seed: int) -> None:
    draw, checkpoint = random.Random(seed), checkpoints[seed % 2]
    settings = draw_settings(draw, checkpoint)
    llm = LLM(checkpoint.folder, check=ServingChecker, **settings)
    asked = run_clients(draw, llm)
    lone = LLM(
        checkpoint.folder, enable_prefix_caching=False, max_model_len=settings["max_model_len"]
    )
    assert asked
    for name, prompt, params in asked:
        made, (expected,) = llm.pop_completion(name), lone.generate(prompt, params)
        if made.finish_reason is FinishReason.ABORT:
            assert made.token_ids == expected.token_ids[: len(made.token_ids)]
        else:
            assert made.token_ids == expected.token_ids
            assert made.finish_reason is expected.finish_reason
