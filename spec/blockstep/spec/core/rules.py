"""Rules: the functions that a feature or a release replaces, and the hooks of features.

A state carries its rules. The specification calls such a function as `rules[function](...)`: the
strict text is the function of this name, and a release may replace it (architecture D5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from blockstep.spec.core.hooks import NO_HOOKS, Hooks

F = TypeVar("F", bound=Callable[..., Any])


def get_strict_rules() -> Rules:
    """Return the rules of the specification proper. Source: architecture D5."""
    return STRICT_RULES


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rules(dict[Callable[..., Any], Callable[..., Any]]):
    """The functions that are replaced.

    Two values are equal if they have the same changes; hash, pickle and repr depend only on these,
    too. As a dictionary it has the function to call for each function that was looked up, so that
    nearly all of the twenty lookups of an event are without a call.
    """

    changes: frozenset[str] = frozenset()
    """Names of the changes in it; empty for the specification proper."""
    remake: tuple[Callable[..., Rules], tuple[Any, ...]] = (get_strict_rules, ())
    """A function and its arguments that make these very rules again, for pickling."""
    replaced: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    """The functions that are called in the place of functions of the specification."""
    hooks: Hooks = NO_HOOKS
    """The functions of the features that the config asks for, by moment."""
    shows: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """The functions that return the fields of these features in a snapshot."""

    if TYPE_CHECKING:

        def __getitem__(self, function: F) -> F:
            """Return the function to call where the specification calls `function`."""

    def __missing__(self, function: F) -> F:
        """Return the function to call where the specification calls `function`, and keep it."""
        self[function] = found = self.replaced.get(function, function)
        return found  # type: ignore[return-value]

    def replacing(self, function: F, by: F) -> Rules:
        """Return the rules with `by` in the place of `function`, which `rules[function]` returns.

        `by` may call what it replaces: `rules[function]` of the rules before. Source: architecture
        D5.
        """
        return replace(self, replaced={**self.replaced, function: by})

    def __eq__(self, other: object) -> bool:
        return self.changes == other.changes if isinstance(other, Rules) else NotImplemented

    __ne__ = object.__ne__

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.changes)

    def __repr__(self) -> str:
        return f"Rules({', '.join(sorted(self.changes))})"

    def __reduce__(self) -> tuple[Callable[..., Rules], tuple[Any, ...]]:
        return self.remake


STRICT_RULES: Final = Rules()
"""The specification proper: nothing is replaced."""
