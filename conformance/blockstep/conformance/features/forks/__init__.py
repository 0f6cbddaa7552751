"""Forks: requests whose branches share blocks, and copy those that they write to."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import Example, Feature, Setting
from blockstep.spec import vocabulary as v

FEATURE = Feature(
    "forks",
    "a request is forked into several, which share blocks and copy those that they write to",
    Capability.FORKS,
    config={"enable_forks": False, "watermark_blocks": 0, "pool_order": v.PoolOrder.LRU},
    actions=(v.Fork,),
    situations=("forks_", "rejected_bad_fork", "rejected_fork_in_flight"),
    hides=("groups_of_three_kinds",),
    properties=("P2", "P8"),
    apart={
        "pins": "a branch is no turn of a job",
        "transfers": "a load may get a block that is still copied from",
        "states": "a state is written in place at each step, so branches cannot share it",
    },
    goals_need={
        "forks_copied_with_drafts": frozenset({"drafts"}),
        "forks_named_what_is_full": frozenset({"drafts"}),
    },
    yields_to=("kinds",),
    switches=("enable_forks", "watermark_blocks"),
    is_late=True,
    examples=(Example({"enable_forks": True}),),
    rare=(
        *("forks_copied_by_a_branch", "forks_several_copies", "forks_copied_with_drafts"),
        *("forks_gave_way", "forks_branch_preempted", "forks_preempted_beside_sharers"),
        *("forks_three_holders", "forks_named_what_is_full", "forks_cut_short"),
        "forks_before_an_output",
    ),
    settings={
        "watermark": Setting(
            lambda config: config.watermark_blocks > 0, (Example({"watermark_blocks": 1}),)
        ),
        "stack": Setting(
            lambda config: config.pool_order is v.PoolOrder.LIFO,
            (Example({"pool_order": v.PoolOrder.LIFO}),),
        ),
    },
    signals={"fork": "a request is forked"},
    rare_with={
        "tiny": ("forks_named_what_is_full",),
        "real": (
            *("forks_of_the_preempted", "forks_began_anew", "forks_last_holder_writes"),
            *("forks_watermark_holds_up", "forks_watermark_for_nobody", "forks_stack_reused"),
        ),
    },
)
