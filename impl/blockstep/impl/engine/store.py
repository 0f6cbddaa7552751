"""Store: KV of full blocks beside the cache, by the names of what they hold.

    name     which model, adapter, salt and tokens, all of them up to the end of the block
    block    per cache, for its layers: keys and values of `block_size` tokens, in host memory

Equal names mean equal KV, whoever computed it. Engines with one store need not know each other:
one computes a prompt, another one goes on behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Protocol, TypeAlias

import torch

from blockstep.impl.engine.errors import EngineError
from blockstep.impl.tiers.announced import Announced

BlockName: TypeAlias = bytes
BlockKV: TypeAlias = tuple[torch.Tensor, ...]
"""Per cache [num_views, block_size, num_kv_heads, head_size], contiguous, on the CPU."""
WHOLE_BYTES_MAX = 64 << 20
"""Files up to this size are read to tell models apart; of larger ones so much in `NUM_SAMPLES`."""
NUM_SAMPLES = 64


class StoreError(EngineError):
    """The store cannot be reached. What it has may be there again later."""


class KVStore(Protocol):
    """Where an engine keeps KV, and finds that of others. Any call may raise `StoreError`."""

    def count(self, names: Sequence[BlockName]) -> int | None:
        """Of how many of them, from the first on, it has the KV; None: more are to come soon."""
        ...

    def expect(self, names: Sequence[BlockName], is_coming: bool) -> None:
        """Somebody will save these; or will not, whatever was said before."""
        ...

    def save(self, names: Sequence[BlockName], first: int, blocks: Sequence[BlockKV]) -> None:
        """Keep these blocks, which are called `names[first:]`, and those before them."""
        ...

    def load(self, names: Sequence[BlockName]) -> list[BlockKV]:
        """Those of them that it has, from the first on, up to the first that it lacks."""
        ...


class HostStore:
    """A store in the memory of this process; threads may share it.

    When it is full the least recently used blocks go, of those used together the last of a text
    first: the others are of no use without those before them. What a call asks it to keep does not
    go to make room for more of the same call: then the rest is not kept.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[BlockName, BlockKV] = OrderedDict()
        """Next to go first."""
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
        """Forget all blocks."""
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
        """Evict until so much fits; whether it does, without any of those that are kept."""
        while self.num_bytes + num_bytes > self.max_bytes:
            victim = next(iter(self._blocks), None)
            if victim is None or victim in kept:
                return False
            self.num_bytes -= _count_bytes(self._blocks.pop(victim))
        return True


def _count_bytes(block: BlockKV) -> int:
    return sum(part.nbytes for part in block)


def identify_folder(folder: Path) -> str:
    """A digest of a model's or an adapter's files: what stands in it shapes KV.

    Of large files samples are read: it tells models apart, and does not guard against forgery.
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
