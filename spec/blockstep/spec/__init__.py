"""The executable specification of an LLM-inference scheduler and its paged KV memory.

`transition(state, event)` is all of it; `Oracle` wraps it for everyday use. Read `vocabulary`, then
`core` in the order that it names, then the `features` that you need, `transition` and
`invariants`. The deviations of released engines are separate, in `releases` and `profiles`.
"""

from blockstep.spec.core.state import State
from blockstep.spec.oracle import Oracle, RejectedEvent
from blockstep.spec.profiles import initial_state
from blockstep.spec.snapshots import get_snapshot
from blockstep.spec.transition import Accepted, transition
from blockstep.spec.vocabulary import (
    Abort,
    Commit,
    Config,
    ConfigError,
    Drafts,
    Event,
    FinishReason,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    GroupKind,
    KVGroup,
    MultiModalItem,
    Observation,
    Outputs,
    PauseState,
    Plan,
    Policy,
    Rejected,
    Request,
    Reset,
    Schedule,
    SetPause,
    Snapshot,
    SpecMethod,
    Status,
    StreamingUpdate,
    Submit,
)

__all__ = [
    "Abort",
    "Accepted",
    "Commit",
    "Config",
    "ConfigError",
    "Drafts",
    "Event",
    "FinishReason",
    "Grammar",
    "GrammarBitmask",
    "GrammarFailed",
    "GrammarReady",
    "GroupKind",
    "KVGroup",
    "MultiModalItem",
    "Observation",
    "Oracle",
    "Outputs",
    "PauseState",
    "Plan",
    "Policy",
    "Rejected",
    "RejectedEvent",
    "Request",
    "Reset",
    "Schedule",
    "SetPause",
    "Snapshot",
    "SpecMethod",
    "State",
    "Status",
    "StreamingUpdate",
    "Submit",
    "get_snapshot",
    "initial_state",
    "transition",
]
