"""Share: how many tokens one row gets, and how many of them are drafts.

    known tokens         |--------------- k ---------------|
    a step of n tokens            |-- computed c --|---- n ----|
    drafts in it                                   |- c+n-k -|

Arithmetic only: the running and the waiting phase ask the same functions.
"""

from __future__ import annotations

from blockstep.spec.vocabulary import Config


def compute_share(
    num_wanted: int,
    num_computed: int,
    threshold: int,
    budget: int,
    end: int,
    is_whole: bool = False,
) -> int:
    """Tokens of a row: the gap up to `num_wanted`, under every cap; 0 or less means none.

    No position from `end` on is computed. With `is_whole` a gap that the budget cannot take in one
    piece gets nothing. Source: seed 001 "For Running Requests", "For Waiting Requests (First
    Prefill)"; seed 000 "1. Calculate Tokens"; P9.
    """
    num_new = num_wanted - num_computed
    if 0 < threshold < num_new:
        num_new = threshold
    num_new = min(num_new, end - num_computed)
    if is_whole and num_new > budget:
        return 0
    return min(num_new, budget)


def compute_num_drafts(num_computed: int, num_scheduled: int, num_known: int) -> int:
    """Drafts among the scheduled tokens: those past the known ones.

    Source: seed 001 "Packing Spec Tokens at Schedule Time".
    """
    return max(num_computed + num_scheduled - num_known, 0)


def is_past_max_tokens(
    num_computed: int, num_placeholders: int, num_prompt: int, max_tokens: int
) -> bool:
    """Whether a frame in flight ends the request even if all of its drafts are rejected.

    With placeholders, computed - placeholders + 1 tokens are known, and one more at least is on its
    way; so nothing is scheduled behind the last token. Deeper pipelines may still run a row too
    many, which ends with its request. Source: seed 001 "Async scheduling skip-ahead"; P13.
    """
    return num_placeholders > 0 and num_computed + 2 - num_placeholders >= num_prompt + max_tokens


def get_threshold(config: Config, num_unfinished: int) -> int:
    """The most tokens of a long prefill that a step computes; 0: as many as there are.

    The same however many requests there are. Source: seed 001 "For Running Requests".
    """
    del num_unfinished
    return config.long_prefill_token_threshold
