"""Files: a folder of blocks that only its own process reads, and nothing of which is trusted.

    2f07..c1.kv     sha256 of name, layout and content | layout and content, as safetensors

A file is whole or not there: it is written under another name first. What was cut, changed, or put
in another's place has another checksum, and is not read. A folder is one store's: whatever an older
one has left there is removed.
"""

from __future__ import annotations

import fcntl
import re
import weakref
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

BlockKV: TypeAlias = tuple[torch.Tensor, ...]
MARK: Final = "blockstep-kv-store"
"""A file that says whose folder it is."""
OWN: Final = re.compile(r"[0-9a-f]{64}\.kv(\.part)?")
"""Names of all the others that a store makes."""
DIGEST_BYTES: Final = 32


class FolderError(ValueError):
    """A folder that is no store's, or another one's that is at work."""


class BlockFiles:
    """Blocks in a folder, which is made if need be. The folder is this object's until `close`.

    Raises:
        FolderError: there is something in it and no store has made it, or a store uses it.
        OSError: it cannot be made or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / MARK
        if not mark.is_file() and any(folder.iterdir()):
            raise FolderError(
                f"{folder}: is not empty, and no store has made it; give a folder of its own"
            )
        self._mark = mark.open("a")
        try:
            fcntl.flock(self._mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._mark.close()
            raise FolderError(
                f"{folder}: a store is using it; give a folder to each store"
            ) from error
        weakref.finalize(self, self._mark.close)
        self.clear()

    def write(self, name: bytes, block: BlockKV) -> None:
        """Keep a block. Raises `OSError`, and then it is not kept: the disk is full, say."""
        content = save({str(at): part.contiguous() for at, part in enumerate(block)})
        path = self._get_path(name)
        part = path.with_suffix(".kv.part")
        try:
            part.write_bytes(_sign(name, content) + content)
            part.replace(path)
        except OSError:
            self.drop(name)
            raise

    def read(self, name: bytes) -> BlockKV | None:
        """The block, as it was written; None: it is not there, or not what was written."""
        try:
            data = self._get_path(name).read_bytes()
        except OSError:
            return None
        content = data[DIGEST_BYTES:]
        if data[:DIGEST_BYTES] != _sign(name, content):
            return None
        try:
            parts = load(content)
        except SafetensorError:
            return None
        return tuple(parts[str(at)] for at in range(len(parts)))

    def drop(self, name: bytes) -> None:
        """Remove a block, if it is there and can be."""
        path = self._get_path(name)
        for one in (path, path.with_suffix(".kv.part")):
            with suppress(OSError):
                one.unlink()

    def clear(self) -> None:
        """Remove all blocks; a folder is none. Raises `OSError` if one cannot be."""
        for path in self.folder.iterdir():
            if OWN.fullmatch(path.name) and not path.is_dir():
                path.unlink()

    def close(self) -> None:
        """Remove all blocks, and leave the folder to whoever takes it."""
        if not self._mark.closed:
            self.clear()
            self._mark.close()

    def _get_path(self, name: bytes) -> Path:
        return self.folder / f"{sha256(name).hexdigest()}.kv"


def _sign(name: bytes, content: bytes) -> bytes:
    """Of whom, and of what. Names of one store are of one length, or their digests tell."""
    return sha256(sha256(name).digest() + content).digest()
