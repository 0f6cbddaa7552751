"""Work: a step while it is planned, and its remaining budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from blockstep.spec.copies import replace, wide_dataclass
from blockstep.spec.core.block_pool import Pool, get_fence
from blockstep.spec.core.parts import NO_PARTS
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import BlockTables, FrameId, RequestId, Stats, Status, TokenIds


class Verdict(Enum):
    """The result of trying to admit a waiting request."""

    ADMITTED = auto()
    SUSPENDED = auto()
    """It got blocks, and waits for something outside of the step."""
    PASSED_OVER = auto()
    """It waits for something that this step does not bring; others are tried."""
    NO_ROOM = auto()
    """It lacks tokens; no later request is tried."""
    NO_BLOCKS = auto()
    """It lacks blocks; no later request is tried."""


ENDS_ADMISSION: Final = (Verdict.NO_ROOM, Verdict.NO_BLOCKS)
"""The verdicts after which no later request is tried."""


@wide_dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's row in the step being planned."""

    request_id: RequestId
    num_computed: int
    """Computed tokens before the step, including the prefix hit."""
    num_scheduled: int
    new_blocks: BlockTables
    """Per group: blocks appended in this step; all of them for an admitted request."""
    drafts: TokenIds = ()
    status: Status = Status.RUNNING
    """The status before: RUNNING, or WAITING or PREEMPTED when the step admits it."""


@dataclass(slots=True)
class Step:
    """A step while it is planned: the only object in this package that is modified."""

    state: State
    """The state before the step."""
    budget: int
    """Tokens that may still be scheduled (P9)."""
    pool: Pool
    requests: dict[RequestId, RequestState]
    running: list[RequestId]
    waiting: list[RequestId]
    skipped: list[RequestId]
    stats: Stats
    parts: dict[str, Any] = field(default_factory=dict)
    """The values that features keep, as in `State.parts`."""
    notes: dict[str, Any] = field(default_factory=dict)
    """The values that features remember while they plan a row; they never get into a state."""
    rows: list[Scheduled] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    passed_over: list[RequestId] = field(default_factory=list)
    """Waiting requests that were skipped, until all have been tried: then they return to a queue.
    """
    awaits_answer: bool = False
    """Whether a request lacks blocks that only a commit of a frame in flight will free."""

    def add(self, row: Scheduled) -> None:
        """Add a row, and subtract its tokens from the budget."""
        self.budget -= row.num_scheduled
        self.rows.append(row)

    def get_fence(self, request_id: RequestId) -> FrameId | None:
        """Return the frame in flight whose commit the blocks of a request wait for. Source: P17."""
        return self.state.rules[get_fence](self.state.config, self.state.frames, request_id)

    def withdraw(self, request_id: RequestId) -> bool:
        """Withdraw the row of a request, and return its tokens to the budget; return whether it had
        one."""
        rows = [row for row in self.rows if row.request_id == request_id]
        for row in rows:
            self.budget += row.num_scheduled
            self.rows.remove(row)
        return bool(rows)

    def get_state(self, **others: Any) -> State:
        """Return the state after the step; fields that planning determines are in `others`."""
        return replace(
            self.state,
            pool=self.pool,
            requests=FrozenMap(self.requests),
            waiting=tuple(self.waiting),
            skipped_waiting=tuple(self.skipped),
            running=tuple(self.running),
            stats=self.stats,
            parts=FrozenMap(self.parts) if self.parts else NO_PARTS,
            **others,
        )
