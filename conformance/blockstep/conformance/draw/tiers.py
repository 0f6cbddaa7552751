"""Tiers: configs that swap victims out or close admission, and offers of swapped-out blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.spec import vocabulary as v


def draw_tiers(config: v.Config, draw: Draw) -> v.Config:
    """Return the config with swap-out of victims, if there is a store, and with admission
    thresholds.

    Victims with recurrent states are not saved. Requests are often admitted without room for the
    whole prompt, so that preemptions are more frequent.
    """
    saves = config.kv_connector and not config.has_states
    least = 0 if saves else 1
    high = draw.integer(least, min(config.num_usable_blocks, 6))
    size = max(config.block_sizes)
    return replace(
        config,
        scheduler_reserve_full_isl=config.scheduler_reserve_full_isl and draw.chance(25),
        swap_min_tokens=draw.choice((1, 1, size, size + 1)) if saves else 0,
        admission_low_blocks=draw.integer(0, high),
        admission_high_blocks=high,
    )


def draw_kept(saved: Mapping[v.RequestId, int], draw: Draw) -> v.KVOffer:
    """Draw an offer for a swapped-out request: most often all saved tokens; or half, none, not
    known yet."""
    name = draw.choice([*saved])
    num_saved = saved[name]
    num_tokens = draw.choice((num_saved, num_saved, num_saved, num_saved // 2, 0, None))
    return v.KVOffer(name, num_tokens, is_async=draw.chance(50), delays_free=draw.chance(20))
