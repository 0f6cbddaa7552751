"""Laws: all of them, by room.

The rooms are those of the specification as far as it computes: amounts first, then what holds
blocks, whole steps, output, and at last the engine on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from blockstep.conformance.prove.law import Law
from blockstep.conformance.prove.laws import (
    counts,
    drafts,
    host,
    output,
    pool,
    preemption,
    promises,
    slots,
    step,
)

ROOMS: Final = (
    counts.ROOM,
    slots.ROOM,
    drafts.ROOM,
    promises.ROOM,
    pool.ROOM,
    preemption.ROOM,
    step.ROOM,
    output.ROOM,
    host.ROOM,
)

LAWS: Final[Mapping[str, Law]] = MappingProxyType(
    {law.name: law for room in ROOMS for law in room.laws}
)
"""All laws by name, in the order of the rooms."""
