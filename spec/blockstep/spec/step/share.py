"""Share: how many tokens one row gets, and how many of them are drafts.

    known tokens         |--------------- k ---------------|
    a step of n tokens            |-- computed c --|---- n ----|
    drafts in it                                   |- c+n-k -|

The running and the waiting phase use the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from blockstep.spec.requests import RequestState
from blockstep.spec.step.work import Step
from blockstep.spec.vocabulary import Config, GroupKind, MambaCacheMode


def compute_share(
    num_wanted: int,
    num_computed: int,
    threshold: int,
    budget: int,
    end: int,
    is_whole: bool = False,
) -> int:
    """Return the tokens of a row: the gap up to `num_wanted`, within all limits; none if 0 or less.

    No position from `end` on is computed. With `is_whole`, a gap that exceeds the budget gets
    nothing. Source: seed 001 "For Running Requests", "For Waiting Requests (First Prefill)"; seed
    000 "1. Calculate Tokens"; P9.
    """
    num_new = num_wanted - num_computed
    if 0 < threshold < num_new:
        num_new = threshold
    num_new = min(num_new, end - num_computed)
    if is_whole and num_new > budget:
        return 0
    return min(num_new, budget)


def get_threshold(step: Step) -> int:
    """Return the limit of a long prefill, 0 for none: that of the config, however many requests
    there are. Source: seed 001 "For Running Requests"; P9.
    """
    return step.state.config.long_prefill_token_threshold


def process_limits(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
    """Return the tokens that a row gets of `num_new` that it could have. Source: P9, P15."""
    for limit in step.state.rules.hooks.limits:
        num_new = step.state.rules[limit](step, request, num_computed, num_new)
    return num_new


def limit_to_states(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
    """Return the tokens of a row up to a boundary of states. Source: P5, P10."""
    get_share = step.state.rules[get_aligned_share]
    return get_share(step.state.config, request, num_computed, num_new)


def get_aligned_share(
    config: Config, request: RequestState, num_computed: int, num_new: int
) -> int:
    """Return the tokens of a row after cutting its prompt at boundaries of states. Source: P5,
    P10."""
    groups = config.groups
    aligned = [g.block_size for g in groups if g.mamba_cache_mode is MambaCacheMode.ALIGN]
    num_prompt, num_known = len(request.request.prompt_token_ids), request.num_known_tokens
    # From there on it decodes, or continues until it does after a resume.
    if not aligned or num_new <= 0 or num_computed >= max(num_prompt, num_known - 1):
        return num_new
    attended = [g.block_size for g in groups if g.kind is not GroupKind.RECURRENT]
    num_behind = max(attended, default=0) if config.drops_last_hit_block else 0
    end, unit = num_computed + num_new, lcm(*config.block_sizes)
    last = max(num_known - num_behind, 0) // unit * unit
    return compute_aligned_end(num_computed, end, last, unit, aligned) - num_computed


def compute_aligned_end(
    num_computed: int, end: int, last: int, unit: int, block_sizes: Sequence[int]
) -> int:
    """Return the end of a chunk that could reach `end`, moved to a boundary at which its recurrent
    state is saved.

    `last` is the last boundary that a later request could hit; such boundaries are `unit` apart. Up
    to there a chunk is whole units. If less than one unit is possible, the chunk is as long as it
    can be, and the next chunks go up to the end of the block: none continues a block of
    `block_sizes` past its end. Upstream rounds less than a unit to nothing, for ever if a step
    allows no more (#40707). Source: vLLM 0.19.1 `_mamba_block_aligned_split`; P3, P10.
    """
    block_ends = [-(-num_computed // size) * size for size in block_sizes if num_computed % size]
    if block_ends:
        return min(end, *block_ends)
    if num_computed < last < end:
        return last
    rounded = end // unit * unit
    return rounded if end < last and rounded > num_computed else end


def compute_num_drafts(num_computed: int, num_scheduled: int, num_known: int) -> int:
    """Return the number of drafts among the scheduled tokens: those past the known ones.

    Source: seed 001 "Packing Spec Tokens at Schedule Time".
    """
    return max(num_computed + num_scheduled - num_known, 0)


def is_past_max_tokens(
    num_computed: int, num_placeholders: int, num_prompt: int, max_tokens: int
) -> bool:
    """Whether a frame in flight ends the request even if all of its drafts are rejected.

    With placeholders, computed - placeholders + 1 tokens are known, and at least one more is in
    flight; so nothing is scheduled after the last token. Deeper pipelines may still run one row too
    many, which ends with its request. Source: seed 001 "Async scheduling skip-ahead"; P13.
    """
    return num_placeholders > 0 and num_computed + 2 - num_placeholders >= num_prompt + max_tokens
