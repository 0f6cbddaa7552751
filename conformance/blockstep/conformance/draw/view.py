"""View: what a client knows of a run, and the actions that are drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from blockstep.conformance.draw.client_view import Draw, Memory
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.protocol.feature import Feature
from blockstep.conformance.protocol.program import Action
from blockstep.spec import vocabulary as v


@dataclass(slots=True)
class View:
    """State of a run, as far as a client knows it."""

    swarm: Swarm
    client: Memory
    num_submitted: int = 0
    seeks_aborts: bool = False
    """Whether to abort often, and preferably requests in flight. Set for runs without a comparison,
    where wrong memory shows only after an abort."""

    ready: set[v.RequestId] = field(default_factory=set)
    """Requests whose grammars were reported as compiled."""
    actions: Mapping[str, WeightedAction] = field(default_factory=dict, init=False, repr=False)
    """Actions that the features of the swarm allow, by name; `draw.actions` fills it."""

    def note(self, action: Action) -> None:
        """Note that an action was done."""
        match action:
            case v.Submit(request=request):
                self.num_submitted += 1
                self.ready.discard(request.request_id)
            case v.Fork():
                self.num_submitted += 1
            case v.GrammarReady(request_id=name):
                self.ready.add(name)


Drawing: TypeAlias = Callable[[View, Draw], Action]
"""Function that draws the details of one kind of action."""


@dataclass(frozen=True, slots=True)
class WeightedAction:
    """Drawing function of an action, and how often it is drawn."""

    draw: Drawing
    weight: int
    feature: Feature | None = None
    """The feature that it needs."""
    weigh: Callable[[int, View], int] | None = None
    """Returns the weight now, given the usual one; None if it is always the usual one."""
    has_point: Callable[[View], bool] | None = None
    """Whether the action makes sense now; None if it always does."""
