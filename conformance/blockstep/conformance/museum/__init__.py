"""Seeded bugs: defects of released engines, reproduced in our host engine one at a time.

Each seeded bug changes one method of the host engine, or a few that belong together. `check` must
find it; otherwise the checks miss a defect that is known to happen. A repair that was tried
upstream and was wrong is a seeded bug of its own. The engine is loaded by name, as any foreign
engine would be.

`exhibit` defines what a seeded bug is, the other modules list them by theme, and `trial` checks
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blockstep.conformance.engine import NO_TRAITS, EngineTraits
from blockstep.conformance.features.groups import FEATURE as GROUPS
from blockstep.conformance.features.tiers import FEATURE as TIERS
from blockstep.conformance.features.transfers import FEATURE as TRANSFERS
from blockstep.conformance.museum import (
    across,
    admission,
    brought,
    drafts,
    encoder,
    forks,
    grammars,
    groups,
    identity,
    idle,
    listings,
    pins,
    plan,
    pool,
    preemption,
    promises,
    telling,
    tiers,
    transfers,
)
from blockstep.conformance.museum.exhibit import Engine, Exhibit, collect
from blockstep.conformance.protocol.changed_spec import ChangedSpec
from blockstep.conformance.protocol.feature import without_states
from blockstep.conformance.protocol.features import BY_NAME, LATE
from blockstep.conformance.protocol.registry import load_engine
from blockstep.spec.vocabulary import Config

__all__ = ["EXHIBITS", "Exhibit", "build"]

_PAGES = (pool, admission, preemption, drafts, promises, plan, identity, listings, groups)

_BROUGHT = (brought.ADAPTERS, grammars.PAGE, brought.SESSIONS, encoder.PAGE)
_TELLING = (telling.PAGE, telling.SKIPPING)
_TRANSFERS = (transfers.PAGE, transfers.GROUPS, transfers.STATES)
EXHIBITS: Mapping[str, Exhibit] = collect(
    (
        *(page.PAGE for page in _PAGES),
        groups.STATES,
        *_BROUGHT,
        across.PAGE,
        *_TELLING,
        *_TRANSFERS,
        pins.PAGE,
        forks.PAGE,
        forks.GROUPS,
        tiers.PAGE,
        tiers.GROUPS,
        idle.PAGE,
        idle.STORE,
    )
)
"""All seeded bugs, by name."""


class _Plain(Engine):  # type: ignore[misc]
    """The clean engine without the late features that the seeded bug does not use."""

    left_out: frozenset[str]

    def capabilities(self) -> frozenset[str]:
        has: frozenset[str] = super().capabilities()
        return has - self.left_out


def _leave_states_out(config: Config) -> tuple[Config, str | None]:
    fitting = without_states(config)
    return fitting, None if fitting is config else "recurrent groups: the seeded bug needs none"


def build(name: str, traits: EngineTraits = NO_TRAITS) -> type[Any]:
    """Return the class of the engine with the seeded bug `name`, compared as its traits say.

    Raises:
        KeyError: no seeded bug has this name.
    """
    chosen = EXHIBITS[name]
    clean: Any = load_engine("blockstep.impl.host:HostEngine")
    late = {name: BY_NAME[name].capability for name in LATE if name in BY_NAME}
    taken = {chosen.takes, GROUPS.name if chosen.takes_groups else ""}
    if chosen.takes == TIERS.name:
        taken.add(TRANSFERS.name)  # only the store receives what is swapped out
    left_out = frozenset(late[name] for name in late.keys() - taken)
    before: tuple[type[Any], ...] = (type("Plain", (_Plain,), {"left_out": left_out}),)
    if chosen.takes_groups and not chosen.takes_states:
        traits = replace(traits, fit_config=_leave_states_out)
    if not isinstance(chosen.defect, type):
        wrong = {"change": staticmethod(chosen.defect), "traits": traits}
        return type("PlantedEngine", (*before, ChangedSpec), wrong)
    if chosen.part:
        part = type("PlantedPart", (chosen.defect, getattr(clean, chosen.part)), {})
        return type("PlantedEngine", (*before, clean), {chosen.part: part, "traits": traits})
    return type("PlantedEngine", (chosen.defect, *before, clean), {"traits": traits})
