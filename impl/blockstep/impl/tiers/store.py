"""Store of two tiers: host memory, and files below it.

    engine --save-->  host memory  --least recently used-->  files  -->  dropped
    engine <--load--  host memory  <--requested-----------  files

`TieredStore` is a `KVStore` (`impl.engine.store`). A block whose file cannot be read is
dropped, and the request computes it again. If the disk is full, fewer blocks are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import RLock

from blockstep.impl.tiers.files import BlockFiles, BlockKV
from blockstep.impl.tiers.order import Move, TierOrder
from blockstep.impl.tiers.pending_saves import Announced

HOST, FILE = 0, 1


class TieredStore:
    """A store with blocks in host memory and in files; threads may share it.

    Args:
        host_blocks: the maximum number of blocks in host memory.
        file_blocks: the maximum number of blocks in files.
        folder: the folder of the files: new, empty, or left by a store (whose blocks are removed).

    Raises:
        ValueError: a number of blocks is no whole number, or below 0; files without a folder.
        FolderError: the folder was not made by a store, or another store is using it.
        OSError: the folder cannot be created or written to.
    """

    def __init__(
        self, host_blocks: int, file_blocks: int = 0, folder: str | Path | None = None
    ) -> None:
        if folder is None and file_blocks:
            raise ValueError(f"file_blocks = {file_blocks}: need a folder")
        self._order = TierOrder((host_blocks, file_blocks))
        self._files = None if folder is None else BlockFiles(Path(folder))
        self._blocks: dict[bytes, BlockKV] = {}
        """Blocks in host memory, by name."""
        self._announced = Announced()
        self._lock = RLock()
        self.num_host_hits = 0
        """Number of blocks loaded from host memory."""
        self.num_file_hits = 0
        self.num_lost = 0
        """Number of blocks whose file could not be read or written."""

    def __len__(self) -> int:
        return sum(self.count_by_tier())

    def count_by_tier(self) -> tuple[int, int]:
        """Return the numbers of blocks in host memory and in files."""
        with self._lock:
            return self._order.count_in(HOST), self._order.count_in(FILE)

    def count(self, names: Sequence[bytes]) -> int | None:
        """See `KVStore.count`."""
        with self._lock:
            held = self._order.count(names)
            return None if self._announced.has_any(names[held:]) else held

    def expect(self, names: Sequence[bytes], is_coming: bool) -> None:
        """See `KVStore.expect`."""
        with self._lock:
            self._announced.add(names, is_coming)

    def save(self, names: Sequence[bytes], first: int, blocks: Sequence[BlockKV]) -> None:
        """See `KVStore.save`."""
        with self._lock:
            brought = dict(zip(names[first:], blocks, strict=True))
            self._move(self._order.keep(names, first), brought)

    def load(self, names: Sequence[bytes]) -> list[BlockKV]:
        """See `KVStore.load`."""
        with self._lock:
            found: dict[bytes, BlockKV] = {}
            num_from_host = 0
            for name in names[: self._order.count(names)]:
                is_in_host = self._order.level_of(name) == HOST
                block = self._blocks[name] if is_in_host else self._read(name)
                if block is None:
                    self._lose(name)
                    break
                found[name] = block
                num_from_host += is_in_host
            self.num_host_hits += num_from_host
            self.num_file_hits += len(found) - num_from_host
            self._move(self._order.fetch(tuple(found)), dict(found))
            return list(found.values())

    def clear(self) -> None:
        """Drop all blocks and remove their files.

        Raises:
            OSError: a file cannot be removed. Its block is dropped all the same.
        """
        with self._lock:
            self._order.clear()
            self._blocks.clear()
            if self._files is not None:
                self._files.clear()

    def close(self) -> None:
        """Drop all blocks and release the folder. The store keeps no block from then on."""
        with self._lock:
            self._order = TierOrder((0, 0))
            self._blocks.clear()
            if self._files is not None:
                self._files.close()

    def _read(self, name: bytes) -> BlockKV | None:
        return None if self._files is None else self._files.read(name)

    def _lose(self, name: bytes) -> None:
        self._order.lose(name)
        if self._files is not None:
            self._files.drop(name)
        self.num_lost += 1

    def _move(self, moves: Sequence[Move], brought: dict[bytes, BlockKV]) -> None:
        """Carry out `moves`; `brought` has the content of blocks that are in no tier."""
        for name, source, target in moves:
            assert isinstance(name, bytes), "block keys are digests"
            if source == HOST:
                brought[name] = self._blocks.pop(name)
            if target == HOST:
                self._blocks[name] = brought[name]
            if self._files is None:
                continue
            if source == FILE:
                self._files.drop(name)
            if target == FILE:
                try:
                    self._files.write(name, brought[name])
                except OSError:
                    self._lose(name)
