"""Covering programs: a few short ones that do everything that a world can do.

A transition does a set of things: branches of the specification's code, coverage goals, and kinds
of observation. A walk keeps the first transition that does something new, so the path to it is a
shortest one; a greedy choice of these programs covers everything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

from blockstep.conformance.explore.transition_checks import (
    Moment,
    StateMemo,
    get_moment,
    get_witnesses,
)
from blockstep.spec.core.state import State
from blockstep.spec.transition import transition
from blockstep.spec.vocabulary import Event

Deeds: TypeAlias = frozenset[str]

_SPEC = str(Path(transition.__code__.co_filename).parent)
_VOCABULARY = str(Path(_SPEC) / "vocabulary")


class Tracer:
    """Runs transitions and records the branches of the specification that they take.

    A branch is a step from one line to another within a function; the branches depend on the Python
    version. A debugger or coverage tool is suspended meanwhile.
    """

    def __init__(self) -> None:
        self._names: dict[CodeType, str] = {}
        self._last: dict[FrameType, int] = {}
        self._arcs: set[str] = set()
        self._memo = StateMemo()

    def apply(self, state: State, event: Event) -> tuple[Moment, Deeds]:
        """Return the transition and the set of all that it does."""
        self._arcs, self._last = set(), {}
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            moment = get_moment(state, event)
        finally:
            sys.settrace(before)
        answer = f"{type(event).__name__} -> {type(moment.observation).__name__}"
        return moment, frozenset({answer, *self._arcs, *get_witnesses(self._memo, moment)})

    def _enter(self, frame: FrameType, _what: str, _argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            path = code.co_filename
            is_rule = path.startswith(_SPEC) and not path.startswith(_VOCABULARY)
            name = self._names[code] = f"{Path(path).stem}.{code.co_name}" if is_rule else ""
        if not name:
            return None
        self._last[frame] = 0
        return self._step

    def _step(self, frame: FrameType, what: str, _argument: Any) -> Callable[..., Any]:
        if what == "line":
            line = frame.f_lineno
            self._arcs.add(f"{self._names[frame.f_code]}:{self._last[frame]}-{line}")
            self._last[frame] = line
        elif what == "return":
            self._arcs.add(f"{self._names[frame.f_code]}:{self._last.pop(frame, 0)}-end")
        return self._step


def trace_program(start: State, events: Iterable[Event]) -> Deeds:
    """Return everything that a program does."""
    tracer, deeds, state = Tracer(), set[str](), start
    for event in events:
        moment, done = tracer.apply(state, event)
        deeds |= done
        state = moment.after
    return frozenset(deeds)


def choose(programs: Sequence[tuple[int, Deeds]]) -> list[int]:
    """Return the indices of programs that together do all that all do; each is (length, deeds).

    The choice is greedy: most new deeds first, then the shortest, then the first. Programs that
    turn out to be unnecessary are dropped. The result is small, but not provably minimal.
    """
    left = set[str]().union(*(deeds for _, deeds in programs))
    chosen: list[int] = []
    while left:
        best = max(
            range(len(programs)),
            key=lambda i: (len(programs[i][1] & left), -programs[i][0], -i),
        )
        chosen.append(best)
        left -= programs[best][1]
    for index in list(reversed(chosen)):
        others = set[str]().union(*(programs[i][1] for i in chosen if i != index))
        if programs[index][1] <= others:
            chosen.remove(index)
    return sorted(chosen)
