"""The sampler: tokens follow the requested distribution and depend on logits, seed and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_support.models import Checkpoint
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from blockstep.impl.engine import LLM, SamplingParams, SettingsError
from blockstep.impl.engine.sampler import NO_TOKEN, Draw, get_columns, get_logprobs, sample
from blockstep.kernels.sampling import compute_log_weights

CHI_SQUARE_999 = {9: 27.88, 15: 37.70}
"""Chi-square values that a right sampler exceeds once in 1,000, by degrees of freedom."""


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def make_logits(num_rows: int = 1, vocab_size: int = 16, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.randn(num_rows, vocab_size) * 2


def get_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the distribution from which each row is drawn."""
    columns = get_columns([Draw(one, 0, 0) for one in params], "cpu")
    del columns["seeds"], columns["indices"]
    return compute_log_weights(logits, **columns).softmax(-1)


# Probabilities.


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_k=999),
        SamplingParams(temperature=1.5, top_p=0.6),
        SamplingParams(temperature=1.0, top_p=0.01),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=1.5, top_p=0.6, min_p=0.3),
    ],
)
def test_probabilities_equal_those_after_the_cuts_of_transformers(params: SamplingParams) -> None:
    """The cuts are applied in the order of vLLM: min_p, top_k, top_p."""
    logits = make_logits(8, 64)
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    mixed = [SamplingParams(temperature=2.0, top_k=3), *[params] * 8]
    probs = get_probabilities(torch.cat((logits[:1], logits)), mixed)[1:]
    torch.testing.assert_close(probs, scores.softmax(-1), rtol=1e-5, atol=1e-6)


def test_tokens_tied_with_the_last_of_top_k_are_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0]])
    probs = get_probabilities(logits, [SamplingParams(temperature=1.0, top_k=2)])
    assert (probs > 0).tolist() == [[False, True, True, True, True]]


# Draws.


def test_columns_have_the_params_of_each_row() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125),
        SamplingParams(temperature=9e-6, top_k=2**31 - 1),
    ]
    draws = [
        Draw(one, seed, 7 + seed % 5) for one, seed in zip(params, (3, 2**63 + 1, 0), strict=True)
    ]
    columns = get_columns(draws, "cpu")
    assert {name: column.tolist() for name, column in columns.items()} == {
        "seeds": [3, 1 - 2**63, 0],
        "indices": [10, 11, 7],
        "temperature": [0.0, 0.5, 0.0],
        "top_p": [1.0, 0.25, 1.0],
        "min_p": [0.0, 0.125, 0.0],
        "top_k": [0, 3, 2**31 - 1],
    }
    assert all(column.is_contiguous() for column in columns.values())
    greedy = get_columns(draws[::2], "cpu")
    assert {name: (len(column), column.dtype) for name, column in greedy.items()} == {
        name: (2, column.dtype) for name, column in columns.items()
    }
    assert greedy["temperature"].tolist() == [0.0, 0.0]


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = make_logits(1, 16).expand(50_000, 16)
    params = SamplingParams(temperature=1.2)
    tokens = sample(logits, [Draw(params, 5, place) for place in range(50_000)])
    expected = get_probabilities(logits[:1], [params])[0].numpy() * 50_000
    assert expected.min() > 5
    assert chi_square(np.bincount(tokens, minlength=16), expected) < CHI_SQUARE_999[15]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = make_logits(1, 16).expand(5_000, 16)
    params = SamplingParams(temperature=1.0, top_k=4)
    tokens = sample(logits, [Draw(params, seed, 0) for seed in range(5_000)])
    assert set(tokens.tolist()) == set(logits[0].topk(4).indices.tolist())


def test_temperature_0_takes_the_most_likely_token() -> None:
    logits = make_logits(6, 16)
    greedy, drawn = SamplingParams(), SamplingParams(temperature=3.0)
    draws = [Draw(greedy if row % 2 else drawn, 1, row) for row in range(6)]
    tokens = sample(logits, draws)
    assert tokens[1::2].tolist() == logits.argmax(-1)[1::2].tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-38, 9e-6])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_tiny_temperature_takes_the_most_likely_token(
    temperature: float, cuts: dict[str, Any]
) -> None:
    logits = make_logits(6, 16)
    params = SamplingParams(temperature=temperature, **cuts)
    tokens = sample(logits, [Draw(params, 1, row) for row in range(6)])
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e30])
def test_probabilities_are_finite_at_extreme_temperatures(temperature: float) -> None:
    probs = get_probabilities(make_logits(6, 16), [SamplingParams(temperature=temperature)] * 6)
    assert torch.isfinite(probs).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(6))


def test_the_most_likely_token_is_kept_with_the_smallest_top_p() -> None:
    logits = make_logits(1, 16)
    probs = get_probabilities(logits, [SamplingParams(temperature=1.0, top_p=1e-300)])
    assert probs.argmax() == logits.argmax()
    assert probs.max() == 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_token_is_chosen_from_logits_that_overflowed(
    params: SamplingParams, value: float
) -> None:
    logits = make_logits(3, 16)
    logits[1, 5] = value
    logits[2, 5] = -torch.inf
    tokens = sample(logits, [Draw(params, 1, 0)] * 3).tolist()
    assert tokens[1] == NO_TOKEN
    assert tokens[0] >= 0
    assert tokens[2] not in (5, NO_TOKEN)


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    logits = make_logits(2, 16)
    rows = get_logprobs(logits, torch.tensor([3, 4]), 2)
    for row, token in ((0, 3), (1, 4)):
        expected = logits[row].log_softmax(-1)
        best = expected.topk(2).indices.tolist()
        assert rows[row].keys() == {token, *best}
        assert all(rows[row][t] == pytest.approx(float(expected[t])) for t in rows[row])


# In the engine.

DRAWN = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    return [one.token_ids for one in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1},
        {"block_size": 4, "num_blocks": 20, "max_model_len": 76, "max_num_batched_tokens": 9},
        {"spec_method": "ngram", "num_speculative_tokens": 3},
        {"spec_method": "draft_model", "num_speculative_tokens": 3},
        {"spec_method": "draft_model", "num_speculative_tokens": 3, "max_frames_in_flight": 2},
    ],
)
def test_a_seed_gives_the_same_tokens_whatever_else_runs(
    qwen3: Checkpoint, prompts: list[list[int]], settings: dict[str, Any]
) -> None:
    (alone,) = generate(LLM(qwen3.folder), [prompts[5]], [DRAWN])
    if settings.get("spec_method") == "draft_model":
        settings = {**settings, "draft_model": qwen3.draft_folder}
    llm = LLM(qwen3.folder, **settings)
    others = [replace(DRAWN, seed=number, temperature=1.5) for number in range(9)]
    company = generate(llm, [*prompts[10:19], prompts[5]], [*others, DRAWN])
    assert company[-1] == alone
    if "spec_method" in settings:
        stats = llm.get_stats()
        assert stats.drafts_scheduled > stats.drafts_accepted


def test_all_drafts_are_accepted_if_the_draft_model_is_the_model(
    qwen3: Checkpoint, prompts: list[list[int]]
) -> None:
    llm = LLM(
        qwen3.folder,
        spec_method="draft_model",
        num_speculative_tokens=3,
        draft_model=qwen3.folder,
        max_num_seqs=1,
    )
    generate(llm, prompts[:8], [DRAWN] * 8)
    stats = llm.get_stats()
    assert stats.drafts_accepted == stats.drafts_scheduled > 0


def test_other_seeds_give_other_tokens(qwen3: Checkpoint, prompts: list[list[int]]) -> None:
    params = [replace(DRAWN, seed=number) for number in range(8)]
    texts = generate(LLM(qwen3.folder), [prompts[5]] * 8, params)
    assert len(set(texts)) == 8


def test_without_a_seed_runs_repeat_but_requests_do_not(
    qwen3: Checkpoint, prompts: list[list[int]]
) -> None:
    params = [replace(DRAWN, seed=None)] * 4
    first = generate(LLM(qwen3.folder, seed=1), [prompts[5]] * 4, params)
    assert len(set(first)) == 4
    assert generate(LLM(qwen3.folder, seed=1), [prompts[5]] * 4, params) == first
    assert generate(LLM(qwen3.folder, seed=2), [prompts[5]] * 4, params) != first


def test_tokens_have_the_distribution_of_the_model(
    qwen3: Checkpoint, prompts: list[list[int]]
) -> None:
    num_draws = 1500
    params = [
        SamplingParams(max_tokens=1, temperature=1.0, top_k=10, seed=n) for n in range(num_draws)
    ]
    texts = generate(LLM(qwen3.folder), [prompts[5]] * num_draws, params)
    with torch.no_grad():
        logits = qwen3.model(torch.tensor([prompts[5]])).logits[0, -1:]
    expected = get_probabilities(logits, params[:1])[0].numpy() * num_draws
    counts = np.bincount([text[0] for text in texts], minlength=len(expected))
    possible = expected > 0
    assert possible.sum() == 10
    assert counts[~possible].sum() == 0
    assert chi_square(counts[possible], expected[possible]) < CHI_SQUARE_999[9]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": "3"},
        {"max_tokens": 2.5},
        {"max_tokens": 2**31},
        {"temperature": "x"},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e31},
        {"top_k": 2.5},
        {"top_p": None},
        {"top_p": float("nan")},
        {"min_p": "x"},
        {"seed": 1.5},
        {"stop": (1,)},
        {"stop": "END"},
        {"stop_token_ids": 5},
        {"stop_token_ids": ("a",)},
        {"stop_token_ids": (-1,)},
        {"ignore_eos": "no"},
        {"logprobs": 2.5},
        {"logprobs": True},
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
        {"seed": -1},
        {"stop": ("",)},
        {"logprobs": -1},
    ],
)
def test_wrong_params_are_rejected_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"{next(iter(wrong))} = "):
        SamplingParams(**wrong)
