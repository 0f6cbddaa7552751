"""Worlds with forks.

Requests that differ only in their ids may be forked into one another.
"""

from __future__ import annotations

from typing import Any

from blockstep.conformance.explore.world import Counts, World
from blockstep.spec import vocabulary as v


def _alike(names: str, num_tokens: int, max_tokens: int, **more: Any) -> tuple[v.Request, ...]:
    """Return equal requests with these names, `num_tokens` equal tokens and `max_tokens`."""
    return tuple(
        v.Request(name, (0,) * num_tokens, max_tokens=max_tokens, **more) for name in names
    )


_FORKED: dict[str, Any] = {"enable_forks": True}
_UNRESERVED: dict[str, Any] = {"scheduler_reserve_full_isl": False}
_LEFT: dict[str, Any] = {"watermark_blocks": 1, "pool_order": v.PoolOrder.LIFO}
_NGRAM: dict[str, Any] = {"spec_method": v.SpecMethod.NGRAM, "num_speculative_tokens": 1}
_HEAD: dict[str, Any] = {"spec_method": v.SpecMethod.EAGLE, "num_speculative_tokens": 1}
_AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
_FULL = v.KVGroup(v.GroupKind.FULL, 2)
_WINDOW = v.KVGroup(v.GroupKind.SLIDING_WINDOW, 4, sliding_window=3)
_GRAMMAR = v.Grammar((((0, 1),), ((1, 0), (2, 2)), ()))
"""The grammar allows 0, then 1 and again 0, or 2 and then any token."""

FORKED = (
    World("branches", "three equal requests, three blocks: the first two that write copy",
        v.Config(4, 4, 3, 4, 4, **_FORKED), _alike("ABC", 2, 2),
        vocabulary=(0, 1), aborts=True, resets=(False, True), forks=True,
        expected=Counts(5_085, 37_086, 64_274, 17)),
    World("beams", "PRIORITY: two equal requests are preempted for a more urgent one",
        v.Config(4, 2, 3, 4, 4, policy=v.Policy.PRIORITY, **_UNRESERVED, **_FORKED),
        (*_alike("AB", 1, 3, priority=1), *_alike("C", 2, 2)), vocabulary=(0, 1), forks=True,
        expected=Counts(7_060, 15_896, 55_017, 28)),
    World("spread", "branches in blocks of two and of four tokens, and a window that frees some",
        v.Config(6, 2, 2, 3, 5, **_FORKED, groups=(_FULL, _WINDOW)), _alike("AB", 2, 3),
        vocabulary=(0, 1), aborts=True, forks=True,
        expected=Counts(10_974, 42_083, 75_771, 24)),
    World("left", "a watermark, a LIFO pool: branches that free what they share",
        v.Config(4, 2, 3, 3, 4, **_UNRESERVED, **_FORKED, **_LEFT), _alike("ABC", 1, 3),
        aborts=True, forks=True, expected=Counts(17_327, 83_906, 196_944, 34)),
    World("stack", "a watermark in the admission check as well, no prefix caching",
        v.Config(4, 2, 3, 3, 4, enable_prefix_caching=False, **_FORKED, **_LEFT),
        _alike("ABC", 1, 3), aborts=True, forks=True, expected=Counts(2_722, 12_896, 32_162, 28)),
    World("filled", "KV events: drafts fill a block that a branch shares before it is published",
        v.Config(4, 3, 2, 4, 5, enable_kv_cache_events=True, **_NGRAM, **_FORKED),
        _alike("AB", 1, 4), resets=(False, True), forks=True,
        expected=Counts(814, 4_367, 5_563, 18)),
    World("overtaken", "two plans in flight, drafts at the worker: parents that may not be forked",
        v.Config(5, 2, 2, 4, 4, **_AHEAD, **_NGRAM, **_FORKED), _alike("AB", 1, 3),
        vocabulary=(0, 1), resets=(True,), forks=True, expected=Counts(4_370, 17_489, 31_799, 19)),
    World("verses", "branches under a grammar: each has its own outputs and grammar state",
        v.Config(5, 2, 2, 3, 4, **_FORKED),
        _alike("AB", 1, 3, structured_output=True, grammar=_GRAMMAR),
        vocabulary=(0, 1, 2), forks=True, expected=Counts(4_302, 21_603, 34_952, 26)),
    World("crowned", "branches with an EAGLE head: lookahead slots after the copied block",
        v.Config(6, 2, 2, 4, 4, **_HEAD, **_FORKED), _alike("AB", 1, 3), aborts=True, forks=True,
        expected=Counts(4_410, 22_644, 26_804, 27)),
    World("pictured", "a branch of a prompt without outputs: it reads the item again",
        v.Config(4, 2, 2, 4, 4, encoder_compute_budget=1, encoder_cache_size=1, **_FORKED),
        _alike("AB", 2, 2, items=(v.MultiModalItem("x", 1, 1),)), aborts=True, forks=True,
        expected=Counts(357, 1_318, 2_102, 17)),
)  # fmt: skip
"""Each is walked within a minute."""
