"""Step: what one Schedule has decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from blockstep.impl.host.adapters import AdapterSeats
from blockstep.impl.host.encoder import Encoding
from blockstep.spec.vocabulary import BlockCopy, BlockTables, KVLoad, KVSave, RequestId, TokenIds

RunningRow: TypeAlias = tuple[int, BlockTables, TokenIds]
"""Tokens scheduled, blocks appended (no group at all if there are none), drafts among the tokens. A
tuple, as there is one per row."""
AdmittedRow: TypeAlias = tuple[int, int, bool]
"""Slot, tokens scheduled, whether it is resumed."""


@dataclass(slots=True)
class Step:
    """The plan in the making."""

    budget: int
    """Tokens that may still be scheduled."""
    encoder_budget: int
    """Embeddings that may still be encoded."""
    rows: dict[int, RunningRow] = field(default_factory=dict)
    """Running requests by slot, in order of scheduling; preemption takes some out again."""
    admitted: list[AdmittedRow] = field(default_factory=list)
    """In order of admission; nothing takes one out again."""
    taken: list[BlockTables] = field(default_factory=list)
    """Blocks taken by those admitted, where there are several KV groups."""
    copies: dict[int, tuple[BlockCopy, ...]] = field(default_factory=dict)
    """Shared blocks that rows write in, and what they write in instead, by slot, in order of
    scheduling; preemption takes some out again."""
    loads: list[KVLoad] = field(default_factory=list)
    """What a store loads, in order of being found."""
    saves: list[KVSave] = field(default_factory=list)
    """What a store keeps of those who were preempted, in that order."""
    preempted_req_ids: list[RequestId] = field(default_factory=list)
    encodings: dict[int, Encoding] = field(default_factory=dict)
    """What rows need of an encoder, by slot, in order of scheduling."""
    awaits_answer: bool = False
    """Whether one that runs waits for blocks that are free once a frame in flight is answered."""
    seats: AdapterSeats | None = None
    """Adapters among those that run, as of the waiting phase; None where nobody counts them."""
