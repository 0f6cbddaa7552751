"""Isolation: an engine in a process of its own, which may hang or die.

    parent  -- jobs, pickled ------->  child: spec, worker, properties and a watched engine
            <- answers, pickled -----
            <- journal, a text file -         every event, before the engine is given it

The engine has control while the last line of the journal is incomplete. A child whose engine keeps
control for too long is killed, and the journal then has the program up to this event. Spec and
engine share the child, so that no event crosses a process boundary and a run is as fast as without
isolation. Only plain values cross the boundary; other values are turned into them first.
"""

from blockstep.conformance.search.isolation.executor import Isolation
from blockstep.conformance.search.isolation.process import (
    BUILD_SECONDS,
    EVENT_SECONDS,
    HarnessError,
    LostError,
    RefusedError,
    end_all,
)

__all__ = [
    "BUILD_SECONDS",
    "EVENT_SECONDS",
    "HarnessError",
    "Isolation",
    "LostError",
    "RefusedError",
    "end_all",
]
