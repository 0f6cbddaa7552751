"""Isolation: an engine in a process of its own, which may hang or die.

    parent  -- jobs, pickled ------->  child: spec, worker and properties beside a watched engine
            <- answers, pickled -----
            <- journal, a text file -         every event, before the engine is given it

The engine has control while the last line of the journal has no end. A child whose engine keeps
control for too long is killed, and what the journal says is the program so far. Spec and engine
share the child, so that no event crosses a border and a run is as fast as without it. What
crosses are plain values; others tell them.
"""

from blockstep.conformance.search.isolation.place import Isolation
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
