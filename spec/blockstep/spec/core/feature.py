"""Feature: an optional part of the scheduler, and the moments at which it takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockstep.spec.core.hooks import NO_HOOKS, Hooks
from blockstep.spec.vocabulary import Config

if TYPE_CHECKING:
    from blockstep.spec.core.state import State


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """One feature."""

    name: str
    is_asked_for: Callable[[Config], bool]
    """Whether a config has the feature."""
    hooks: Hooks = NO_HOOKS
    instead: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    """The functions that the feature puts in the place of functions of the core."""
    invariants: tuple[Callable[[State], bool], ...] = ()
    """Predicates that are true of every reachable state."""


def is_always(config: Config) -> bool:
    """Whether a config has a feature that requests ask for: every config has it.

    Source: architecture D11.
    """
    del config
    return True
