"""Sampling: draws a token for each row of logits on the device, without sorting the vocabulary.

    logits -> min-p -> top-k -> top-p -> the exponential clock that rings first

Token `v` has the weight `w[v] = exp((logits[v] - max) / temperature)`, or 0 if a cut removes it. Of
exponential clocks with these rates, clock `v` rings first with probability `w[v] / sum(w)`. The
clocks are a function of the row's seed and index and of the token id (`noise`), so nothing has to
be summed in the order of the vocabulary, and a row draws the same token in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockstep.kernels.arguments import FLOATS, Arguments, check_range
from blockstep.kernels.dispatch import find_kernels
from blockstep.kernels.noise import CHOOSE, compute_exponential, compute_keys

NO_TOKEN = -1
"""The token of a row whose largest logit is not finite."""
TEMPERATURE_MIN = 1e-30
"""Smallest temperature above 0 that is used as given: float32 can hold its inverse."""


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    indices: Tensor,
) -> Tensor:
    """Return the token of each row, `[num_rows]` int64, or `NO_TOKEN` (-1).

    logits: `[num_rows, vocab_size]`, float32, float16 or bfloat16, with a contiguous last
    dimension; -inf for tokens that are not allowed. All others are `[num_rows]`:

    - temperature (float32): 0 takes the most likely token, the lowest id among equals. Above 0 a
      token is drawn from `softmax(logits / temperature)` after these cuts, in this order:
    - min_p (float32, 0 to 1): keep tokens with at least this share of the most likely one's
      probability; 0 keeps all.
    - top_k (int32): keep the `k` most likely tokens, and those that equal the last of them; 0, or
      `vocab_size` and more, keeps all.
    - top_p (float32, above 0, at most 1): keep a token if those that are more likely have less than
      this share of the probability that is left; 1 keeps all. Equal tokens are kept or cut
      together, and the most likely token always stays.
    - seeds, indices (int64): the request's seed, and the number of its output tokens before this
      one. The token is a function of the row's logits, parameters, seed and index alone.

    A row whose largest logit is not finite (NaN, infinity, or all -inf) gives `NO_TOKEN`. Nothing
    is read on the host and no shape depends on values, so a CUDA graph can hold the call. Bound:
    one read of the logits without top_k and top_p; with them some more reads, from the L2 cache.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; on the CPU also a parameter
            outside its range.
    """
    parameters = (temperature, top_k, top_p, min_p)
    _check_arguments(logits, *parameters, seeds, indices)
    if len(logits) and (kernels := find_kernels("sampling", logits)):
        tokens: Tensor = kernels.launch_sample_tokens(logits, *parameters, seeds, indices)
        return tokens
    best, tokens = logits.max(dim=-1)
    drawn = (temperature > 0).nonzero()[:, 0]
    if len(drawn):
        scores = compute_log_weights(logits[drawn], *(column[drawn] for column in parameters))
        row, token = (scores > -torch.inf).nonzero(as_tuple=True)
        keys = compute_keys(seeds[drawn], indices[drawn], CHOOSE)
        scores[row, token] -= compute_exponential(keys[row], token).log()
        tokens[drawn] = scores.argmax(dim=-1)
    return tokens.masked_fill_(~best.isfinite(), NO_TOKEN)


def compute_log_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return the logarithms of the weights that each row draws from, `[num_rows, vocab_size]`
    float32.

    They are `(logits - max) / temperature`, and -inf if a cut removes the token; their softmax is
    the distribution. Arguments are those of `sample_tokens`, with temperatures above 0.
    """
    vocab_size = logits.shape[1]
    logits = logits.float()
    best, inverse = (
        logits.amax(1, keepdim=True),
        1 / temperature.clamp(min=TEMPERATURE_MIN)[:, None],
    )
    weights = (logits - best) * inverse
    cuts_k = (top_k > 0) & (top_k < vocab_size)
    if not bool((cuts_k | (top_p < 1) | (min_p > 0)).any()):
        return weights
    ordered = logits.sort(dim=-1, descending=True).values
    least = ordered.gather(1, torch.where(cuts_k, top_k, vocab_size).long()[:, None] - 1)
    floor, top_p = min_p.log()[:, None], top_p[:, None]
    kept = (ordered >= least) & ((ordered - best) * inverse >= floor)
    mass = (((ordered - best) * inverse).exp() * kept).double().cumsum(dim=-1)
    last = (mass >= top_p * mass[:, -1:]).int().argmax(dim=-1, keepdim=True)
    least = torch.where(top_p < 1, torch.maximum(least, ordered.gather(1, last)), least)
    return weights.masked_fill((logits < least) | (weights < floor), -torch.inf)


def _check_arguments(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    indices: Tensor,
) -> None:
    """Refuse wrong arguments, before anything is launched."""
    arguments = Arguments()
    arguments.check("logits", logits, "num_rows vocab_size", *FLOATS, rows=True)
    if arguments["vocab_size"] == 0:
        raise ValueError("logits: must have a token in every row, but vocab_size is 0; pass some")
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32), ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32), ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64), ("indices", indices, torch.int64),
    ):  # fmt: skip
        arguments.check(name, tensor, "num_rows", dtype, rows=True)
    check_range("top_k", top_k, 0, 2**31, "numbers of tokens")
    if logits.is_cuda:
        return
    for name, ok, rule in (
        ("temperature", (temperature >= 0) & temperature.isfinite(), "finite and 0 or more"),
        ("top_p", (top_p >= 0) & (top_p <= 1), "from 0 to 1"),
        ("min_p", (min_p >= 0) & (min_p <= 1), "from 0 to 1"),
    ):
        if not bool(ok.all()):
            raise ValueError(f"{name}: must be {rule} in every row; change the row's value")
