"""Tiers: victims swapped out to a store, and admission that closes for lack of free blocks."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE, Example, Feature, Setting

THRESHOLDS = Example({"admission_high_blocks": 2, "admission_low_blocks": 1})
SWAP = Example({"kv_connector": True, "swap_min_tokens": 1})

FEATURE = Feature(
    "tiers",
    "victims are swapped out to a store, and admission closes between two thresholds of "
    "free blocks",
    Capability.TIERS,
    config={"swap_min_tokens": 0, "admission_low_blocks": 0, "admission_high_blocks": 0},
    situations=("tiers_",),
    properties=("P10", "P15"),
    yields_to=("kinds",),
    switches=("swap_min_tokens", "admission_high_blocks"),
    is_late=True,
    examples=(THRESHOLDS, SWAP),
    goals_need={
        "tiers_saved_beside_frames": SEVERAL_AT_ONCE,
        "tiers_saved_behind_a_window": frozenset({"groups"}),
    },
    rare=("tiers_",),
    settings={
        "swap": Setting(lambda config: config.swap_min_tokens > 0, (SWAP,)),
        "thresholds": Setting(lambda config: config.admission_high_blocks > 0, (THRESHOLDS,)),
    },
    rare_with={"tiny": ("tiers_several_saved",)},
)
