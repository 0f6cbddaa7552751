"""WaitingReason: why a waiting request is not running."""

from __future__ import annotations

from enum import StrEnum


class WaitingReason(StrEnum):
    """The thing that would have to change first; of several reasons the one that is checked
    first."""

    PAUSED = "paused"
    """Scheduling is paused: no request is admitted."""
    CLOSED = "closed"
    """Blocks were short, and `admission_high_blocks` are not free again."""
    GRAMMAR = "grammar"
    """The grammar is not compiled yet."""
    REMOTE_KV = "remote_kv"
    """The asynchronous load has not ended."""
    STORE = "store"
    """The store has no answer about it yet."""
    INPUT = "input"
    """It is an idle session that waits for further input."""
    IN_FLIGHT = "in_flight"
    """It was preempted, and frames in flight will deliver its tokens."""
    ADAPTER = "adapter"
    """It would exceed the number of LoRA adapters in use."""
    SEATS = "seats"
    """All running slots are taken."""
    BEHIND = "behind"
    """Another request is ahead of it in the queue, and is tried first."""
    GATE = "gate"
    """The first chunk would fit the free blocks; all known tokens do not."""
    CAPACITY = "capacity"
    """Not even its first chunk fits the free blocks."""
    NEXT = "next"
    """Nothing: the next plan admits it, unless running requests leave it no tokens or blocks."""
