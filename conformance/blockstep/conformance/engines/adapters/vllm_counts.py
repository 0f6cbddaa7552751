"""Counters of the prefix cache without the attempts at admission that fail.

Releases before 0.27.0 count each lookup, also that of a request which is then not admitted (#43736,
#48860); the specification counts admitted requests. What a step counts beyond its admissions is
left out here if requests that still wait account for it. Any other difference is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockstep.spec import vocabulary as v


@dataclass(frozen=True, slots=True)
class Lookups:
    """The requests that may look up the prefix cache in a step, and the counters before it."""

    known: Mapping[v.RequestId, int]
    """Known tokens of each request that has computed none, and may read the cache."""
    counts: tuple[int, int]
    """Queries and hits counted so far."""

    @classmethod
    def now(cls, scheduler: Any, counts: tuple[int, int]) -> Lookups:
        """Return those of the next step."""
        received = scheduler.finished_recving_kv_req_ids
        known = {
            name: one.num_tokens
            for name, one in scheduler.requests.items()
            if not (one.is_finished() or one.skip_reading_prefix_cache)
            and _may_look(one, name in received)
        }
        return cls(known, counts)

    def list_failed(
        self, scheduler: Any, planned: Mapping[v.RequestId, int], now: tuple[int, int]
    ) -> tuple[int, int]:
        """Return the queries and hits of the attempts that failed in the step; (0, 0) if requests
        that still wait do not account for what was counted.

        Args:
            scheduler: The scheduler after the step.
            planned: Tokens of each row of the plan.
            now: Queries and hits counted so far.
        """
        queries, hits = (after - before for after, before in zip(now, self.counts, strict=True))
        sums = {0}
        for name, num_tokens in self.known.items():
            request = scheduler.requests[name]
            if name in scheduler.finished_recving_kv_req_ids:
                continue  # it was not tried
            if name in planned or request.num_computed_tokens:
                num_ahead = request.num_computed_tokens - planned.get(name, 0)
                queries -= num_tokens
                hits -= num_ahead - request.num_external_computed_tokens
            else:
                sums |= {one + num_tokens for one in sums}
        return (queries, hits) if queries in sums and 0 <= hits <= queries else (0, 0)


def _may_look(request: Any, is_received: bool) -> bool:
    """Return whether a request waits and has no computed tokens when it is tried next: of a load
    of all tokens, the last is computed again."""
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        return is_received and (request.num_computed_tokens == 0 or request.num_tokens == 1)
    return bool(request.status.name != "RUNNING" and request.num_computed_tokens == 0)


def leave_out(stats: v.Stats, failed: tuple[int, int]) -> v.Stats:
    """Return statistics without the queries and hits of attempts that failed."""
    return replace(
        stats,
        prefix_cache_queries=stats.prefix_cache_queries - failed[0],
        prefix_cache_hits=stats.prefix_cache_hits - failed[1],
    )
