"""The host engine a second time, without machine code: as the Python that its functions are."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import blockstep.impl
from blockstep.impl.host import HostEngine
from blockstep.spec import vocabulary as v

NAME = "blockstep.impl.host"


@cache
def load_as_python() -> Any:
    """Return the package, imported again as if numba was not installed."""
    kept = {name: sys.modules.pop(name) for name in _list_modules()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "numba", None)
        try:
            package: Any = import_module(NAME)
        finally:
            for name in _list_modules():
                del sys.modules[name]
            sys.modules.update(kept)
            blockstep.impl.host = kept[NAME]
    assert not package.IS_COMPILED
    with pytest.warns(RuntimeWarning, match="plain Python"):
        package.HostEngine(v.Config(num_blocks=2))  # it warns once
    return package


def _list_modules() -> list[str]:
    return [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]


class SideBySide:
    """The engine as machine code and as Python: after each event all their arrays are equal.

    Args:
        config: the constants of the run.
    """

    def __init__(self, config: v.Config) -> None:
        self.compiled = HostEngine(config)
        self.as_python: HostEngine = load_as_python().HostEngine(config)

    def apply(self, event: v.Event) -> v.Observation:
        """Apply an event to both; return their answer."""
        answer = self.compiled.apply(event)
        assert answer == self.as_python.apply(event)
        one, other = self.compiled.requests.state, self.as_python.requests.state
        for name in one._fields:
            assert np.array_equal(getattr(one, name), getattr(other, name)), (name, event)
        return answer

    def snapshot(self) -> v.Snapshot:
        """Return their state."""
        shown = self.compiled.snapshot()
        assert shown == self.as_python.snapshot()
        return shown

    def capabilities(self) -> frozenset[str]:
        """Return what both implement."""
        return self.compiled.capabilities()
