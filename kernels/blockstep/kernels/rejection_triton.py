"""The Triton kernels of rejection sampling: first all rows of logits at once, then sequences.

A greedy row is read in parts by several programs, since rows are few, and one program cannot use a
multiprocessor's whole memory bandwidth. A drawn row is read by one program.
"""

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
"""Tokens of the vocabulary that a program processes at once when it draws."""
PART = 16384
"""Tokens of a greedy row that one program reads, all at once."""
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def pick(values, indices):
    """Return the greatest value and the lowest index that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, indices, FAR), 0)


@triton.jit
def find_best(logits, vocab_size, part, PART: tl.constexpr):
    """Return the greatest logit of a part of a row, and the lowest token that has it; NaN is
    -inf."""
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return pick(tl.where(x == x, x, float("-inf")), token)


@triton.jit
def sum_exponentials(logits, temperature, vocab_size, SIZE: tl.constexpr):
    """Return the maximum of a row and the sum of `exp(x - maximum)`, in one read."""
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
    """Return the token that wins the draw with rates `p`, or `max(p - q, 0)` if `residual`.

    Returns its speed first.
    """
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
    accepted, chosen, peaks, peak_tokens, target_logits, draft_token_ids, cu_num_drafts,
    temperatures, seeds, positions, draft_probs, logits_stride, probs_stride, vocab_size,
    HAS_PROBS: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, step, part): decide whether a draft is accepted, and draw its replacement.

    For a greedy row `finish_kernel` does this, and here the part's greatest logit is stored.
    """
    sequence = tl.program_id(0)
    step = tl.program_id(1)
    part = tl.program_id(2)
    first = tl.load(cu_num_drafts + sequence)
    num_drafts = tl.load(cu_num_drafts + sequence + 1) - first
    if step <= num_drafts:
        row = (first + sequence + step).to(tl.int64)
        logits = target_logits + row * logits_stride
        temperature = tl.load(temperatures + sequence)
        if temperature == 0.0:
            peak, token = find_best(logits, vocab_size, part, PART)
            tl.store(peaks + row * NUM_PARTS + part, peak)
            tl.store(peak_tokens + row * NUM_PARTS + part, token)
        elif part == 0:
            draft = tl.full((), -1, tl.int64)
            if step < num_drafts:
                draft = tl.load(draft_token_ids + first + step)
            keep = 0
            token = tl.zeros((), tl.int32)
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
                    # Rounding alone rejected: p - q is 0 everywhere.
                    speed, token = choose_token(
                        logits, proposal, draft, key, temperature, maximum, total, vocab_size, 0,
                        HAS_PROBS, SIZE,
                    )  # fmt: skip
            tl.store(accepted + row, keep)
            tl.store(chosen + row, token)


@triton.jit(do_not_specialize=["width"])
def finish_kernel(
    token_ids, num_sampled, accepted, chosen, peaks, peak_tokens, draft_token_ids, cu_num_drafts,
    temperatures, width, WIDTH: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (sequence): store its drafts up to the first rejected one, and one token more."""
    sequence = tl.program_id(0)
    first = tl.load(cu_num_drafts + sequence)
    num_drafts = tl.load(cu_num_drafts + sequence + 1) - first
    step = tl.arange(0, WIDTH)
    is_draft = step < num_drafts
    draft = tl.load(draft_token_ids + first + step, mask=is_draft, other=-1)
    row = first + sequence + step
    if tl.load(temperatures + sequence) == 0.0:
        part = tl.arange(0, PARTS)
        at = row.to(tl.int64)[:, None] * NUM_PARTS + part[None, :]
        mask = (step <= num_drafts)[:, None] & (part < NUM_PARTS)[None, :]
        peak = tl.load(peaks + at, mask=mask, other=float("-inf"))
        token = tl.load(peak_tokens + at, mask=mask, other=FAR)
        best = tl.max(peak, 1)
        last = tl.min(tl.where(peak == best[:, None], token, FAR), 1)
        keep = (last == draft).to(tl.int32)
    else:
        keep = tl.load(accepted + row, mask=is_draft, other=0)
        last = tl.load(chosen + row, mask=step <= num_drafts, other=0)
    num_accepted = tl.min(tl.where((keep > 0) & is_draft, num_drafts, step), 0)
    num_accepted = tl.minimum(num_accepted, num_drafts)
    token = tl.where(
        step < num_accepted, draft, tl.where(step == num_accepted, last.to(tl.int64), -1)
    )
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
    """Make two launches: a program per row of logits and part of it, then one per sequence."""
    num_rows, vocab_size = target_logits.shape
    num_seqs, width, device = len(seeds), max_num_drafts + 1, target_logits.device
    most = max(triton.next_power_of_2(vocab_size), 32)
    part = min(PART, most)
    num_parts = triton.cdiv(vocab_size, part)
    accepted, chosen, token_of_part = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in (num_rows, num_rows, num_rows * num_parts)
    )
    peak_of_part = torch.empty(num_rows * num_parts, dtype=torch.float32, device=device)
    token_ids = torch.empty((num_seqs, width), dtype=torch.int64, device=device)
    num_sampled = torch.empty(num_seqs, dtype=torch.int32, device=device)
    decide_kernel[(num_seqs, width, num_parts)](
        accepted, chosen, peak_of_part, token_of_part, target_logits, draft_token_ids,
        cu_num_drafts, temperature, seeds, positions,
        temperature if draft_probs is None else draft_probs, target_logits.stride(0),
        0 if draft_probs is None else draft_probs.stride(0), vocab_size,
        HAS_PROBS=draft_probs is not None, SIZE=min(SIZE, most), PART=part, NUM_PARTS=num_parts,
        num_warps=8,
    )  # fmt: skip
    finish_kernel[(num_seqs,)](
        token_ids, num_sampled, accepted, chosen, peak_of_part, token_of_part, draft_token_ids,
        cu_num_drafts, temperature, width, WIDTH=max(triton.next_power_of_2(width), 2),
        NUM_PARTS=num_parts, PARTS=triton.next_power_of_2(num_parts), num_warps=1,
    )  # fmt: skip
    return token_ids, num_sampled
