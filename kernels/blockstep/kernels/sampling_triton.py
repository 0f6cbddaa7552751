"""The Triton kernels of sampling: first all parts of all rows at once, then each row.

`scan_kernel` reads a part of a row. It finds the largest logit, and draws among the part's tokens
if the row has no cut. `choose_kernel` combines the parts of a row. If the row has a cut, it
searches for the threshold of the cut, and draws among the tokens above:

    lo < threshold <= hi     values above hi are too few for k tokens, or for the share top_p,
                             and values above lo are enough

Each pass over the row measures the values above three points between the two. When few tokens are
above `lo`, the vectors of eight neighbours that have one are copied out, and the rest of the row is
not read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockstep.kernels import noise, sampling
from blockstep.kernels.dispatch import on_device_of_first
from blockstep.kernels.noise_triton import compute_exponential, compute_key

CHOOSE = tl.constexpr(noise.CHOOSE)
NO_TOKEN = tl.constexpr(sampling.NO_TOKEN)
TEMPERATURE_MIN = tl.constexpr(sampling.TEMPERATURE_MIN)
FAR = tl.constexpr(2**31 - 1)
PART = 8192
"""Tokens of a row that one program of `scan_kernel` reads."""
NUM_COPIED_MAX = 4096
"""Most tokens above `lo` that are copied out."""
PASS_BYTES = 16384
"""Bytes of a row that one program of `choose_kernel` reads at once, in a pass over it."""
DRAW = 2048
"""Tokens that it draws from at once."""
NUM_REGISTERS = 96
"""Registers of a thread of `choose_kernel`; by default the assembler takes 64 and spills."""
COLUMNS = ["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "indices"]
"""Columns read one number at a time, so kernels need not be compiled again for other alignments."""
VECTOR = tl.constexpr(8)
"""Neighbours that a thread reads together, and that are copied together."""


@triton.jit
def pick(values, tokens):
    """Return the largest value and the lowest token that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, tokens, FAR), 0)


@triton.jit
def has_cut(top_k, top_p, min_p, vocab_size):
    """Whether a row is drawn from a part of the vocabulary."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit(do_not_specialize=["plane"], do_not_specialize_on_alignment=COLUMNS)
def scan_kernel(
    floats, ints, logits, temperatures, top_ks, top_ps, min_ps, seeds, indices, logits_row,
    vocab_size, plane, NUM_PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (row, part): store its largest logit, and for a drawn row its token or its counts.

    `floats` are planes of largest logits, of scores relative to them, and of least logits; `ints`
    are planes of the tokens of both, and of numbers of allowed tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * SIZE + tl.arange(0, SIZE)
    mask = token < vocab_size
    x = tl.load(logits + row * logits_row + token, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN counts as infinity: neither gives a token
    peak, peak_at = pick(x, token)
    at = row * NUM_PARTS + part
    tl.store(floats + at, peak)
    tl.store(ints + at, peak_at)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        top_k = tl.load(top_ks + row)
        if has_cut(top_k, tl.load(top_ps + row), tl.load(min_ps + row), vocab_size):
            allowed = x > float("-inf")
            tl.store(floats + 2 * plane + at, tl.min(tl.where(allowed, x, float("inf")), 0))
            tl.store(ints + 2 * plane + at, tl.sum(allowed.to(tl.int32), 0))
        else:
            key = compute_key(tl.load(seeds + row), tl.load(indices + row), CHOOSE)
            base = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
            inverse = 1.0 / tl.maximum(temperature, TEMPERATURE_MIN)
            scores = (x - base) * inverse - tl.log(compute_exponential(key, token))
            score, drawn = pick(scores, token)
            tl.store(floats + plane + at, score)
            tl.store(ints + plane + at, drawn)


@triton.jit
def to_key(x):
    """Return an int64 for each float32, in the same order and without gaps; both zeros have 0."""
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.int64)
    return tl.where(bits < 0, -size, size)


@triton.jit
def from_key(key):
    """Return the float32 of a key."""
    x = tl.abs(key).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -x, x)


@triton.jit
def measure(
    values, size, first, second, third, best, inverse, MASS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return the number of values above each of three, and the sums of their weights if `MASS`."""
    lanes: tl.constexpr = SIZE // VECTOR
    lane = tl.arange(0, lanes)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    count_1 = tl.zeros((lanes,), tl.int32)
    count_2 = tl.zeros((lanes,), tl.int32)
    count_3 = tl.zeros((lanes,), tl.int32)
    mass_1 = tl.zeros((lanes,), tl.float32)
    mass_2 = tl.zeros((lanes,), tl.float32)
    mass_3 = tl.zeros((lanes,), tl.float32)
    for start in range(0, size, SIZE):
        at = start + lane
        x = tl.load(values + at, mask=at < size, other=float("-inf")).to(tl.float32)
        count_1 += tl.sum((x > first).to(tl.int32), 1)
        count_2 += tl.sum((x > second).to(tl.int32), 1)
        count_3 += tl.sum((x > third).to(tl.int32), 1)
        if MASS:
            weight = tl.exp((x - best) * inverse)
            mass_1 += tl.sum(tl.where(x > first, weight, 0.0), 1)
            mass_2 += tl.sum(tl.where(x > second, weight, 0.0), 1)
            mass_3 += tl.sum(tl.where(x > third, weight, 0.0), 1)
    counts = tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0)
    return counts, (tl.sum(mass_1, 0), tl.sum(mass_2, 0), tl.sum(mass_3, 0))


@triton.jit
def narrow(
    values, size, lo, num_above_lo, hi, num_above_hi, goal, num_enough, best, inverse,
    MASS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Move `lo` and `hi` towards the threshold, until few enough values are above `lo`.

    `goal` is a number of tokens, or a sum of weights if `MASS`. The search ends if at most one
    value, or no float at all, is between the two: then the values above `lo` are those to keep.
    """
    while (
        (num_above_lo > num_enough)
        & (num_above_lo - num_above_hi > 1)
        & (to_key(hi) - to_key(lo) > 1)
    ):
        # The middle of the keys always halves the rest; quarters by value usually do more.
        middle = from_key((to_key(lo) + to_key(hi)) >> 1)
        tried = 0.25 * lo + 0.75 * hi, middle, 0.75 * lo + 0.25 * hi
        counts, masses = measure(
            values, size, tried[0], tried[1], tried[2], best, inverse, MASS, SIZE
        )
        for index in tl.static_range(3):
            value = tried[index]
            misses = masses[index] < goal if MASS else counts[index] < goal
            is_hi = misses & (value < hi)
            is_lo = (misses == 0) & (value > lo)
            num_above_hi = tl.where(is_hi, counts[index], num_above_hi)
            num_above_lo = tl.where(is_lo, counts[index], num_above_lo)
            hi = tl.where(is_hi, value, hi)
            lo = tl.where(is_lo, value, lo)
    return lo, num_above_lo, hi, num_above_hi


@triton.jit
def sum_weights(
    values, size, lo, floor, best, inverse, SIZE: tl.constexpr
):  # fmt: skip
    """Return the sum of the weights of values above `lo` that `floor` does not cut."""
    lanes: tl.constexpr = SIZE // VECTOR
    lane = tl.arange(0, lanes)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    mass = tl.zeros((lanes,), tl.float32)
    for start in range(0, size, SIZE):
        at = start + lane
        x = tl.load(values + at, mask=at < size, other=float("-inf")).to(tl.float32)
        scaled = (x - best) * inverse
        mass += tl.sum(tl.where((x > lo) & (scaled >= floor), tl.exp(scaled), 0.0), 1)
    return tl.sum(mass, 0)


@triton.jit
def copy_out(
    values, vectors, logits, vocab_size, lo, SIZE: tl.constexpr
):  # fmt: skip
    """Copy each vector that has a logit above `lo`, with its number; return how many were
    copied."""
    lanes: tl.constexpr = SIZE // VECTOR
    row = tl.arange(0, lanes)
    column = tl.arange(0, VECTOR)
    num_copied = tl.zeros((), tl.int32)
    for start in range(0, tl.cdiv(vocab_size, VECTOR), lanes):
        at = (start + row)[:, None] * VECTOR + column[None, :]
        x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
        above = (tl.sum((x.to(tl.float32) > lo).to(tl.int32), 1) > 0).to(tl.int32)
        to = num_copied + tl.cumsum(above, 0) - 1
        tl.store(vectors + to, start + row, mask=above > 0)
        to = to[:, None] * VECTOR + column[None, :]
        tl.store(values + to, x, mask=(above > 0)[:, None])
        num_copied += tl.sum(above, 0)
    tl.debug_barrier()
    return num_copied


@triton.jit
def draw(
    values, vectors, is_copy, size, lo, floor, best, inverse, key, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the token whose clock rings first, among values above `lo` that `floor` does not
    cut."""
    lane = tl.arange(0, SIZE)
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    drawn = lane
    for start in range(0, size, SIZE):
        at = start + lane
        x = tl.load(values + at, mask=at < size, other=float("-inf")).to(tl.float32)
        scores = (x - best) * inverse
        kept = (x > lo) & (scores >= floor)
        if tl.sum(kept.to(tl.int32), 0) > 0:
            token = at
            if is_copy > 0:
                vector = tl.load(vectors + at // VECTOR, mask=kept, other=0)
                token = vector * VECTOR + at % VECTOR
            scores = scores - tl.log(compute_exponential(key, token))
            better = kept & (scores > top)
            top = tl.where(better, scores, top)
            drawn = tl.where(better, token, drawn)
    _, token = pick(top, drawn)
    return token


@triton.jit
def draw_from_cut(
    values, vectors, logits, vocab_size, best, least, num_allowed, temperature, top_k, top_p,
    min_p, seed, index, NUM_ENOUGH: tl.constexpr, SIZE: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """Return the token of a row with min_p, top_k or top_p; parameters are pointers to the
    row's."""
    inverse = 1.0 / tl.maximum(tl.load(temperature), TEMPERATURE_MIN)
    lo = from_key(to_key(least) - 1)
    num_above = num_allowed
    floor = tl.full((), float("-inf"), tl.float32)
    if tl.load(min_p) > 0.0:
        floor = tl.log(tl.load(min_p))
        # A little below the floor, which is compared in another way: so no token is lost.
        depth = floor / inverse
        below = best + depth - 1e-6 * (tl.abs(best) - depth) - 1e-30
        counts, _ = measure(logits, vocab_size, below, below, below, best, inverse, False, SIZE)
        num_above = tl.where(below > lo, counts[0], num_above)
        lo = tl.maximum(lo, below)
    hi = best
    num_above_hi = tl.zeros((), tl.int32)
    k_left = tl.load(top_k)
    if (k_left > 0) & (k_left < num_above):
        lo, num_above, hi, num_above_hi = narrow(
            logits, vocab_size, lo, num_above, hi, num_above_hi, k_left, NUM_ENOUGH, best, inverse,
            False, SIZE,
        )  # fmt: skip
    else:
        k_left = tl.zeros((), tl.int32)
    goal = tl.full((), -1.0, tl.float32)
    if num_above > NUM_ENOUGH:
        k_left = tl.zeros((), tl.int32)
        if tl.load(top_p) < 1.0:
            goal = sum_weights(logits, vocab_size, lo, floor, best, inverse, SIZE)
            goal = goal * tl.load(top_p)
            hi = best
            num_above_hi = tl.zeros((), tl.int32)
            lo, num_above, hi, num_above_hi = narrow(
                logits, vocab_size, lo, num_above, hi, num_above_hi, goal, NUM_ENOUGH, best,
                inverse, True, SIZE,
            )  # fmt: skip
    is_copy = (num_above <= NUM_ENOUGH).to(tl.int32)
    size = tl.zeros((), tl.int32) + vocab_size
    source = logits
    if is_copy > 0:
        size = VECTOR * copy_out(values, vectors, logits, vocab_size, lo, SIZE)
        source = values
        if k_left > 0:
            lo, num_above, hi, num_above_hi = narrow(
                values, size, lo, num_above, hi, num_above_hi, k_left, 0, best, inverse, False,
                SIZE,
            )  # fmt: skip
        if tl.load(top_p) < 1.0:
            if goal < 0.0:
                goal = sum_weights(values, size, lo, floor, best, inverse, SIZE)
                goal = goal * tl.load(top_p)
                hi = best
                num_above_hi = tl.zeros((), tl.int32)
            lo, num_above, hi, num_above_hi = narrow(
                values, size, lo, num_above, hi, num_above_hi, goal, 0, best, inverse, True, SIZE,
            )  # fmt: skip
    key = compute_key(tl.load(seed), tl.load(index), CHOOSE)
    return draw(source, vectors, is_copy, size, lo, floor, best, inverse, key, DRAW)


@triton.jit(do_not_specialize=["plane"], do_not_specialize_on_alignment=COLUMNS)
def choose_kernel(
    chosen, values, vectors, floats, ints, logits, temperatures, top_ks, top_ps, min_ps, seeds,
    indices, logits_row, vocab_size, plane, NUM_ENOUGH: tl.constexpr, NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """Program (row): choose its token, from what `scan_kernel` found in its parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    mask = part < NUM_PARTS
    at = row * NUM_PARTS + part
    peaks = tl.load(floats + at, mask=mask, other=float("-inf"))
    best, token = pick(peaks, tl.load(ints + at, mask=mask, other=FAR))
    if tl.abs(best) < float("inf"):
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            top_k, top_p, min_p = top_ks + row, top_ps + row, min_ps + row
            if has_cut(tl.load(top_k), tl.load(top_p), tl.load(min_p), vocab_size):
                least = tl.load(floats + 2 * plane + at, mask=mask, other=float("inf"))
                allowed = tl.load(ints + 2 * plane + at, mask=mask, other=0)
                token = draw_from_cut(
                    values + row * (NUM_ENOUGH * VECTOR), vectors + row * NUM_ENOUGH,
                    logits + row * logits_row, vocab_size, best, tl.min(least, 0),
                    tl.sum(allowed, 0), temperatures + row, top_k, top_p, min_p, seeds + row,
                    indices + row, NUM_ENOUGH, SIZE, DRAW,
                )  # fmt: skip
            else:
                scores = tl.load(floats + plane + at, mask=mask, other=float("-inf"))
                inverse = 1.0 / tl.maximum(temperature, TEMPERATURE_MIN)
                scores += (peaks - best) * inverse
                _, token = pick(scores, tl.load(ints + plane + at, mask=mask, other=FAR))
    else:
        token = tl.full((), NO_TOKEN, tl.int32)
    tl.store(chosen + row, token.to(tl.int64))


@on_device_of_first
def launch_sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    indices: Tensor,
) -> Tensor:
    """Make two launches: a program per row and part of it, then one per row."""
    num_rows, vocab_size = logits.shape
    device, most = logits.device, triton.next_power_of_2(vocab_size)
    part = max(min(PART, most), 32)
    num_parts = triton.cdiv(vocab_size, part)
    num_enough = min(NUM_COPIED_MAX, most)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    floats = empty(3, num_rows, num_parts, dtype=torch.float32)
    ints = empty(3, num_rows, num_parts, dtype=torch.int32)
    chosen = empty(num_rows, dtype=torch.int64)
    parameters = (logits, temperature, top_k, top_p, min_p, seeds, indices, logits.stride(0))
    plane = num_rows * num_parts
    scan_kernel[(num_rows, num_parts)](
        floats, ints, *parameters, vocab_size, plane, NUM_PARTS=num_parts, SIZE=part, num_warps=8
    )
    size = PASS_BYTES // logits.element_size()
    choose_kernel[(num_rows,)](
        chosen, empty(num_rows, num_enough * VECTOR.value, dtype=logits.dtype),
        empty(num_rows, num_enough, dtype=torch.int32), floats, ints, *parameters, vocab_size,
        plane, NUM_ENOUGH=num_enough, NUM_PARTS=num_parts, PARTS=triton.next_power_of_2(num_parts),
        SIZE=max(min(size, most), 32), DRAW=max(min(DRAW, most), 32), num_warps=16,
        maxnreg=NUM_REGISTERS,
    )  # fmt: skip
    return chosen
