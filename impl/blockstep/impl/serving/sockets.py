"""Sockets: KV events over ZeroMQ, in vLLM's frames (extra `events`).

    PUB      topic, number, batch                        each batch when it is published
    ROUTER   <- [empty, number]                          request for kept batches from this number
             -> [empty, number, batch] ...  [empty, -1, empty]
             <- [empty, "snapshot"]                      ours, as upstream #50134 proposes it
             -> [empty, number of the next batch, batch], [empty, -1, empty]

Numbers are 8 bytes, big endian. With `Form.MAPS` the topic (empty in the last frame) precedes the
number in each reply, too. Source: vLLM `ZmqEventPublisher`, 0.19.1 and 0.33.0.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import zmq

from blockstep.impl.serving.journal import Journal
from blockstep.impl.serving.mirror import Mirror
from blockstep.impl.serving.wire import Form

END = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT = b"snapshot"


class Sockets:
    """Base of both sides: sockets that are closed together, without waiting for unsent messages."""

    def __init__(self) -> None:
        self._context = zmq.Context.instance()
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets."""
        for socket in self._open:
            socket.close(linger=0)
        self._open.clear()

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        self._open.append(socket)
        return socket


class Publisher(Sockets):
    """Publishes batches and replies to requests for lost ones. For one thread; it never blocks.

    Args:
        endpoint: address of the stream, which is bound, such as `tcp://*:5557`.
        replay_endpoint: address of requests, which is bound.
        topic: the topic of the stream.
        num_kept: the number of batches that can be sent again.
        form: the form of the batches.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        topic: str = "",
        num_kept: int = 10_000,
        form: Form = Form.ARRAYS,
    ) -> None:
        super().__init__()
        self.journal = Journal(num_kept, form)
        self._has_topic = form is Form.MAPS
        self._topic = topic.encode()
        self._stream = self._socket(zmq.PUB)
        self._stream.bind(endpoint)
        self._replay = self._socket(zmq.ROUTER)
        self._replay.bind(replay_endpoint)

    def publish(self, payload: bytes) -> int:
        """Send a batch; return its number."""
        seq = self.journal.append(payload)
        self._stream.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        return seq

    def answer(self, now: float | None = None) -> int:
        """Reply to all received requests; return their number.

        A malformed request is ignored, as in vLLM.
        """
        count = 0
        while self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) == 3:
                count += 1
                self._answer(frames[0], frames[2], time.time() if now is None else now)
        return count

    def _answer(self, client: bytes, asked: bytes, now: float) -> None:
        if asked == SNAPSHOT:
            batches = [self.journal.take_snapshot(now)]
        else:
            batches = self.journal.list_since(int.from_bytes(asked, "big"))
        for seq, payload in batches:
            self._send(client, self._topic, seq.to_bytes(8, "big"), payload)
        self._send(client, b"", END, b"")

    def _send(self, client: bytes, topic: bytes, seq: bytes, payload: bytes) -> None:
        before = (topic,) if self._has_topic else ()
        self._replay.send_multipart((client, b"", *before, seq, payload))


class Subscriber(Sockets):
    """Follows a publisher, ours or vLLM's, and asks for batches that its mirror lost.

    Args:
        endpoint: address of the stream.
        replay_endpoint: address of requests.
        topic: the topic to subscribe to.
        timeout_s: seconds to wait for a reply.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str, *, topic: str = "", timeout_s: float = 1.0
    ) -> None:
        super().__init__()
        self.mirror = Mirror()
        self._timeout_ms = int(timeout_s * 1000)
        self._stream = self._socket(zmq.SUB)
        self._stream.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._stream.connect(endpoint)
        self._replay_endpoint = replay_endpoint

    def poll(self, timeout_s: float = 0.0) -> int:
        """Read all received batches; return their number.

        `timeout_s` is the time to wait for the first, in seconds.
        """
        count = 0
        while self._stream.poll(0 if count else int(timeout_s * 1000)):
            _, seq, payload = self._stream.recv_multipart()
            self.mirror.take(int.from_bytes(seq, "big"), payload)
            count += 1
        return count

    def ask(self, request: bytes) -> None:
        """Request batches (8 bytes: the first number) or a snapshot."""
        for socket in self._open[1:]:
            socket.close(linger=0)
        del self._open[1:]
        self._socket(zmq.DEALER).connect(self._replay_endpoint)
        self._open[1].send_multipart((b"", request))

    def ask_for_missing(self) -> None:
        """Request the batches that the mirror has not read."""
        self.ask(self.mirror.next_seq.to_bytes(8, "big"))

    def heal(self) -> bool:
        """Read the reply to `ask_for_missing`; return whether the mirror is complete."""
        return self.mirror.heal(self._answers())

    def restore(self) -> bool:
        """Read the reply to a request for a snapshot; return whether the mirror is complete."""
        for next_seq, payload in self._answers():
            self.mirror.restore(next_seq, payload)
        return self.mirror.is_whole

    def _answers(self) -> Iterator[tuple[int, bytes]]:
        """Yield the batches of a reply.

        Raises:
            TimeoutError: no message arrives in time.
        """
        socket = self._open[1]
        while socket.poll(self._timeout_ms):
            *_, seq, payload = socket.recv_multipart()
            if seq == END:
                return
            yield int.from_bytes(seq, "big"), payload
        raise TimeoutError("no answer to a request for KV events: is the replay endpoint right?")
