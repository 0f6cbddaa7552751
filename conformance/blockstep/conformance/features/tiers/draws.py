"""Configs that swap victims out, or close admission."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.feature import Draws, Late
from blockstep.conformance.features.transfers import FEATURE as TRANSFERS
from blockstep.conformance.features.transfers.draws import add_store
from blockstep.spec import vocabulary as v


def add_to_config(late: Late) -> None:
    """Most often add a store, if the config may have one; then thresholds and swap-out."""
    config, wish = late.config, late.wish
    has_other = config.kv_connector or config.enable_forks
    may_have_store = TRANSFERS.name not in wish.never and late.takes(TRANSFERS)
    if not has_other and may_have_store and late.draw.chance(70):
        add_store(late)
        late.drawn.add(TRANSFERS.name)
    late.config = draw_tiers(late.config, late.draw)


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


DRAWS = Draws(add_to_config=add_to_config, waits=True)
