"""Small worlds with forks."""

from __future__ import annotations

from typing import Any

from blockstep.conformance.explore.world import (
    AHEAD,
    BOTH,
    FULL_OF_2,
    GRAMMAR,
    HEAD,
    NGRAM,
    RANKED,
    UNCACHED,
    UNRESERVED,
    Counts,
    World,
    encoder,
    group,
    item,
    request,
)
from blockstep.spec import vocabulary as v

FORKED: dict[str, Any] = {"enable_forks": True}
LEFT: dict[str, Any] = {"watermark_blocks": 1, "pool_order": v.PoolOrder.LIFO}
EVENTS: dict[str, Any] = {"enable_kv_cache_events": True}


def alike(names: str, *more: Any, **fields: Any) -> tuple[v.Request, ...]:
    """Return equal requests with these names; other arguments as of `request`."""
    return tuple(request(name, *more, **fields) for name in names)


WORLDS = (
    World("branches", "three equal requests, three blocks: the first two that write copy",
        v.Config(4, 4, 3, 4, 4, **FORKED), alike("ABC", 2, 2),
        vocabulary=(0, 1), aborts=True, resets=BOTH, forks=True,
        expected=Counts(5_085, 37_086, 64_274, 17)),
    World("beams", "PRIORITY: two equal requests are preempted for a more urgent one",
        v.Config(4, 2, 3, 4, 4, **RANKED, **UNRESERVED, **FORKED),
        (*alike("AB", 1, 3, priority=1), *alike("C", 2, 2)), vocabulary=(0, 1), forks=True,
        expected=Counts(7_060, 15_896, 55_017, 28)),
    World("spread", "branches in blocks of two and of four tokens, and a window that frees some",
        v.Config(6, 2, 2, 3, 5, **FORKED,
                 groups=(FULL_OF_2, group("sliding_window", 4, sliding_window=3))),
        alike("AB", 2, 3), vocabulary=(0, 1), aborts=True, forks=True,
        expected=Counts(10_974, 42_083, 75_771, 24)),
    World("left", "a watermark, a LIFO pool: branches that free what they share",
        v.Config(4, 2, 3, 3, 4, **UNRESERVED, **FORKED, **LEFT), alike("ABC", 1, 3),
        aborts=True, forks=True, expected=Counts(17_327, 83_906, 196_944, 34)),
    World("stack", "a watermark in the admission check as well, no prefix caching",
        v.Config(4, 2, 3, 3, 4, **UNCACHED, **FORKED, **LEFT),
        alike("ABC", 1, 3), aborts=True, forks=True, expected=Counts(2_722, 12_896, 32_162, 28)),
    World("filled", "KV events: drafts fill a block that a branch shares before it is published",
        v.Config(4, 3, 2, 4, 5, **EVENTS, **NGRAM, **FORKED),
        alike("AB", 1, 4), resets=BOTH, forks=True,
        expected=Counts(814, 4_367, 5_563, 18)),
    World("overtaken", "two plans in flight, drafts at the worker: parents that may not be forked",
        v.Config(5, 2, 2, 4, 4, **AHEAD, **NGRAM, **FORKED), alike("AB", 1, 3),
        vocabulary=(0, 1), resets=(True,), forks=True, expected=Counts(4_370, 17_489, 31_799, 19)),
    World("verses", "branches under a grammar: each has its own outputs and grammar state",
        v.Config(5, 2, 2, 3, 4, **FORKED),
        alike("AB", 1, 3, structured_output=True, grammar=GRAMMAR),
        vocabulary=(0, 1, 2), forks=True, expected=Counts(4_302, 21_603, 34_952, 26)),
    World("crowned", "branches with an EAGLE head: lookahead slots after the copied block",
        v.Config(6, 2, 2, 4, 4, **HEAD, **FORKED), alike("AB", 1, 3), aborts=True, forks=True,
        expected=Counts(4_410, 22_644, 26_804, 27)),
    World("pictured", "a branch of a prompt without outputs: it reads the item again",
        v.Config(4, 2, 2, 4, 4, **encoder(1, 1), **FORKED),
        alike("AB", 2, 2, items=(item("x", 1),)), aborts=True, forks=True,
        expected=Counts(357, 1_318, 2_102, 17)),
)  # fmt: skip
"""Requests that differ only in their ids may be forked into one another. Each world is walked
within a minute."""
