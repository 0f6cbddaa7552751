"""Masks: grammars, the bitmasks of rows, and drafts that a grammar cuts."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import Example, Feature, Setting
from blockstep.conformance.protocol.program import Mask
from blockstep.spec import vocabulary as v

GRAMMAR = v.Grammar((((7, 0),),))
"""A grammar of one state, which allows one token."""

FEATURE = Feature(
    "masks",
    "grammars: bitmasks by row and draft position, and drafts cut to what a grammar accepts",
    Capability.MASKS,
    config={"reasoning_end_token_id": None, "enable_in_reasoning": False},
    request=("grammar",),
    actions=(Mask, v.GrammarFailed, v.GrammarBitmask),
    situations=("masks_", "rejected_grammar_behind"),
    properties=("P24",),
    goals_need={
        "masks_of_drafts": frozenset({"drafts"}),
        "masks_draft_cut": frozenset({"drafts"}),
        "masks_behind_a_cut": frozenset({"drafts"}),
        "masks_flag_of_frames_behind": frozenset({"async"}),
    },
    is_late=True,
    examples=(Example(request={"structured_output": True, "grammar": GRAMMAR}),),
    rare=(
        *(
            "masks_of_drafts",
            "masks_draft_cut",
            "masks_behind_a_cut_draft",
            "masks_of_the_preempted",
        ),
        *("masks_in_reasoning", "masks_draft_cut_when_proposed", "masks_resumed_amid_its_grammar"),
        *("masks_reasoning_ended", "masks_failed_while_it_runs", "masks_failed_in_flight"),
        "rejected_grammar_behind",
    ),
    settings={
        "reasoning": Setting(
            lambda config: config.reasoning_end_token_id is not None,
            (Example({"reasoning_end_token_id": 1}),),
        ),
    },
    signals={
        "grammar_failed": "a grammar cannot be had",
        "bitmask": "the runner asks for the mask of a plan",
    },
)
