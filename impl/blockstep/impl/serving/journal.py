"""Journal: published batches of KV events, numbered; the last ones are kept, and all are summed up.

    0 1 2 3 4 5 | 6 7 8 9 | 10        kept: 6 to 9; the next one is 10
    dropped       kept

A subscriber that lost kept batches asks for these. One that lost more, or starts late, asks for a
snapshot: one batch that stores all blocks cached now, and the number of the next batch. vLLM 0.19.1
keeps 10,000 batches and has no snapshot (upstream #40363, #57789).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from blockstep.impl.serving.wire import (
    Batch,
    BlockHash,
    Cleared,
    ClearedMap,
    Form,
    Removed,
    Stored,
    StoredMap,
    WireEvent,
    get_group,
    read_batch,
    write_batch,
)

_Name: TypeAlias = tuple[BlockHash, str | None, int | None]
"""Hash, medium and KV-cache group of a block."""


@dataclass(slots=True)
class _Block:
    """A cached block, as an event of its own, and the number of its copies."""

    stored: Stored
    num_copies: int


class Journal:
    """Numbers batches from 0, keeps the last `num_kept`, and knows the blocks that are cached.

    `form` is the form of the batches, and that of snapshots.
    """

    def __init__(self, num_kept: int = 10_000, form: Form = Form.ARRAYS) -> None:
        self._cleared = ClearedMap() if form is Form.MAPS else Cleared()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept)
        self._blocks: dict[_Name, _Block] = {}
        self.next_seq = 0
        """Number of the next batch."""

    def append(self, payload: bytes) -> int:
        """Keep a batch; return its number. Raises msgspec.MsgspecError if it is not a batch."""
        for event in read_batch(payload).events:
            self._sum_up(event)
        seq = self.next_seq
        self._kept.append((seq, payload))
        self.next_seq += 1
        return seq

    def list_since(self, seq: int) -> list[tuple[int, bytes]]:
        """Return the kept batches from number `seq` on, without those that were dropped."""
        return [(kept, payload) for kept, payload in self._kept if kept >= seq]

    def take_snapshot(self, now: float, rank: int | None = 0) -> tuple[int, bytes]:
        """Return the number of the next batch, and a batch that stores all cached blocks.

        A parent precedes its children if it is cached. Each copy of a block is stored.
        """
        events: list[WireEvent] = []
        for block in self._list_parents_first():
            events += [block.stored] * block.num_copies
        return self.next_seq, write_batch(Batch(now, [self._cleared, *events], rank))

    def _sum_up(self, event: WireEvent) -> None:
        match event:
            case Stored():
                for stored in split(event):
                    at = (stored.block_hashes[0], stored.medium, get_group(stored))
                    known = self._blocks.get(at)
                    if known is None:
                        self._blocks[at] = _Block(stored, 1)
                    else:
                        known.num_copies += 1
            case Removed():
                for name in event.block_hashes:
                    self._remove((name, event.medium, get_group(event)))
            case Cleared():
                self._blocks.clear()

    def _remove(self, at: _Name) -> None:
        known = self._blocks.get(at)
        if known is None:
            return
        known.num_copies -= 1
        if not known.num_copies:
            del self._blocks[at]

    def _list_parents_first(self) -> list[_Block]:
        ordered: dict[_Name, _Block] = {}
        for at in self._blocks:
            line = []
            while at in self._blocks and at not in ordered and at not in line:
                line.append(at)
                parent = self._blocks[at].stored.parent_block_hash
                if parent is None:
                    break
                at = (parent, *at[1:])
            ordered.update({one: self._blocks[one] for one in reversed(line)})
        return list(ordered.values())


def split(event: Stored) -> list[Stored]:
    """Return the event as one event for each block."""
    size, parent = event.block_size, event.parent_block_hash
    found = []
    for index, name in enumerate(event.block_hashes):
        block = msgspec.structs.replace(
            event,
            block_hashes=[name],
            parent_block_hash=parent,
            token_ids=event.token_ids[index * size : (index + 1) * size],
            extra_keys=None if event.extra_keys is None else [event.extra_keys[index]],
        )
        if isinstance(block, StoredMap) and block.lookahead_token_ids is not None:
            block.lookahead_token_ids = [block.lookahead_token_ids[index]]
        found.append(block)
        parent = name
    return found
