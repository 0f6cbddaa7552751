"""Seeded bugs: defects of released engines, reproduced one at a time.

A seeded bug is a wrong rule: it replaces a function of the specification, or a few that belong
together, as a quirk of a release does. The engine with the bug is the specification with that
replacement (`protocol.changed_spec`), and it is held to the specification itself like any other
engine. `check` must find it; otherwise the checks miss a defect that is known to happen. A repair
that was tried upstream and was wrong is a seeded bug of its own.

`bug` defines what a seeded bug is, and `trial` checks them. Each other module has those of one
theme, as a `Page` or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from blockstep.conformance.engine import NO_TRAITS, EngineTraits
from blockstep.conformance.features.groups import FEATURE as GROUPS
from blockstep.conformance.features.tiers import FEATURE as TIERS
from blockstep.conformance.features.transfers import FEATURE as TRANSFERS
from blockstep.conformance.museum.bug import Page, SeededBug, collect
from blockstep.conformance.protocol.changed_spec import ChangedSpec
from blockstep.conformance.protocol.feature import without_states
from blockstep.conformance.protocol.features import BY_NAME, LATE
from blockstep.spec.vocabulary import Config

__all__ = ["EXHIBITS", "SeededBug", "build"]

_WITHOUT_PAGES = {"bug", "trial"}
_MODULES = [
    import_module(f"{__name__}.{module.name}")
    for module in iter_modules(__path__)
    if module.name not in _WITHOUT_PAGES
]
EXHIBITS: Mapping[str, SeededBug] = collect(
    [page for module in _MODULES for page in vars(module).values() if isinstance(page, Page)]
)
"""All seeded bugs by name, in the order of the modules' names."""


class _Planted(ChangedSpec):
    """The specification with a seeded bug, without the late features that the bug does not use."""

    left_out: frozenset[str]

    def capabilities(self) -> frozenset[str]:
        """Return all capabilities but those of the features that are left out."""
        return super().capabilities() - self.left_out


def _leave_states_out(config: Config) -> tuple[Config, str | None]:
    fitting = without_states(config)
    return fitting, None if fitting is config else "recurrent groups: the seeded bug needs none"


def build(name: str, traits: EngineTraits = NO_TRAITS) -> type[Any]:
    """Return the class of the engine with the seeded bug `name`, compared as its traits say.

    Raises:
        KeyError: no seeded bug has this name.
    """
    chosen = EXHIBITS[name]
    late = {name: BY_NAME[name].capability for name in LATE if name in BY_NAME}
    taken = {chosen.takes, GROUPS.name if chosen.takes_groups else ""}
    if chosen.takes == TIERS.name:
        taken.add(TRANSFERS.name)  # only the store receives what is swapped out
    left_out = frozenset(late[name] for name in late.keys() - taken)
    if chosen.takes_groups and not chosen.takes_states:
        traits = replace(traits, fit_config=_leave_states_out)
    members = {"change": staticmethod(chosen.change), "left_out": left_out, "traits": traits}
    return type("PlantedEngine", (_Planted,), members)
