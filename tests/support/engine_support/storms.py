"""Storms: settings that must not change a token, and the events that each run must reach."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blockstep.spec.vocabulary import SpecMethod, Stats

NUM_BLOCKS_MIN = 18
"""Blocks of 4 tokens: the longest request (50 + 15 tokens computed, 3 drafts) just fits."""
SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": NUM_BLOCKS_MIN, "max_model_len": 84}
NGRAM: dict[str, Any] = {"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 3}
DRAFT: dict[str, Any] = {
    "spec_method": SpecMethod.DRAFT_MODEL,
    "num_speculative_tokens": 2,
    "num_blocks": NUM_BLOCKS_MIN + 1,  # the lookahead slots
}
ASYNC: dict[str, Any] = {"max_frames_in_flight": 2}


@dataclass(frozen=True)
class Storm:
    """Settings of a run, and the events without which the run would prove nothing."""

    settings: dict[str, Any] = field(default_factory=dict)
    reaches: tuple[str, ...] = ()

    windows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of families with windows, where each KV group has its own blocks."""

    def get_settings(self, family: str) -> dict[str, Any]:
        """Settings for a family. A small pool is the smallest one that serves every prompt."""
        return {**self.settings, **self.windows.get(family, {})}

    def get_missing(self, stats: Stats) -> list[str]:
        """Return the events that the run did not reach."""
        reached = {
            "hit": stats.prefix_cache_hits > 0,
            "preemption": stats.preemptions > 10,
            "accepted": stats.drafts_accepted > 0,
            "rejected": stats.drafts_accepted < stats.drafts_scheduled,
        }
        return [name for name in self.reaches if not reached[name]]


def blocks(qwen2: int, mistral: int, **more: Any) -> dict[str, dict[str, Any]]:
    """Return the smallest pools: for a full group and a window, and for windows alone."""
    return {"qwen2": {"num_blocks": qwen2}, "mistral": {"num_blocks": mistral, **more}}


OPEN: dict[str, Any] = {"scheduler_reserve_full_isl": False}
"""Admission reserves all blocks of a window otherwise, and preemptions are rare."""

STORMS = {
    "plain": Storm({}, ("hit",)),
    "no-cache": Storm({"enable_prefix_caching": False}),
    "chunked": Storm(
        {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 7, "block_size": 4}, ("hit",)
    ),
    "small-pool": Storm(
        {**SMALL, "max_num_batched_tokens": 16}, ("hit", "preemption"), blocks(25, 8, **OPEN)
    ),
    "ngram": Storm(
        {**SMALL, **NGRAM}, ("hit", "preemption", "accepted", "rejected"), blocks(35, 18)
    ),
    "draft-model": Storm(
        {**SMALL, **DRAFT},
        ("hit", "preemption", "accepted", "rejected"),
        blocks(37, 9, **OPEN, max_num_batched_tokens=16),
    ),
    "async": Storm(
        {**SMALL, **ASYNC, "max_num_batched_tokens": 16},
        ("hit", "preemption"),
        blocks(25, 8, **OPEN),
    ),
    "async-ngram": Storm(
        {**SMALL, **ASYNC, **NGRAM}, ("hit", "preemption", "accepted", "rejected"), blocks(35, 18)
    ),
    "async-draft-model": Storm(
        {**SMALL, **ASYNC, **DRAFT}, ("hit", "preemption", "accepted", "rejected"), blocks(37, 19)
    ),
}
