"""Our engine, held to weaker equivalences than it could be."""

from __future__ import annotations

from blockstep.conformance.engine import EngineTraits, Renamed, Safety, SamePlans
from blockstep.impl.host import HostEngine


class AtSafety(HostEngine):
    """Judged by properties alone."""

    traits = EngineTraits(equivalence=Safety())


class AtRenamed(HostEngine):
    """Compared up to the ids of blocks."""

    traits = EngineTraits(equivalence=Renamed())


class AtPlan(HostEngine):
    """Compared by its plans."""

    traits = EngineTraits(equivalence=SamePlans(shows_blocks=True))
