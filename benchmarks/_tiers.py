"""Tiers of a benchmark: a store whose blocks have names and no content, and whose copies take time.

What goes where is `TierOrder`, as in the model engine; what a copy takes is `Link`. Each way into a
tier, and each way out, makes one copy after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from blockstep.impl.digests import name_blocks
from blockstep.impl.tiers import Link
from blockstep.impl.tiers.order import Move, TierOrder
from blockstep.spec.vocabulary import (
    Event,
    KVLoad,
    KVOffer,
    KVSave,
    KVTransfers,
    Request,
    RequestId,
    TokenIds,
    TransfersReported,
)


@dataclass(frozen=True, slots=True)
class Tier:
    """Capacity of a tier in blocks, and the links to it and from it."""

    num_blocks: int
    out: Link
    back: Link


@dataclass(slots=True)
class Tiers:
    """KV store of one engine. Times are milliseconds of the model's clock."""

    tiers: Sequence[Tier]
    block_size: int
    block_bytes: int
    num_loaded: int = 0
    """Number of blocks that were loaded."""
    _order: TierOrder = field(init=False)
    _free_at: dict[tuple[int, str], float] = field(default_factory=dict)
    """Time at which a way is free again, by tier and direction."""
    _names: dict[RequestId, list[bytes]] = field(default_factory=dict)
    _requests: dict[RequestId, Request] = field(default_factory=dict)
    _ends: list[tuple[float, int, Event | RequestId]] = field(default_factory=list)
    """Heap of times with the event to report; a request id stands for an offer made at that
    time."""
    _ties: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._order = TierOrder([tier.num_blocks for tier in self.tiers])

    def begin(self, request: Request) -> KVOffer:
        """Return the offer for a request that was just submitted."""
        self._requests[request.request_id] = request
        self._names[request.request_id] = self._name(request, request.prompt_token_ids)
        return self._offer(request.request_id)

    def load(self, load: KVLoad, now: float) -> None:
        """Load blocks; those evicted since they were offered are reported as invalid."""
        (block_ids,), first = load.block_ids, load.num_computed_tokens // self.block_size
        names = self._names[load.request_id][first : len(block_ids)]
        names = names[: self._order.count(names)]
        self.num_loaded += len(names)
        levels = [self._order.level_of(name) for name in names]
        ends = [
            self._copy(level, "back", levels.count(level), now)
            for level in range(len(self.tiers))
            if level in levels
        ]
        self._move(self._order.fetch(names), now)
        invalid = block_ids[first + len(names) :]
        end = max(ends, default=now)
        if invalid:
            self._add_end(end, load.request_id)  # what there is now: it is asked for again
        transfers = KVTransfers((load.request_id,), invalid_block_ids=invalid)
        self._add_end(end, TransfersReported(transfers))

    def swap(self, save: KVSave, outputs: TokenIds, now: float) -> KVOffer:
        """Keep what a victim has; it is offered once it is there."""
        request = self._requests[save.request_id]
        tokens = (*request.prompt_token_ids, *outputs)[: save.num_tokens]
        names = self._name(request, tokens)
        if len(names) > len(self._names[save.request_id]):
            self._names[save.request_id] = names
        self._add_end(self._keep(names, now), save.request_id)
        return KVOffer(save.request_id, None, is_async=True, delays_free=True)

    def end(self, request_id: RequestId, tokens: TokenIds, now: float) -> None:
        """Keep what an ended request has computed; its blocks are held until they are copied."""
        del self._names[request_id]
        names = self._name(self._requests.pop(request_id), tokens)
        transfers = KVTransfers(finished_sending=(request_id,))
        self._add_end(self._keep(names, now), TransfersReported(transfers))

    def list_events(self, now: float) -> list[Event]:
        """Return the events of all transfers that have ended by now."""
        events: list[Event] = []
        while self._ends and self._ends[0][0] <= now:
            ended = heapq.heappop(self._ends)[2]
            if not isinstance(ended, str):
                events.append(ended)
            elif ended in self._names:
                events.append(self._offer(ended))
        return events

    def find_next_end(self, now: float) -> float:
        """Return the time of the next end of a transfer; `now` if none is under way."""
        return max(now, self._ends[0][0]) if self._ends else now

    def _offer(self, name: RequestId) -> KVOffer:
        num_tokens = self._order.count(self._names[name]) * self.block_size
        return KVOffer(name, num_tokens, is_async=True, delays_free=True)

    def _name(self, request: Request, tokens: TokenIds) -> list[bytes]:
        like = replace(request, prompt_token_ids=tokens)
        return name_blocks(like, self.block_size)

    def _keep(self, names: list[bytes], now: float) -> float:
        return self._move(self._order.keep(names, 0), now)

    def _move(self, moves: list[Move], now: float) -> float:
        """Copy blocks into tiers; return when the last copy from the pool ends."""
        ends = [now]
        for level in range(len(self.tiers)):
            sources = [move.source for move in moves if move.target == level]
            end = self._copy(level, "out", len(sources), now)
            ends += [end] if None in sources else []
        return max(ends)

    def _copy(self, level: int, way: str, num_blocks: int, now: float) -> float:
        if not num_blocks:
            return now
        link = self.tiers[level].out if way == "out" else self.tiers[level].back
        begin = max(now, self._free_at.get((level, way), 0.0))
        end = begin + 1e3 * float(link.compute_copy_time(num_blocks, self.block_bytes))
        self._free_at[level, way] = end
        return end

    def _add_end(self, when: float, ended: Event | RequestId) -> None:
        heapq.heappush(self._ends, (when, next(self._ties), ended))
