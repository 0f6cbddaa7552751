"""Transfers: KV that is loaded from a store, and blocks that outlive requests for its reads."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE, Example, Feature, Setting
from blockstep.conformance.protocol.program import Report
from blockstep.spec import vocabulary as v

RECOMPUTE = v.KVLoadFailurePolicy.RECOMPUTE
OF_SAVES = (*("tiers_victim_", "tiers_several_saved", "tiers_too_little_to_save", "tiers_saved_"),)
"""Prefixes of the coverage goals of swapped-out victims."""
FEATURE = Feature(
    "transfers",
    "KV is loaded from a store, at once or later, and blocks outlive requests that it reads",
    Capability.TRANSFERS,
    config={
        "kv_connector": False,
        "kv_load_failure_policy": v.KVLoadFailurePolicy.FAIL,
    },
    actions=(v.KVOffer, v.TransfersReported, Report),
    situations=("transfers_", *OF_SAVES),
    hides=(  # beside it no request is preempted whose blocks a frame in flight names
        *("preempted_in_flight", "all_preempted_in_flight", "stale_tokens_delivered"),
        *("ended_while_stale", "resumed_after_stale_tokens"),
        *("pipeline_preempted_in_flight", "pipeline_token_after_preemption"),
    ),
    properties=("P17", "P18", "P19"),
    yields_to=("kinds",),
    switches=("kv_connector",),
    is_late=True,
    examples=(Example({"kv_connector": True}),),
    goals_need={
        "transfers_deferred_": SEVERAL_AT_ONCE,
        "transfers_waits_for_an_answer": SEVERAL_AT_ONCE,
        "transfers_deferred_by_a_window": frozenset({"groups"}),
        "transfers_deferred_by_a_reset": frozenset({"reset"}),
        "transfers_preempted_unsettled": frozenset({"reset"}),
        "transfers_state_loaded": frozenset({"states"}),
        "transfers_state_out_of_reach": frozenset({"states"}),
    },
    rare=(
        *("transfers_parked_behind_a_hit", "transfers_returned_behind_a_head"),
        *("transfers_asked_anew", "transfers_preempted_unsettled", "transfers_held_twice"),
        *("transfers_deferred_by_a_reset", "transfers_deferred_by_a_window"),
        *("transfers_state_loaded", "transfers_state_out_of_reach"),
        "transfers_waits_for_an_answer",
        *("transfers_failed_at_a_later_block", "transfers_read_by_its_end"),
        "transfers_reported_again",  # releases are spared most of them
    ),
    settings={
        "loads_computed_again": Setting(
            lambda config: config.kv_connector and config.kv_load_failure_policy is RECOMPUTE,
            (Example({"kv_connector": True, "kv_load_failure_policy": RECOMPUTE}),),
        ),
    },
    signals={
        "offer": "a store says what it has of a request",
        "load_ends": "the end of a load is reported",
        "load_fails": "a block of a load is reported as invalid",
        "read_ends": "the end of a store's read is reported",
    },
    rare_with={
        "tiny": ("transfers_returned_behind_a_head", "transfers_failed_at_a_later_block"),
    },
)
