"""Step: what one Schedule has decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from blockstep.impl.encoder import Encoding
from blockstep.impl.host.adapters import AdapterSeats
from blockstep.spec.vocabulary import BlockCopy, BlockTables, KVLoad, KVSave, RequestId, TokenIds

RunningRow: TypeAlias = tuple[int, BlockTables, TokenIds]
"""Tokens scheduled, blocks appended (no group at all if there are none), drafts among the tokens. A
tuple, as each row has one."""
AdmittedRow: TypeAlias = tuple[int, int, bool]
"""Slot, tokens scheduled, whether it is resumed."""


@dataclass(slots=True)
class Step:
    """The plan under construction."""

    budget: int
    """Tokens that may still be scheduled."""
    encoder_budget: int
    """Embeddings that may still be encoded."""
    rows: dict[int, RunningRow] = field(default_factory=dict)
    """Rows of running requests by slot, in order of scheduling; preemption removes rows."""
    admitted: list[AdmittedRow] = field(default_factory=list)
    """Rows of admitted requests, in order of admission; none is removed."""
    taken: list[BlockTables] = field(default_factory=list)
    """Blocks taken by admitted requests, where there are several KV groups."""
    copies: dict[int, tuple[BlockCopy, ...]] = field(default_factory=dict)
    """Copies of shared blocks that rows write to, by slot, in order of scheduling; preemption
    removes some."""
    loads: list[KVLoad] = field(default_factory=list)
    """The loads of the store, in the order in which they were found."""
    saves: list[KVSave] = field(default_factory=list)
    """The blocks of preempted requests that a store saves, in order of preemption."""
    preempted_req_ids: list[RequestId] = field(default_factory=list)
    encodings: dict[int, Encoding] = field(default_factory=dict)
    """The encoder outputs that rows need, by slot, in order of scheduling."""
    awaits_answer: bool = False
    """Whether a running request waits for blocks that become free when a frame is committed."""
    seats: AdapterSeats | None = None
    """The LoRA slots of running requests, from the waiting phase on; None without a limit."""
