"""Work: a step while it is planned, and what it may still spend."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from blockstep.spec.beside.encoder import NO_ENCODER, Encoder
from blockstep.spec.beside.transfers import NO_STORE, Transfers
from blockstep.spec.copies import replace, wide_dataclass
from blockstep.spec.maps import FrozenMap
from blockstep.spec.memory.pins import NO_PINS, Pins
from blockstep.spec.pool import Pool
from blockstep.spec.requests import RequestState
from blockstep.spec.state import State
from blockstep.spec.vocabulary import (
    BlockCopy,
    BlockTables,
    FrameId,
    KVLoad,
    KVSave,
    RequestId,
    Stats,
    Status,
    TokenIds,
)


class Verdict(Enum):
    """What becomes of a waiting request that a step looks at."""

    ADMITTED = auto()
    PARKED = auto()
    """It waits for what a store loads for it."""
    PASSED_OVER = auto()
    """It waits for something that this step does not bring; others may go first."""
    NO_ROOM = auto()
    """It lacks tokens; nobody overtakes it."""
    NO_BLOCKS = auto()
    """It lacks blocks; nobody overtakes it."""


@wide_dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of the step being planned."""

    request_id: RequestId
    num_computed: int
    """Computed tokens before the step, the prefix hit included."""
    num_scheduled: int
    new_blocks: BlockTables
    """Per group: blocks appended in this step; all of them for an admitted request."""
    hit: BlockTables = ()
    """Per group: those of them that it shares, or that a session kept; empty for who runs."""
    drafts: TokenIds = ()
    status: Status = Status.RUNNING
    """What it was before: RUNNING, or WAITING or PREEMPTED when the step admits it."""
    copies: tuple[BlockCopy, ...] = ()
    """Of blocks that others hold, too: its own stand in their places."""


@dataclass(slots=True)
class Step:
    """A step while it is planned: the one place where this room changes something."""

    state: State
    """As it was before the step."""
    budget: int
    """Tokens that it may still compute (P9)."""
    pool: Pool
    requests: dict[RequestId, RequestState]
    running: list[RequestId]
    waiting: list[RequestId]
    skipped: list[RequestId]
    stats: Stats
    encoder: Encoder = NO_ENCODER
    transfers: Transfers = NO_STORE
    pins: Pins = NO_PINS
    rows: list[Scheduled] = field(default_factory=list)
    granted: list[Scheduled] = field(default_factory=list)
    """Those, and rows that were taken back."""
    loads: list[KVLoad] = field(default_factory=list)
    """In the order in which requests were looked at."""
    saves: list[KVSave] = field(default_factory=list)
    """In the order of preemption."""
    preempted: list[RequestId] = field(default_factory=list)
    passed_over: list[RequestId] = field(default_factory=list)
    """Of those that wait, until all have been looked at: then they stand in their queue again."""
    admission_closed: bool = False
    awaits_answer: bool = False
    """Whether a request lacks blocks that would be free only behind the answer to a frame."""

    def add(self, row: Scheduled) -> None:
        """Plan a row, and pay for it."""
        self.budget -= row.num_scheduled
        self.rows.append(row)
        self.granted.append(row)

    def get_fence(self, request_id: RequestId) -> FrameId | None:
        """The frame in flight whose answer the blocks of a request wait for. Source: P17."""
        return self.state.rules.get_fence(self.state.config, self.state.frames, request_id)

    def withdraw(self, request_id: RequestId) -> bool:
        """Take back the row of a request, and its tokens; whether there was one."""
        rows = [row for row in self.rows if row.request_id == request_id]
        for row in rows:
            self.budget += row.num_scheduled
            self.rows.remove(row)
        return bool(rows)

    def get_state(self, **others: Any) -> State:
        """The state as the step leaves it, but for what is planned: that is in `others`."""
        return replace(
            self.state,
            pool=self.pool,
            requests=FrozenMap(self.requests),
            waiting=tuple(self.waiting),
            skipped_waiting=tuple(self.skipped),
            running=tuple(self.running),
            stats=self.stats,
            encoder=self.encoder,
            transfers=self.transfers,
            pins=self.pins,
            admission_closed=self.admission_closed,
            **others,
        )
