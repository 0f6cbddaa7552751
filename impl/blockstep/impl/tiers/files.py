"""Files: a folder of blocks for one process; each file is checked when it is read.

    2f07..c1.kv     sha256 of name, layout and content | layout and content, as safetensors

A file is written under another name first, so it is either complete or absent. A file that was
truncated, changed or exchanged has a wrong checksum and is not used. A folder belongs to one store:
blocks that an earlier store left there are removed.
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
"""Name of the file that marks a folder as one of a store."""
OWN: Final = re.compile(r"[0-9a-f]{64}\.kv(\.part)?")
"""Names of the other files that a store makes."""
DIGEST_BYTES: Final = 32


class FolderError(ValueError):
    """The folder was not made by a store, or another store is using it."""


class BlockFiles:
    """Blocks in a folder. The folder is created if it is missing and is in use until `close`.

    Raises:
        FolderError: the folder has files and was not made by a store, or a store is using it.
        OSError: the folder cannot be created or written to.
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
        """Write a block. Raises OSError if that fails (a full disk, say); no file is left then."""
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
        """Return the block as it was written; None if it is missing or its file was changed."""
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
        """Remove the file of a block if there is one; errors are ignored."""
        path = self._get_path(name)
        for one in (path, path.with_suffix(".kv.part")):
            with suppress(OSError):
                one.unlink()

    def clear(self) -> None:
        """Remove the files of all blocks. Raises OSError if one cannot be removed."""
        for path in self.folder.iterdir():
            if OWN.fullmatch(path.name) and not path.is_dir():
                path.unlink()

    def close(self) -> None:
        """Remove all blocks and release the folder for another store."""
        if not self._mark.closed:
            self.clear()
            self._mark.close()

    def _get_path(self, name: bytes) -> Path:
        return self.folder / f"{sha256(name).hexdigest()}.kv"


def _sign(name: bytes, content: bytes) -> bytes:
    """Return the checksum of a block's name and content.

    The name is hashed first, so that names of different lengths cannot be confused.
    """
    return sha256(sha256(name).digest() + content).digest()
