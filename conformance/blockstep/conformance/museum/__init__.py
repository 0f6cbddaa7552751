"""The museum: defects that released engines had, planted in ours, and how they were caught.

Each exhibit changes one method of the host engine, or a few that belong together. `check` must
kill it, or the suite is blind to a defect that is known to happen. A repair that was tried upstream
and was wrong is an exhibit of its own. The engine is loaded by name, as any foreign one would be.

`exhibit` says what one is, the pages show them by theme, `trial` kills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockstep.conformance.engine import NO_TRAITS, EngineTraits
from blockstep.conformance.museum import (
    admission,
    drafts,
    identity,
    plan,
    pool,
    preemption,
    promises,
)
from blockstep.conformance.museum.exhibit import Exhibit, collect
from blockstep.conformance.protocol.registry import load_engine

__all__ = ["EXHIBITS", "Exhibit", "build"]

_PAGES = (pool, admission, preemption, drafts, promises, plan, identity)

EXHIBITS: Mapping[str, Exhibit] = collect(page.PAGE for page in _PAGES)
"""All planted defects, by name."""


def build(name: str, traits: EngineTraits = NO_TRAITS) -> type[Any]:
    """The class of the engine with the defect `name`, held to the spec as its traits say.

    Raises:
        KeyError: no exhibit has the name.
    """
    chosen = EXHIBITS[name]
    clean: Any = load_engine("host")
    if chosen.part:
        part = type("PlantedPart", (chosen.defect, getattr(clean, chosen.part)), {})
        return type("PlantedEngine", (clean,), {chosen.part: part, "traits": traits})
    return type("PlantedEngine", (chosen.defect, clean), {"traits": traits})
