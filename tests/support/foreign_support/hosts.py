"""Our engine, held to weaker equivalences than it could be."""

from __future__ import annotations

from blockstep.conformance.engine import EngineTraits, Safety
from blockstep.impl.host import HostEngine


class AtSafety(HostEngine):
    """Judged by properties alone."""

    traits = EngineTraits(equivalence=Safety())
