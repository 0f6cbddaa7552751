"""Listen: KV events over ZeroMQ, from a publisher of vLLM, of SGLang or of ours.

A message has the frames topic, number (8 bytes, the most significant first) and batch. A request to
the replay socket has the first wanted number; the answers end with the number -1.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.recorded.stream import Batch, StreamError, read_message

POLL_MS = 100
REPLAY_MS = 2000
"""Milliseconds to wait for an answer of the replay socket."""
END = (-1).to_bytes(8, "big", signed=True)


def load_zmq() -> Any:
    """Return the module `zmq`. Raises UsageError if it is not installed."""
    try:
        return importlib.import_module("zmq")
    except ImportError as error:
        raise UsageError(
            f"a live stream needs pyzmq ({error}): pip install 'blockstep[events]'"
        ) from None


def listen(
    endpoint: str, replay_endpoint: str | None, topic: str, seconds: float | None
) -> Iterator[Batch]:
    """Yield the batches of a publisher as they come, those that were missed before they end a gap.

    Ends after `seconds`; None: with Ctrl-C. Missed batches are asked for where there is a replay
    endpoint; those that the publisher does not keep any more remain a gap.

    Raises:
        UsageError: pyzmq is not installed, or an endpoint cannot be used.
        StreamError: a message is no batch.
    """
    zmq = load_zmq()
    context = zmq.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        _connect(zmq, socket, endpoint)
        end = None if seconds is None else time.monotonic() + seconds
        wanted = 0
        while end is None or time.monotonic() < end:
            if not socket.poll(POLL_MS):
                continue
            frames = socket.recv_multipart()
            if len(frames) < 2 or len(frames[-2]) != 8:
                raise StreamError(f"a message of {len(frames)} frames: topic, number, batch")
            seq = int.from_bytes(frames[-2], "big")
            if seq > wanted and replay_endpoint is not None:
                for missed in _ask(zmq, context, replay_endpoint, wanted):
                    if missed.seq is not None and missed.seq < seq:
                        yield missed
            yield read_message(frames[-1], seq)
            wanted = seq + 1
    except KeyboardInterrupt:
        return
    finally:
        context.destroy(linger=0)


def _connect(zmq: Any, socket: Any, endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise UsageError(f"{endpoint}: {error}; give an endpoint like tcp://host:5557") from None


def _ask(zmq: Any, context: Any, endpoint: str, first: int) -> list[Batch]:
    """Return the batches from this number on that a publisher still has."""
    socket = context.socket(zmq.DEALER)
    _connect(zmq, socket, endpoint)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[Batch] = []
    while socket.poll(REPLAY_MS):
        *_, seq, payload = socket.recv_multipart()
        if seq == END:
            break
        found.append(read_message(payload, int.from_bytes(seq, "big")))
    socket.close(linger=0)
    return found
