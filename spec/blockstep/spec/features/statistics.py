"""Statistics: how many tokens were looked up in the prefix cache, and how many were hit."""

from __future__ import annotations

from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.prefix_cache import reads_prefix_cache
from blockstep.spec.core.requests import Hit, RequestState
from blockstep.spec.core.work import Step


def count_admitted(step: Step, request: RequestState, after: RequestState, hit: Hit) -> None:
    """Count the cache hit of a request that looked for one and got blocks.

    Source: seed 001 "For Waiting Requests (First Prefill)", vLLM 0.19.1 `make_stats`; P21.
    """
    del after
    if request.num_computed_tokens > 0 or not reads_prefix_cache(step.state.config, request):
        return
    stats = step.stats
    step.stats = replace(
        stats,
        prefix_cache_queries=stats.prefix_cache_queries + request.num_known_tokens,
        prefix_cache_hits=stats.prefix_cache_hits + hit.num_local,
    )


FEATURE: Final = Feature("statistics", is_always, Hooks(admits=(count_admitted,)))
