"""Definition of a seeded bug, and registration of one on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from blockstep.conformance.protocol.changed_spec import Right, fit_parameters
from blockstep.spec.core.rules import Rules
from blockstep.spec.releases.quirk import Change
from blockstep.spec.vocabulary import Config

__all__ = ["Page", "Right", "SeededBug", "collect", "instead", "replacing"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SeededBug:
    """A seeded bug."""

    name: str
    title: str
    upstream: str
    """The upstream issue or document, or the rule that the defect breaks."""
    properties: tuple[str, ...]
    """Properties that can find the defect; a finding of any such property, or a divergence, counts.
    """
    change: Change
    """The wrong rules: a function that replaces functions of the specification."""
    wrong_fix_of: str = ""
    """The seeded bug that this one is a wrong repair of, if it is one."""
    invisible: str = ""
    """Why no client and no worker can see the defect: it changes only policy, speed or bookkeeping.
    A run at `safety` must then not find it, even if the engine shows its state."""
    invisible_if_hidden: str = ""
    """Why no client and no worker can see the defect, if the engine hides its state."""
    takes_groups: bool = False
    """Whether its episodes have several KV groups. A defect of one group need not run with more."""
    takes_states: bool = False
    """Whether recurrent groups are among them."""
    takes: str = ""
    """The additional feature, by name, that its episodes have."""


class Page:
    """The seeded bugs of one theme, in order of appearance."""

    def __init__(
        self, takes_groups: bool = False, takes_states: bool = False, takes: str = ""
    ) -> None:
        self.exhibits: list[SeededBug] = []
        self._takes: dict[str, object] = {"takes_groups": takes_groups}
        self._takes |= {"takes_states": takes_states, "takes": takes}

    def exhibit(
        self, title: str, upstream: str, properties: str, **more: str
    ) -> Callable[[Change], Change]:
        """Return a decorator that registers a seeded bug, named after its function; `more` are
        other fields.
        """

        def register(change: Change) -> Change:
            name = change.__name__.replace("_", "-")
            property_ids = tuple(properties.split())
            given: Any = {**self._takes, **more}
            self.exhibits.append(SeededBug(name, title, upstream, property_ids, change, **given))
            return change

        return register


def replacing(rules: Rules, right: Callable[..., Any], wrong: Callable[..., Any]) -> Rules:
    """Return the rules with a wrong function in the place of `right`.

    The wrong function takes the parameters that it needs (`changed_spec.fit_parameters`).
    """
    return rules.replacing(right, fit_parameters(rules[right], wrong, right))


def instead(right: Callable[..., R]) -> Callable[[Callable[..., R]], Change]:
    """Return a decorator that makes a change of a wrong function, which replaces `right`."""

    def get_change(wrong: Callable[..., R]) -> Change:
        @wraps(wrong)
        def change(rules: Rules, _config: Config) -> Rules:
            return replacing(rules, right, wrong)

        return change

    return get_change


def collect(pages: Iterable[Page]) -> dict[str, SeededBug]:
    """Return all seeded bugs by name.

    Raises:
        ValueError: two seeded bugs have one name, or a wrong fix names an unknown one.
    """
    exhibits: dict[str, SeededBug] = {}
    for page in pages:
        for entry in page.exhibits:
            if entry.name in exhibits:
                raise ValueError(f"seeded bug {entry.name!r}: the name is taken; choose another")
            exhibits[entry.name] = entry
    for entry in exhibits.values():
        if entry.wrong_fix_of and entry.wrong_fix_of not in exhibits:
            raise ValueError(
                f"seeded bug {entry.name!r}: there is no {entry.wrong_fix_of!r} to fix"
            )
    return exhibits
