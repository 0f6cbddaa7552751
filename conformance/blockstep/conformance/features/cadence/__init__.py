"""Prefill cadence: while requests decode, prompts are computed in every n-th step only."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import SEVERAL_AT_ONCE, Example, Feature

FEATURE = Feature(
    "cadence",
    "prefill cadence: while requests decode, prompts get tokens in every n-th step only",
    Capability.CADENCE,
    config={"prefill_schedule_interval": 1},
    situations=("cadence_",),
    properties=("P9", "P10", "P15"),
    switches=("has_prefill_interval",),
    is_late=True,
    examples=(Example({"prefill_schedule_interval": 2}),),
    limits=("prefill_schedule_interval",),
    goals_need={
        "cadence_load_begins": frozenset({"transfers"}),
        "cadence_decodes_in_flight": SEVERAL_AT_ONCE,
        "cadence_last_token_admitted": frozenset({"caching", "transfers", "sessions"}),
    },
    rare=("cadence_",),
    rare_with={"tiny": ("cadence_load_begins",)},
    rare_if_wished_for={"tiny": ("forks_last_holder_writes",)},
    headlines={
        "held_prompts_get_no_tokens": "LIMIT: prompts get tokens before their interval is over"
    },
)
