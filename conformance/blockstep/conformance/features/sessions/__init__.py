"""Sessions: requests that get further input."""

from __future__ import annotations

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import Example, Feature
from blockstep.spec import vocabulary as v

FEATURE = Feature(
    "sessions",
    "a session gets further input: it is idle between two inputs, and keeps its blocks",
    Capability.SESSIONS,
    request=("resumable",),
    actions=(v.StreamingUpdate,),
    situations=("sessions_", "rejected_not_resumable"),
    properties=("P3", "P10", "P13"),
    is_late=True,
    examples=(Example(request={"resumable": True}),),
    goals_need={"sessions_back_under_a_grammar": frozenset({"masks"})},
    rare=(
        *("sessions_rest_while_others_wait", "sessions_end_at_rest"),
        *("sessions_update_of_the_preempted", "sessions_several_chunks_ahead"),
        "sessions_back_under_a_grammar",
    ),
    signals={
        "chunk": "a session is given a chunk",
        "end_of_input": "a session is given the end of its input",
    },
)
