"""The limit on different LoRA adapters among running requests."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import Example, Feature

FEATURE = Feature(
    "adapters",
    "a limit on the different LoRA adapters among running requests; others are skipped",
    Capability.ADAPTERS,
    config={"max_loras": 0},
    situations=("adapters_",),
    properties=("P9", "P15"),
    switches=("max_loras",),
    is_late=True,
    examples=(Example({"max_loras": 1}),),
    limits=("max_loras",),
    goal_fields={"adapters_": {"adapter": "x"}},
    rare=(
        *("adapters_base_model_goes_past", "adapters_shared_seat_goes_past", "adapters_seat_taken"),
    ),
    checks={
        "plan_stays_within_max_loras": (
            "P9",
            "The rows of a plan have at most `max_loras` different adapters together.",
        )
    },
    headlines={
        "running_stays_within_max_loras": "LIMIT: more adapters run than max_loras",
        "plan_stays_within_max_loras": "LIMIT: the plan has more adapters than max_loras",
    },
)
