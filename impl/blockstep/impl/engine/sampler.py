"""Sampler: from logits to tokens, by the parameters of each request.

    logits -> min-p -> top-k -> top-p of softmax(logits / temperature) -> one token

A token is a function of its logits, its request's parameters and seed, and the number of output
tokens before it (`blockstep.kernels.sample_tokens`): requests share no random state. So a token
does not change with the batch, with preemption, or with speculation: a draft is accepted if and
only if it is the token that would have been drawn. That preserves the distribution without a second
draw, and the token sequence as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from blockstep.impl.engine.host_to_device import to_device
from blockstep.impl.engine.params import SamplingParams
from blockstep.kernels import NO_TOKEN, sample_tokens

__all__ = ["NO_TOKEN", "Draw", "get_columns", "get_logprobs", "sample"]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample."""

    params: SamplingParams
    seed: int
    index: int
    """Number of output tokens before it."""


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return the tokens of `draws`, [num_draws] int64, from `logits` [num_draws, vocab_size].

    A token is `NO_TOKEN` if the largest logit is not finite: the model's numbers overflowed.
    """
    return sample_tokens(logits, **get_columns(draws, logits.device))


def get_columns(draws: Sequence[Draw], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the parameters of `sample_tokens` for these draws, each [num_draws] on `device`.

    They are views of one tensor, which is copied to the device at once.
    """
    size = len(draws)
    if all(draw.params.is_greedy for draw in draws):
        packed = torch.zeros((4, size), dtype=torch.int64, device=device)
    else:
        words: np.ndarray = np.empty((4, size), np.int64)
        words[0] = np.array([draw.seed for draw in draws], np.uint64).view(np.int64)
        words[1] = [draw.index for draw in draws]
        floats, params = words[2:].view(np.float32), [draw.params for draw in draws]
        floats[0, :size] = [0 if one.is_greedy else one.temperature for one in params]
        floats[0, size:] = [one.top_p for one in params]
        floats[1, :size] = [one.min_p for one in params]
        words[3:].view(np.int32)[0, size:] = [one.top_k for one in params]
        packed = to_device(words, device)
    halves = packed[2].view(torch.float32)
    return {
        "seeds": packed[0],
        "indices": packed[1],
        "temperature": halves[:size],
        "top_p": halves[size:],
        "min_p": packed[3].view(torch.float32)[:size],
        "top_k": packed[3].view(torch.int32)[size:],
    }


def get_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> list[dict[int, float]]:
    """Return, per row, the log probabilities of its token and of the `num_top` likeliest, by id.

    They are those of the model's own distribution, before temperature, top-k, top-p and min-p.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    rows = zip(tokens.tolist(), own, ids.tolist(), values.tolist(), strict=True)
    return [
        {token: value, **dict(zip(top, top_values, strict=True))}
        for token, value, top, top_values in rows
    ]
