"""All laws: one module for each theme, in the order of their names.

A law about the engine is next to the law about the specification that says the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Final

from blockstep.conformance.prove.law import Law, LawModule

ROOMS: Final[tuple[LawModule, ...]] = tuple(
    import_module(f"{__name__}.{module.name}").ROOM for module in iter_modules(__path__)
)
LAWS: Final[Mapping[str, Law]] = MappingProxyType(
    {law.name: law for room in ROOMS for law in room.laws}
)
"""All laws by name, in the order of the modules."""
