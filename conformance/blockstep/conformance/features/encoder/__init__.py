"""Encoder: items that are encoded within a budget per step, into a cache of limited size."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import Example, Feature, Setting
from blockstep.spec import vocabulary as v

ASKED = {"encoder_compute_budget": 8, "encoder_cache_size": 8}
"""Fields of a config with an encoder."""
BESIDE = {
    **ASKED,
    "is_encoder_decoder": True,
    "disable_chunked_mm_input": True,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
}
"""Fields of a config with an encoder-decoder model."""

FEATURE = Feature(
    "encoder",
    "items are encoded, within a budget per step, into a cache of limited size",
    Capability.ENCODER,
    config={
        "encoder_compute_budget": 0,
        "encoder_cache_size": 0,
        "disable_chunked_mm_input": False,
        "is_encoder_decoder": False,
    },
    actions=(v.EncoderReset, v.EncoderOffer),
    situations=("encoder_",),
    properties=("P9", "P22"),
    switches=("encoder_cache_size",),
    is_late=True,
    examples=(Example(ASKED),),
    limits=("encoder_compute_budget", "encoder_cache_size"),
    goal_fields={"encoder_": {"items": (v.MultiModalItem("cat", 1, 2),)}},
    goals_need={"encoder_across_": frozenset({"kinds"})},
    goals_apart={  # an encoder-decoder model has none of these
        "encoder_beside_": frozenset({"caching", "transfers", "forks"}),
        "encoder_across_": frozenset({"caching", "transfers", "forks"}),
    },
    rare=(
        *("encoder_item_twice_in_one", "encoder_item_dropped_and_made", "encoder_reset_in_use"),
        *("encoder_row_waits_for_an_item", "encoder_preempted_holding_an_item"),
        *("encoder_chunk_stops_before_an_item", "encoder_item_of_two", "encoder_item_loaded"),
        *("encoder_beside_made_for_two", "encoder_beside_waits", "encoder_across_waits"),
        *("encoder_across_preempted", "encoder_across_made_again", "encoder_across_freed"),
        "encoder_across_read",
    ),
    settings={
        "whole_items": Setting(
            lambda config: config.disable_chunked_mm_input and not config.is_encoder_decoder,
            (Example({**ASKED, "disable_chunked_mm_input": True, "is_encoder_decoder": False}),),
        ),
        "items_beside": Setting(lambda config: config.is_encoder_decoder, (Example(BESIDE),)),
    },
    signals_to_all={
        "encoder_reset": "all that was encoded is forgotten",
        "encoder_offer": "a connector says which items it has",
    },
    signal_of={v.EncoderReset: "encoder_reset", v.EncoderOffer: "encoder_offer"},
    rare_with={
        "real": ("encoder_across_waits", "encoder_across_preempted", "encoder_across_made_again"),
    },
)
