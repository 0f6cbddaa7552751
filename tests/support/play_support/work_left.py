"""Work left: steps after which a state says wrongly whether work is left."""

from __future__ import annotations

from blockstep.spec.vocabulary import Schedule
from play_support.play import Case, Play, after, nothing
from play_support.scenes import submitted

__all__ = ["ALONE", "NAMES"]


def planned_for_no_request() -> Play:
    """A step is planned before any request was submitted."""
    return Play().do(Schedule())


ALONE: list[Case] = [
    (
        "loop_runs_while_there_is_work",
        submitted,
        nothing,
        lambda s: after(s, has_work=False),
    ),
    (
        "loop_sleeps_without_work",
        planned_for_no_request,
        nothing,
        lambda s: after(s, has_work=True),
    ),
]
NAMES = tuple(name for name, *_ in ALONE)
