"""Feature: an optional part of the scheduler, and the moments at which it takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from blockstep.spec.core.hooks import NO_HOOKS, Hooks
from blockstep.spec.vocabulary import BlockTables, Config, Observation, Rejected

if TYPE_CHECKING:
    from blockstep.spec.core.requests import RequestState
    from blockstep.spec.core.state import State

Process: TypeAlias = "Callable[[State, Any], tuple[State, Observation] | Rejected]"
"""Applies an event: returns the state after it and the observation, or why it is rejected."""


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """One feature."""

    name: str
    is_asked_for: Callable[[Config], bool]
    """Whether a config has the feature."""
    hooks: Hooks = NO_HOOKS
    instead: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    """The functions that the feature puts in the place of functions of the core."""
    events: Mapping[type, Process] = field(default_factory=dict)
    """The functions for the feature's own events, which every scheduler takes, by their type."""
    shows: Mapping[str, Callable[[State], Any]] = field(default_factory=dict)
    """The functions that return its fields of a `Snapshot`, if the config asks for it."""
    shows_of_request: Mapping[str, Callable[[RequestState], Any]] = field(default_factory=dict)
    """The functions that return its fields of a `RequestSnapshot`, which are parts."""
    list_held: Callable[[State], list[BlockTables]] | None = None
    """Returns the tables of blocks that the feature holds, besides those of requests."""
    invariants: tuple[Callable[[State], bool], ...] = ()
    """Predicates that are true of every reachable state."""


def is_always(config: Config) -> bool:
    """Whether a config has a feature that requests ask for: every config has it.

    Source: architecture D11.
    """
    del config
    return True
