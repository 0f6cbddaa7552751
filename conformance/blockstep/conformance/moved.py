"""Old names of modules that users import.

PYTEST_DONT_REWRITE.

An import of an old name works, with a DeprecationWarning that names the new one.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HERE = "blockstep.conformance."
MOVED: Mapping[str, str] = {
    "adapters": "engines.adapters",
    "arms": "search.arms",
    "check": "search.check",
    "cli": "command.main",
    "compare": "protocol.compare",
    "dataplane": "judge.dataplane",
    "driver": "lockstep.driver",
    "findings": "protocol.findings",
    "hunt": "search.hunt",
    "isolation": "search.isolation",
    "machine": "search.machine",
    "presets": "draw.presets",
    "program": "protocol.program",
    "properties": "judge.properties",
    "registry": "protocol.registry",
    "replay": "recorded.replay",
    "safety": "engine",
    "serving": "engines.serving",
    "shrink": "search.shrink",
    "tokens": "protocol.tokens",
    "traces": "recorded.traces",
    "validate": "recorded.validate",
    "witnesses": "judge.witnesses",
    "worker": "judge.worker",
    "workloads": "draw.workloads",
}
"""New names of modules by their old ones, both within `blockstep.conformance`. The modules of a
package have moved with it."""


def get_new_name(name: str) -> str | None:
    """Return the new name of a module; None if it has not moved."""
    if not name.startswith(_HERE):
        return None
    first, _, rest = name.removeprefix(_HERE).partition(".")
    moved = MOVED.get(first)
    return None if moved is None else ".".join(filter(None, (_HERE + moved, rest)))


class Finder(MetaPathFinder, Loader):
    """Finds modules by their old names, if no module has that name."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import of a module by its old name; None for any other name."""
        if get_new_name(name) is None:
            return None
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Make the names of the new module available in the module of the old name."""
        new_name = get_new_name(module.__name__)
        assert new_name is not None
        new = importlib.import_module(new_name)
        what = f"{module.__name__} is called {new_name} now"
        warnings.warn(what, DeprecationWarning, stacklevel=2)

        def find(name: str) -> Any:
            return getattr(new, name)

        module.__dict__["__getattr__"] = find


def install() -> None:
    """Register the finder of old names, after all other finders."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
