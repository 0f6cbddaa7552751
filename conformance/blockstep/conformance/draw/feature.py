"""Draws of features: additions to configs and requests, and actions.

A folder of `conformance.features` may have a module `draws` with an object `DRAWS`. The functions
of this package call the objects of all features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from blockstep.conformance.draw.client_view import Draw
from blockstep.conformance.draw.presets import Swarm
from blockstep.conformance.draw.view import View, WeightedAction
from blockstep.conformance.protocol.feature import Feature
from blockstep.conformance.protocol.feature_selection import FeatureSelection
from blockstep.conformance.protocol.features import LATE, load_parts
from blockstep.conformance.protocol.program import Report
from blockstep.spec import vocabulary as v

LATE_ONE_IN = 4
"""One run in this number has a given late feature, if its engine takes it."""


@dataclass(slots=True)
class Late:
    """A swarm while late features are added to it."""

    swarm: Swarm
    config: v.Config
    draw: Draw
    wish: FeatureSelection
    takes: Callable[[Feature], bool]
    """Whether the engine has a feature."""
    has_policy: bool
    """Whether the user gave the policy."""
    drawn: set[str] = field(default_factory=set)
    """Names of the features that the run has besides those of the swarm."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The swarm, unfinished requests, names and frames, from which mistakes are made."""

    swarm: Swarm
    live: Mapping[v.RequestId, v.Request]
    names: Sequence[v.RequestId]
    """Ids of unfinished requests and some others."""
    frames: Sequence[v.FrameId]


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of one feature. Each function has a default that adds nothing."""

    add_to_config: Callable[[Late], None] = lambda _: None
    """Changes the config, and names the features that come with this one."""
    finish_config: Callable[[Late], None] = lambda _: None
    """Changes the config of a run with or without the feature, after all were added."""
    one_in: Callable[[FeatureSelection], int] = lambda _: LATE_ONE_IN
    """One run in this number has the feature."""
    goes_with: Callable[[Late], bool] = lambda _: True
    """Whether it may be added where it was not wished for."""
    waits: bool = False
    """Whether requests wait for an event with it, or run in another order. A crowd has it only on
    request, since few of its requests would run."""
    add_to_request: Callable[[Swarm, Draw, v.Request, bool], v.Request] | None = None
    """Returns a request with what the feature adds; True if its prompt continues the tokens of
    another."""
    shortens: bool = False
    """Whether it cuts prompts, and so comes after the additions of other features."""
    go_on: Callable[[View, Draw, v.RequestId], v.Request | None] | None = None
    """Draws a request that continues an earlier one; None for any other request."""
    answer: Callable[[View, Draw], Report] | None = None
    """Draws the report of a worker that comes with the model output of the oldest frame."""
    actions: Mapping[str, WeightedAction] = field(default_factory=dict)
    list_mistakes: Callable[[Situation], list[v.Event]] = lambda _: []
    """Returns malformed or unacceptable events."""


@cache
def get_draws() -> Mapping[str, Draws]:
    """Return the draws of each late feature, in the order of the table."""
    modules = load_parts("draws")
    return {name: modules[name].DRAWS if name in modules else Draws() for name in LATE}


@cache
def list_draws(features: frozenset[str]) -> tuple[Draws, ...]:
    """Return the draws of some features, those that shorten a request last."""
    found = [draws for name, draws in get_draws().items() if name in features]
    return tuple(sorted(found, key=lambda draws: draws.shortens))
