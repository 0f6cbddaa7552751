"""Store: KV of full blocks outside the cache, under keys that identify their content.

    key      hash of model, adapter, salt and all tokens up to the end of the block
    block    per cache, for its layers: keys and values of `block_size` tokens, in host memory

Equal keys mean equal KV, whichever engine computed it. Engines with one store need not know each
other: one computes a prompt, another one continues it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from blockstep.impl.engine.errors import EngineError
from blockstep.impl.tiers.pending_saves import Announced

BlockName: TypeAlias = bytes
BlockKV: TypeAlias = tuple[torch.Tensor, ...]
"""Per cache [num_views, block_size, num_kv_heads, head_size], contiguous, on the CPU."""
WHOLE_BYTES_MAX = 64 << 20
"""Files up to this size are hashed whole; of larger ones, this many bytes in `NUM_SAMPLES` pieces.
"""
NUM_SAMPLES = 64


class StoreError(EngineError):
    """The store cannot be reached. Its content may be available again later."""


@runtime_checkable
class KVStore(Protocol):
    """A store in which engines save KV, and from which they load it.

    Any call may raise `StoreError`.
    """

    def count(self, names: Sequence[BlockName]) -> int | None:
        """Return how many leading names have stored KV; None: announced blocks will follow soon."""
        ...

    def expect(self, names: Sequence[BlockName], is_coming: bool) -> None:
        """Announce that blocks of these names will be saved (`is_coming`), or revoke one
        announcement.

        While the first missing name or a later one is announced, `count` may return None.
        """
        ...

    def save(self, names: Sequence[BlockName], first: int, blocks: Sequence[BlockKV]) -> None:
        """Save `blocks` under `names[first:]`; the blocks of `names[:first]` should be kept,
        too."""
        ...

    def load(self, names: Sequence[BlockName]) -> list[BlockKV]:
        """Return the blocks of the longest stored prefix of `names`."""
        ...


class HostStore:
    """A store in the memory of this process; threads may share it.

    When it is full, the least recently used blocks are evicted; among blocks used together, the
    last of a sequence goes first, because a block is useless without those before it. A call to
    `save` does not evict blocks of its own names: then the rest of its blocks is not stored.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[BlockName, BlockKV] = OrderedDict()
        """Blocks in the order of eviction."""
        self._announced = Announced()
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._blocks)

    def count(self, names: Sequence[BlockName]) -> int | None:
        """See `KVStore.count`."""
        with self._lock:
            held = self._count_held(names)
            return None if self._announced.has_any(names[held:]) else held

    def expect(self, names: Sequence[BlockName], is_coming: bool) -> None:
        """See `KVStore.expect`."""
        with self._lock:
            self._announced.add(names, is_coming)

    def save(self, names: Sequence[BlockName], first: int, blocks: Sequence[BlockKV]) -> None:
        """See `KVStore.save`."""
        with self._lock:
            self._touch(names)
            kept = set(names)
            for name, block in zip(names[first:], blocks, strict=True):
                if name in self._blocks:
                    continue
                if not self._make_room(_count_bytes(block), kept):
                    break
                self._blocks[name] = block
                self.num_bytes += _count_bytes(block)
            self._touch(names)

    def load(self, names: Sequence[BlockName]) -> list[BlockKV]:
        """See `KVStore.load`."""
        with self._lock:
            held = names[: self._count_held(names)]
            self._touch(held)
            return [self._blocks[name] for name in held]

    def clear(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._blocks.clear()
            self.num_bytes = 0

    def _count_held(self, names: Sequence[BlockName]) -> int:
        lacking = (at for at, name in enumerate(names) if name not in self._blocks)
        return next(lacking, len(names))

    def _touch(self, names: Sequence[BlockName]) -> None:
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def _make_room(self, num_bytes: int, kept: set[BlockName]) -> bool:
        """Evict until `num_bytes` more fit, but no block in `kept`; return whether they fit."""
        while self.num_bytes + num_bytes > self.max_bytes:
            victim = next(iter(self._blocks), None)
            if victim is None or victim in kept:
                return False
            self.num_bytes -= _count_bytes(self._blocks.pop(victim))
        return True


def _count_bytes(block: BlockKV) -> int:
    return sum(part.nbytes for part in block)


def identify_folder(folder: Path) -> str:
    """Return a digest of a model's or an adapter's files, since their content determines KV.

    Large files are sampled: this distinguishes models, and does not guard against forgery.
    """
    digest = sha256()
    for path in sorted([*folder.glob("*config.json"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES_MAX:
                digest.update(file.read())
                continue
            for sample in range(NUM_SAMPLES):
                file.seek(size * sample // NUM_SAMPLES)
                digest.update(file.read(WHOLE_BYTES_MAX // NUM_SAMPLES))
    return digest.hexdigest()
