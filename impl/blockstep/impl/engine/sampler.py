"""Sampler: from logits to tokens. What is drawn depends on the logits, a seed and a place alone.

    logits -> / temperature -> min-p -> top-k -> top-p -> cumulated probabilities
    seed, index of the output token -> one uniform number -> the token where it falls

There is no generator whose state a request could share with others: the number for an output token
is a hash of the request's seed and of the token's index. So a token does not change with the batch,
with preemption, or with speculation, where a draft is right exactly if it is the token that would
have been drawn. That keeps the distribution without a second draw, and the text as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from blockstep.impl.engine.params import SamplingParams
from blockstep.impl.engine.transfer import to_device

NO_TOKEN = -1
"""Chosen where the logits are not finite."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose."""

    params: SamplingParams
    seed: int
    index: int
    """Output tokens before it."""


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The tokens of `draws`, [num_draws] int64, from `logits` [num_draws, vocab_size] float32.

    `NO_TOKEN` where the likeliest has no finite logit: the numbers of the model overflowed.
    """
    best, tokens = logits.max(dim=-1)
    drawn = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if not drawn:
        return tokens.masked_fill_(~best.isfinite(), NO_TOKEN)
    chosen = [draws[row] for row in drawn]
    rows = to_device(np.array(drawn, np.int64), logits.device)
    cumulated = get_probabilities(logits[rows], [draw.params for draw in chosen]).double().cumsum(1)
    uniform = compute_uniform([draw.seed for draw in chosen], [draw.index for draw in chosen])
    goal = to_device(uniform, logits.device)[:, None] * cumulated[:, -1:]
    tokens[rows] = torch.searchsorted(cumulated, goal, right=True)[:, 0]
    return tokens.masked_fill_(~best.isfinite(), NO_TOKEN)


def get_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """What each row draws from, [num_rows, vocab_size] float32; temperatures are above 0.

    Cut by min_p, then top_k, then top_p of what is left, as in vLLM (`v1/sample/sampler.py`).
    """

    def column(values: Sequence[float], dtype: type = np.float32) -> torch.Tensor:
        return to_device(np.array(values, dtype), logits.device)[:, None]

    scaled = logits / column([row.temperature for row in params])
    if all(row.top_k == 0 and row.top_p == 1 and row.min_p == 0 for row in params):
        return scaled.softmax(dim=-1)
    vocab_size = logits.shape[1]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    least = column([math.log(row.min_p) if row.min_p else -math.inf for row in params])
    ordered = ordered.masked_fill(ordered < ordered[:, :1] + least, -torch.inf)
    last = column([min(row.top_k or vocab_size, vocab_size) - 1 for row in params], np.int64)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last), -torch.inf)
    probs = ordered.softmax(dim=-1)
    above = probs.cumsum(dim=-1) - probs
    top_p = column([row.top_p for row in params])
    probs = probs.masked_fill((above >= top_p) & (above > 0) & (top_p < 1), 0)
    # Back in the order of token ids: where two logits nearly tie, their order is not to be trusted.
    return torch.zeros_like(probs).scatter(1, order, probs / probs.sum(dim=-1, keepdim=True))


def compute_uniform(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """A number in [0, 1) for each seed and index, float64: two rounds of SplitMix64.

    52 bits, so that the product with a total is always below the total.
    """
    mixed = _mix(np.array(seeds, dtype=np.uint64))
    mixed = _mix(mixed + np.array(indices, dtype=np.uint64))
    uniform: np.ndarray = (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return uniform


def _mix(values: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele, Lea, Flood 2014), for each value."""
    mixed: np.ndarray = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def get_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> list[dict[int, float]]:
    """Per row the log probability of its token and of the `num_top` likeliest, by token id.

    Of the model's own distribution, before temperature and cuts.
    """
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    rows = zip(tokens.tolist(), own, ids.tolist(), values.tolist(), strict=True)
    return [
        {token: value, **dict(zip(top, top_values, strict=True))}
        for token, value, top, top_values in rows
    ]
