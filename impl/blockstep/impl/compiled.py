"""Old name of `blockstep.impl.host`."""

from __future__ import annotations

import warnings

from blockstep.impl.host import HostEngine as CompiledEngine

__all__ = ["CompiledEngine"]

warnings.warn(
    "blockstep.impl.compiled:CompiledEngine is called blockstep.impl.host:HostEngine now",
    DeprecationWarning,
    stacklevel=2,
)
