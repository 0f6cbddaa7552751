"""Share: how many tokens one row gets, and how many of them are drafts.

    known tokens         |--------------- k ---------------|
    a step of n tokens            |-- computed c --|---- n ----|
    drafts in it                                   |- c+n-k -|

The running and the waiting phase use the same functions.
"""

from __future__ import annotations

from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.work import Step


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


def compute_num_drafts(num_computed: int, num_scheduled: int, num_known: int) -> int:
    """Return the number of drafts among the scheduled tokens: those past the known ones.

    Source: seed 001 "Packing Spec Tokens at Schedule Time".
    """
    return max(num_computed + num_scheduled - num_known, 0)
