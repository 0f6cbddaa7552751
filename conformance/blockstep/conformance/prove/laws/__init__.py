"""All laws, by theme.

The amounts of tokens and blocks come first, then block ownership, whole steps and output. A law
about the engine is next to the law about the specification that says the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from blockstep.conformance.prove.law import Law
from blockstep.conformance.prove.laws import (
    adapters,
    admission,
    allocation,
    counts,
    drafts,
    encoder,
    forks,
    grammars,
    groups,
    output,
    pins,
    pool,
    preemption,
    promises,
    publishing,
    sessions,
    slots,
    states,
    step,
    telling,
    tiers,
    transfers,
)

_AMOUNTS = (
    *(counts, slots, publishing, telling, allocation, groups, states, encoder),
    *(drafts, grammars, promises),
)
_BLOCKS_AND_STEPS = (
    *(pool, pins, forks, preemption, step, admission, adapters),
    *(sessions, transfers, tiers, output),
)
ROOMS: Final = tuple(module.ROOM for module in (*_AMOUNTS, *_BLOCKS_AND_STEPS))
LAWS: Final[Mapping[str, Law]] = MappingProxyType(
    {law.name: law for room in ROOMS for law in room.laws}
)
"""All laws by name, in the order of the themes."""
