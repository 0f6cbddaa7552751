"""The Triton kernels of rejection sampling: first all rows of logits at once, then sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels import noise
from blockstep.kernels.dispatch import on_device_of_first
from blockstep.kernels.noise_triton import compute_key, compute_uniform

ACCEPT = tl.constexpr(noise.ACCEPT)
CHOOSE = tl.constexpr(noise.CHOOSE)
SIZE = 2048
"""Tokens of the vocabulary that a program looks at together when it draws."""
GREEDY_SIZE = 8192
"""When it looks for the greatest: it waits for memory alone, so much of it must be on its way."""


@triton.jit
def pick(values, indices):
    """The greatest value and the lowest index that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, indices, 2147483647), 0)


@triton.jit
def find_best(logits, vocab_size, SIZE: tl.constexpr):
    """Argmax of a row; each lane keeps its own until the end."""
    lane = tl.arange(0, SIZE)
    best = tl.full((SIZE,), float("-inf"), tl.float32)
    at = lane
    for start in range(0, vocab_size, SIZE):
        token = start + lane
        x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        better = x > best
        best = tl.where(better, x, best)
        at = tl.where(better, token, at)
    _, index = pick(best, at)
    return index


@triton.jit
def sum_exponentials(logits, temperature, vocab_size, SIZE: tl.constexpr):
    """The maximum of a row and the sum of `exp(x - maximum)`, in one read."""
    lane = tl.arange(0, SIZE)
    most = tl.full((SIZE,), float("-inf"), tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for start in range(0, vocab_size, SIZE):
        token = start + lane
        x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        x = x / temperature
        higher = tl.maximum(most, x)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.exp(x - base)
        most = higher
    maximum = tl.max(most, 0)
    return maximum, tl.sum(total * tl.exp(most - maximum), 0)


@triton.jit
def choose_token(
    logits, proposal, draft, key, temperature, maximum, total, vocab_size, residual,
    HAS_PROBS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The clock that rings first, with rates `p`, or `max(p - q, 0)` if `residual`; its speed."""
    lane = tl.arange(0, SIZE)
    best = tl.full((SIZE,), -1.0, tl.float64)
    at = lane
    for start in range(0, vocab_size, SIZE):
        token = start + lane
        mask = token < vocab_size
        x = tl.load(logits + token, mask=mask, other=float("-inf")).to(tl.float32)
        rate = tl.exp(x / temperature - maximum) / total
        if residual > 0:
            if HAS_PROBS:
                q = tl.load(proposal + token, mask=mask, other=0.0)
            else:
                q = tl.where(token == draft, 1.0, 0.0)
            rate = tl.maximum(rate - q, 0.0)
        speed = rate.to(tl.float64) / -tl.log(compute_uniform(key, token))
        better = mask & (speed > best)
        best = tl.where(better, speed, best)
        at = tl.where(better, token, at)
    return pick(best, at)


@triton.jit
def decide_kernel(
    accepted, chosen, target_logits, draft_token_ids, cu_num_drafts, temperatures, seeds, positions,
    draft_probs, logits_stride, probs_stride, vocab_size, HAS_PROBS: tl.constexpr,
    SIZE: tl.constexpr, GREEDY_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (sequence, step): whether a draft is accepted, and the token in its place if not."""
    sequence = tl.program_id(0)
    step = tl.program_id(1)
    first = tl.load(cu_num_drafts + sequence)
    num_drafts = tl.load(cu_num_drafts + sequence + 1) - first
    if step <= num_drafts:
        row = (first + sequence + step).to(tl.int64)
        logits = target_logits + row * logits_stride
        temperature = tl.load(temperatures + sequence)
        draft = tl.full((), -1, tl.int64)
        if step < num_drafts:
            draft = tl.load(draft_token_ids + first + step)
        keep = 0
        token = tl.zeros((), tl.int32)
        if temperature == 0.0:
            token = find_best(logits, vocab_size, GREEDY_SIZE)
            keep = (token == draft).to(tl.int32)
        else:
            seed = tl.load(seeds + sequence)
            position = tl.load(positions + sequence) + step
            maximum, total = sum_exponentials(logits, temperature, vocab_size, SIZE)
            proposal = draft_probs + (first + step).to(tl.int64) * probs_stride
            if step < num_drafts:
                x = tl.load(logits + draft).to(tl.float32)
                p = tl.exp(x / temperature - maximum) / total
                q = tl.full((), 1.0, tl.float32)
                if HAS_PROBS:
                    q = tl.load(proposal + draft)
                key = compute_key(seed, position, ACCEPT)
                uniform = compute_uniform(key, tl.zeros((), tl.int64))
                keep = (uniform * q.to(tl.float64) < p.to(tl.float64)).to(tl.int32)
            if keep == 0:
                key = compute_key(seed, position, CHOOSE)
                residual = (step < num_drafts).to(tl.int32)
                speed, token = choose_token(
                    logits, proposal, draft, key, temperature, maximum, total, vocab_size, residual,
                    HAS_PROBS, SIZE,
                )  # fmt: skip
                if speed <= 0.0:
                    # Rounding alone rejected: nothing is left of p - q.
                    speed, token = choose_token(
                        logits, proposal, draft, key, temperature, maximum, total, vocab_size, 0,
                        HAS_PROBS, SIZE,
                    )  # fmt: skip
        tl.store(accepted + row, keep)
        tl.store(chosen + row, token)


@triton.jit(do_not_specialize=["width"])
def finish_kernel(
    token_ids, num_sampled, accepted, chosen, draft_token_ids, cu_num_drafts, width,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (sequence): its drafts up to the first that is not accepted, and one token more."""
    sequence = tl.program_id(0)
    first = tl.load(cu_num_drafts + sequence)
    num_drafts = tl.load(cu_num_drafts + sequence + 1) - first
    step = tl.arange(0, WIDTH)
    is_draft = step < num_drafts
    keep = tl.load(accepted + first + sequence + step, mask=is_draft, other=0)
    num_accepted = tl.min(tl.where(keep > 0, WIDTH, step), 0)
    num_accepted = tl.minimum(num_accepted, num_drafts)
    draft = tl.load(draft_token_ids + first + step, mask=is_draft, other=-1)
    last = tl.load(chosen + first + sequence + num_accepted).to(tl.int64)
    token = tl.where(step < num_accepted, draft, tl.where(step == num_accepted, last, -1))
    tl.store(token_ids + sequence.to(tl.int64) * width + step, token, mask=step < width)
    tl.store(num_sampled + sequence, num_accepted + 1)


@on_device_of_first
def launch_rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_drafts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_probs: Tensor | None,
    max_num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """Two launches: a program per row of logits, then one per sequence."""
    num_rows, vocab_size = target_logits.shape
    num_seqs, width, device = len(seeds), max_num_drafts + 1, target_logits.device
    accepted = torch.empty(num_rows, dtype=torch.int32, device=device)
    chosen = torch.empty(num_rows, dtype=torch.int32, device=device)
    token_ids = torch.empty((num_seqs, width), dtype=torch.int64, device=device)
    num_sampled = torch.empty(num_seqs, dtype=torch.int32, device=device)
    most = triton.next_power_of_2(vocab_size)
    decide_kernel[(num_seqs, width)](
        accepted, chosen, target_logits, draft_token_ids, cu_num_drafts, temperature, seeds,
        positions, temperature if draft_probs is None else draft_probs, target_logits.stride(0),
        0 if draft_probs is None else draft_probs.stride(0), vocab_size,
        HAS_PROBS=draft_probs is not None, SIZE=min(SIZE, most), GREEDY_SIZE=min(GREEDY_SIZE, most),
        num_warps=8,
    )  # fmt: skip
    finish_kernel[(num_seqs,)](
        token_ids, num_sampled, accepted, chosen, draft_token_ids, cu_num_drafts, width,
        WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return token_ids, num_sampled
