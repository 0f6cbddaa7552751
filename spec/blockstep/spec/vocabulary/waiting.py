"""WaitingReason: why a request that waits is not running."""

from __future__ import annotations

from enum import StrEnum


class WaitingReason(StrEnum):
    """What would have to change first; of several reasons the one that is asked first."""

    PAUSED = "paused"
    """Nobody is admitted."""
    CLOSED = "closed"
    """Blocks were short, and `admission_high_blocks` are not free again."""
    GRAMMAR = "grammar"
    """Its grammar is not compiled yet."""
    REMOTE_KV = "remote_kv"
    """It is parked: a store has not come to the end of its load."""
    STORE = "store"
    """The store does not know yet what it has of it."""
    INPUT = "input"
    """It is a session that rests until further input comes."""
    IN_FLIGHT = "in_flight"
    """It was preempted, and frames in flight will bring tokens of it."""
    ADAPTER = "adapter"
    """It would bring one adapter more than may be in use."""
    SEATS = "seats"
    """As many requests run as may."""
    BEHIND = "behind"
    """Another one stands before it in line, and is tried first."""
    GATE = "gate"
    """Its first chunk would fit the free blocks; all of its known tokens do not."""
    CAPACITY = "capacity"
    """Not even its first chunk fits the free blocks."""
    NEXT = "next"
    """Nothing: the next plan admits it, unless those that run leave it no tokens or blocks."""
