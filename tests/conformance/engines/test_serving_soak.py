"""Random settings and clients under check: each output equals that of a single request.

Every other model has a layer with a window, and so two KV groups.
"""

from __future__ import annotations

import random

import pytest
from engine_support.drawn import draw_settings
from engine_support.models import VOCAB_SIZE, Checkpoint, make_checkpoint, make_prompts

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import LLM, RequestError, SamplingParams
from blockstep.spec.vocabulary import FinishReason

NUM_TESTS, NUM_RUNS = 3, 40
"""Number of runs in `make test`, and in all with `make soak`."""
Asked = tuple[str, list[int], SamplingParams]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    names = ("qwen3", "qwen2")
    return [make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in names]


def run_clients(draw: random.Random, llm: LLM) -> list[Asked]:
    """Submit requests, abort some, and serve the others to their end."""
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
def test_every_output_equals_that_of_a_single_request(
    checkpoints: list[Checkpoint], seed: int
) -> None:
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
