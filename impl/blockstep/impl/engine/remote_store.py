"""Remote: a store in another process of this machine, over a Unix socket.

    call    lengths, header (JSON), KV     the operation, and the blocks to be saved
    reply   lengths, header (JSON), KV     the result, and the blocks that were found

Any process that can write to the socket's path may read and write the store: the permissions of its
folder guard it. When a connection ends, blocks that its client announced and did not save are no
longer expected.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Final, Self

import torch

from blockstep.impl.engine.store import BlockKV, BlockName, KVStore, StoreError

_LENGTHS: Final = struct.Struct(">II")
"""Bytes of the header, and number of blocks of KV after it, each with its own length."""
_SIZE: Final = struct.Struct(">Q")
_DTYPES: Final = {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
}
RETRY_S: Final = 0.2
"""Seconds without a further attempt after the store could not be reached."""
Message = tuple[dict[str, Any], list[BlockKV]]


class RemoteStore:
    """A client of the store that a `StoreServer` serves under this path.

    Every error is raised as `StoreError`, after at most `timeout_s` seconds for each message that
    is sent or received; the next call after `RETRY_S` connects again. Threads may share it:
    questions and KV have a connection each, so that a question does not wait for a load.
    """

    def __init__(self, path: str | Path, timeout_s: float = 10.0) -> None:
        self._questions = _Link(Path(path), timeout_s)
        self._kv = _Link(Path(path), timeout_s)

    def count(self, names: Sequence[BlockName]) -> int | None:
        """See `KVStore.count`."""
        answer, _ = self._questions.call({"op": "count", "names": _write_names(names)})
        count: int | None = answer["count"]
        return count

    def expect(self, names: Sequence[BlockName], is_coming: bool) -> None:
        """See `KVStore.expect`."""
        asked = {"op": "expect", "names": _write_names(names), "is_coming": is_coming}
        self._questions.call(asked)

    def save(self, names: Sequence[BlockName], first: int, blocks: Sequence[BlockKV]) -> None:
        """See `KVStore.save`."""
        asked = {"op": "save", "names": _write_names(names), "first": first}
        self._kv.call(asked, blocks)

    def load(self, names: Sequence[BlockName]) -> list[BlockKV]:
        """See `KVStore.load`."""
        return self._kv.call({"op": "load", "names": _write_names(names)})[1]

    def close(self) -> None:
        """Close the connections."""
        self._questions.close()
        self._kv.close()


class _Link:
    """A connection that is opened when it is needed."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._socket: socket.socket | None = None
        self._retry_at = 0.0
        self._lock = Lock()

    def call(self, asked: dict[str, Any], blocks: Sequence[BlockKV] = ()) -> Message:
        with self._lock:
            try:
                link = self._socket or self._connect()
                _send(link, asked, blocks)
                answer = _receive(link)
            except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
                self._hang_up()
                raise StoreError(f"the store at {self._path}: {error}") from error
            if "error" in answer[0]:
                raise StoreError(f"the store at {self._path}: {answer[0]['error']}")
            return answer

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _connect(self) -> socket.socket:
        if time.monotonic() < self._retry_at:
            raise ConnectionError("could not be reached a moment ago")
        self._retry_at = time.monotonic() + RETRY_S
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(self._timeout_s)
        try:
            made.connect(str(self._path))
        except OSError:
            made.close()
            raise
        self._socket = made
        return made

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class StoreServer:
    """Serves a store to other processes while it is open; a context manager.

    Args:
        store: the store to serve.
        path: path of the socket; it must not exist yet.
    """

    def __init__(self, store: KVStore, path: str | Path) -> None:
        self._store, self._path = store, Path(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._open: set[socket.socket] = set()
        self._lock = Lock()
        self._is_closed = False
        Thread(target=self._accept, name="kv-store-accept", daemon=True).start()

    def close(self) -> None:
        """End all connections, and accept no more."""
        with self._lock:
            self._is_closed = True
            ending = [self._listener, *self._open]
        self._path.unlink(missing_ok=True)
        for one in ending:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._is_closed:
                    client.close()
                    return
                self._open.add(client)
            Thread(target=self._serve, args=(client,), name="kv-store", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        announced: Counter[BlockName] = Counter()
        try:
            while True:
                asked, blocks = _receive(client)
                try:
                    answer, found = self._answer(asked, blocks, announced)
                except (KeyError, TypeError, ValueError, StoreError) as error:
                    answer, found = {"error": repr(error)}, []
                _send(client, answer, found)
        except (OSError, EOFError, KeyError, TypeError, ValueError):
            pass  # the client has disconnected, or speaks another protocol
        finally:
            self._store.expect([*announced.elements()], is_coming=False)
            with self._lock:
                self._open.discard(client)
            client.close()

    def _answer(
        self, asked: dict[str, Any], blocks: list[BlockKV], announced: Counter[BlockName]
    ) -> Message:
        names = [bytes.fromhex(name) for name in asked["names"]]
        match asked["op"]:
            case "count":
                return {"count": self._store.count(names)}, []
            case "expect" if asked["is_coming"]:
                announced.update(names)
                self._store.expect(names, is_coming=True)
            case "expect":
                known = [name for name in names if announced[name] > 0]
                announced.subtract(known)
                self._store.expect(known, is_coming=False)
            case "save":
                self._store.save(names, asked["first"], blocks)
            case "load":
                return {}, self._store.load(names)
            case other:
                raise ValueError(f"{other!r} is not an operation of a store")
        return {}, []


def _write_names(names: Sequence[BlockName]) -> list[str]:
    return [name.hex() for name in names]


def _send(to: socket.socket, header: dict[str, Any], blocks: Sequence[BlockKV]) -> None:
    shapes = [(str(part.dtype).removeprefix("torch."), [*part.shape]) for part in _first(blocks)]
    encoded = json.dumps({**header, "parts": shapes}).encode()
    to.sendall(_LENGTHS.pack(len(encoded), len(blocks)) + encoded)
    for block in blocks:
        whole = b"".join(_to_bytes(part) for part in block)
        to.sendall(_SIZE.pack(len(whole)) + whole)


def _receive(client: socket.socket) -> Message:
    """Return the header and blocks of the next message.

    Raises `EOFError` if the other side has disconnected, `ValueError` if the message is malformed.
    """
    length, num_blocks = _LENGTHS.unpack(_read(client, _LENGTHS.size))
    header = json.loads(_read(client, length))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    parts = [(_DTYPES[name], tuple(shape)) for name, shape in header.pop("parts")]
    size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts)
    blocks = []
    for _ in range(num_blocks):
        (stored_size,) = _SIZE.unpack(_read(client, _SIZE.size))
        if stored_size != size:
            raise ValueError(f"a block has {stored_size} bytes instead of {size}")
        blocks.append(_split(_read(client, size), parts))
    return header, blocks


def _read(client: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    rest = memoryview(data)
    while rest:
        count = client.recv_into(rest)
        if not count:
            raise EOFError("the connection has ended")
        rest = rest[count:]
    return data


def _first(blocks: Sequence[BlockKV]) -> BlockKV:
    return blocks[0] if blocks else ()


def _to_bytes(part: torch.Tensor) -> bytes:
    data: bytes = part.contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _split(data: bytearray, parts: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> BlockKV:
    found, start = [], 0
    for dtype, shape in parts:
        count = math.prod(shape)
        found.append(torch.frombuffer(data, dtype=dtype, count=count, offset=start).view(shape))
        start += count * dtype.itemsize
    return tuple(found)
