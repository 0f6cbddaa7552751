"""Rejection sampling for speculative decoding: drafts are kept without changing the
distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockstep.kernels.arguments import FLOATS, Arguments, check_offsets, check_range
from blockstep.kernels.dispatch import find_kernels
from blockstep.kernels.noise import ACCEPT, CHOOSE, compute_uniform


class Sampled(NamedTuple):
    """The tokens that each sequence of a step continues with."""

    token_ids: Tensor
    """`[num_seqs, max_num_drafts + 1]` int64: accepted drafts, then one token of the target; -1
    after it."""
    num_sampled: Tensor
    """`[num_seqs]` int32: the number of these tokens, at least 1."""


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_drafts: Tensor,
    *,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_probs: Tensor | None = None,
    max_num_drafts: int | None = None,
) -> Sampled:
    """Accept a prefix of each sequence's drafts, and add one token: a replacement or the bonus.

    target_logits: `[num_drafts + num_seqs, vocab_size]`, float32, float16 or bfloat16. Sequence `s`
    with `n` drafts has `n + 1` consecutive rows from `cu_num_drafts[s] + s` on, one per draft and
    one for the bonus token (the rows that `merge_drafts` returns). What a request masks (top-k,
    bans) is -inf here. draft_token_ids: `[num_drafts]` int64; cu_num_drafts: `[num_seqs + 1]`
    int32. Without drafts this is ordinary sampling.

    temperature: `[num_seqs]` float32. 0 is greedy: a draft is accepted if it is the argmax (the
    lowest id among equals), and the first that is not is replaced by it. Otherwise the target's law
    is `p = softmax(logits / temperature)`, and a draft `x` drawn from `q` is accepted with
    probability `min(1, p(x) / q(x))`; the first rejected is replaced by a token drawn from
    `max(p - q, 0)`, normalised. Every token then has exactly the target's law (Leviathan et al.
    2023; Chen et al. 2023). draft_probs: `[num_drafts, vocab_size]` float32, the `q` of each draft;
    None says that drafts were not drawn (n-gram): `q` is 1 at the draft.

    seeds: `[num_seqs]` int64, one per request. positions: `[num_seqs]` int64, the position in its
    sequence of the first token returned. Randomness is a function of seed and position alone
    (`noise`): a row's result is the same in any batch, and the same seed must not be used for two
    requests whose draws shall be independent. max_num_drafts: the most drafts that a sequence has;
    without it, it is read from cu_num_drafts, which on a GPU waits for the device.

    Bound: one read of the logits when greedy, two otherwise and one of draft_probs.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or layout; on the CPU also offsets that
            do not ascend, ids outside the vocabulary and negative temperatures.
    """
    check_arguments(
        target_logits, draft_token_ids, cu_num_drafts, temperature, seeds, positions, draft_probs
    )
    num_seqs = len(seeds)
    if max_num_drafts is None or not cu_num_drafts.is_cuda:
        most = int(cu_num_drafts.diff().max()) if num_seqs else 0
        max_num_drafts = most if max_num_drafts is None else max_num_drafts
        if max_num_drafts < most:
            raise ValueError(
                f"max_num_drafts: must be at least {most}, but is {max_num_drafts}; leave it out"
            )
    if num_seqs and (kernels := find_kernels("rejection", target_logits)):
        token_ids, num_sampled = kernels.launch_rejection_sample(
            target_logits, draft_token_ids, cu_num_drafts, temperature, seeds, positions,
            draft_probs, max_num_drafts,
        )  # fmt: skip
        return Sampled(token_ids, num_sampled)
    rows = lay_out(draft_token_ids, cu_num_drafts, temperature, seeds, positions)
    accepted, probs = accept_drafts(rows, target_logits, draft_token_ids, draft_probs)
    table = torch.zeros((num_seqs, max_num_drafts + 1), dtype=torch.bool, device=accepted.device)
    table[rows.owner, rows.step] = accepted
    num_accepted = table.cumprod(1).sum(1)
    token_ids = torch.full(table.shape, -1, dtype=torch.int64, device=accepted.device)
    token_ids[rows.owner, rows.step] = rows.draft
    token_ids[torch.arange(table.shape[1], device=accepted.device) >= num_accepted[:, None]] = -1
    final = rows.first + num_accepted
    chosen = choose_tokens(rows, final, target_logits, probs, draft_probs)
    token_ids.scatter_(1, num_accepted[:, None], chosen[:, None])
    return Sampled(token_ids, (num_accepted + 1).int())


def check_arguments(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_drafts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_probs: Tensor | None,
) -> None:
    """Check all arguments of a call, before anything is launched."""
    arguments = Arguments()
    arguments.check("draft_token_ids", draft_token_ids, "num_drafts", torch.int64, rows=True)
    arguments.check("cu_num_drafts", cu_num_drafts, "num_seqs+1", torch.int32, rows=True)
    arguments.check("target_logits", target_logits, "num_rows vocab_size", *FLOATS, rows=True)
    arguments.check("temperature", temperature, "num_seqs", torch.float32, rows=True)
    arguments.check("seeds", seeds, "num_seqs", torch.int64, rows=True)
    arguments.check("positions", positions, "num_seqs", torch.int64, rows=True)
    if draft_probs is not None:
        dims = "num_drafts vocab_size"
        arguments.check("draft_probs", draft_probs, dims, torch.float32, rows=True)
    num_seqs, num_drafts = arguments["num_seqs"], arguments["num_drafts"]
    if arguments["num_rows"] != num_drafts + num_seqs or arguments["vocab_size"] == 0:
        raise ValueError(
            f"target_logits: must be [num_drafts + num_seqs, vocab_size] = [{num_drafts} + "
            f"{num_seqs}, 1 or more], but its shape is {tuple(target_logits.shape)}; "
            f"pass one row per draft and one bonus row per sequence"
        )
    check_offsets("cu_num_drafts", cu_num_drafts, num_drafts, "the drafts")
    check_range("draft_token_ids", draft_token_ids, 0, arguments["vocab_size"], "token ids")
    if not temperature.is_cuda and not bool(((temperature >= 0) & temperature.isfinite()).all()):
        raise ValueError("temperature: must be finite and 0 or more for every sequence")


class Rows(NamedTuple):
    """The rows of logits: `first` is per sequence, all others per row."""

    first: Tensor
    owner: Tensor
    """The sequence of the row."""
    step: Tensor
    """Number of drafts of the sequence before it."""
    is_draft: Tensor
    draft: Tensor
    """The draft that the row decides on; -1 in a bonus row."""
    temperature: Tensor
    seeds: Tensor
    positions: Tensor


def lay_out(
    draft_token_ids: Tensor,
    cu_num_drafts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Rows:
    """Return the data of each row of the logits."""
    device = cu_num_drafts.device
    sequences = torch.arange(len(seeds), device=device)
    first = cu_num_drafts[:-1].long() + sequences
    num_drafts = cu_num_drafts.diff().long()
    owner = sequences.repeat_interleave(num_drafts + 1)
    step = torch.arange(len(owner), device=device) - first[owner]
    is_draft = step < num_drafts[owner]
    draft = torch.full_like(owner, -1)
    draft[is_draft] = draft_token_ids
    return Rows(
        first, owner, step, is_draft, draft, temperature[owner], seeds[owner],
        positions[owner] + step,
    )  # fmt: skip


def accept_drafts(
    rows: Rows, logits: Tensor, draft_token_ids: Tensor, draft_probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return which rows accept their draft; and the target's probabilities, if any row draws."""
    greedy = rows.temperature == 0
    accepted = rows.is_draft & greedy
    if bool(accepted.any()):
        accepted = accepted & (logits.argmax(-1) == rows.draft)
    if bool(greedy.all()):
        return accepted, None
    probs = (logits.float() / torch.where(greedy, 1.0, rows.temperature)[:, None]).softmax(-1)
    target = probs.gather(1, rows.draft.clamp(min=0)[:, None])[:, 0]
    proposed = torch.ones_like(target)
    if draft_probs is not None:
        proposed[rows.is_draft] = draft_probs.gather(1, draft_token_ids[:, None])[:, 0]
    uniform = compute_uniform(rows.seeds, rows.positions, ACCEPT, torch.zeros_like(rows.seeds))
    drawn = rows.is_draft & ~greedy & (uniform * proposed < target)
    return accepted | drawn, probs


def choose_tokens(
    rows: Rows, final: Tensor, logits: Tensor, probs: Tensor | None, draft_probs: Tensor | None
) -> Tensor:
    """Return the last token of each sequence's result, from the row `final` at which it stopped.

    Of exponential clocks with rates `w`, token `v` rings first with probability `w[v] / sum(w)`.
    """
    best = logits[final].argmax(-1)
    if probs is None:
        return best
    weights = probs[final]
    rejected = rows.is_draft[final]
    proposal = torch.zeros_like(weights)
    if draft_probs is None:
        proposal[rejected, rows.draft[final][rejected]] = 1.0
    else:
        proposal[rejected] = draft_probs[(final - rows.owner[final])[rejected]]
    residual = (weights - proposal).clamp(min=0)
    # Rounding alone can reject where p equals q; then the target's own distribution is used.
    weights = torch.where(residual.amax(1, keepdim=True) > 0, residual, weights).double()
    indices = torch.arange(weights.shape[1], device=weights.device)
    uniform = compute_uniform(rows.seeds[final, None], rows.positions[final, None], CHOOSE, indices)
    drawn = (weights / -uniform.log()).argmax(-1)
    return torch.where(rows.temperature[final] == 0, best, drawn)
