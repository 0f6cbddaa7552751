"""Sockets: batches of KV events over ZeroMQ, and recovery of a consumer that lost some."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blockstep.impl.serving.wire import (
    Batch,
    Cleared,
    Form,
    Removed,
    Stored,
    StoredMap,
    WireEvent,
    write_batch,
)

zmq = pytest.importorskip("zmq")
sockets: Any = pytest.importorskip("blockstep.impl.serving.sockets")


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """Return the addresses of the stream and of the replay endpoint."""
    return f"ipc://{tmp_path}/stream", f"ipc://{tmp_path}/replay"


def store(*names: int) -> WireEvent:
    return Stored([*names], None, [0] * len(names), 1, None, "GPU", None)


def to_map(stored: WireEvent) -> StoredMap:
    return StoredMap(**msgspec.structs.asdict(stored))


def batch(*events: WireEvent) -> bytes:
    return write_batch(Batch(0.0, [*events], 0))


BATCHES = [
    batch(store(1, 2)),
    batch(store(2)),
    batch(Removed([2], "GPU"), store(3)),
    batch(Cleared()),
    batch(store(4, 5)),
    batch(store(4)),
]


def follow(subscriber: Any, count: int) -> None:
    """Wait until `count` batches have arrived."""
    seen, end = 0, time.monotonic() + 5
    while seen < count and time.monotonic() < end:
        seen += subscriber.poll(0.2)
    assert seen == count


def connected(subscriber: Any, publisher: Any) -> None:
    """Connect a subscriber.

    A stream sends no greeting, so wait until a batch arrives and begin with a snapshot.
    """
    end = time.monotonic() + 5
    while time.monotonic() < end:
        publisher.publish(batch(store(1)))
        if subscriber.poll(0.1):
            break
    while subscriber.poll(0.1):
        pass
    subscriber.ask(sockets.SNAPSHOT)
    assert wait(publisher)
    assert subscriber.restore()


def wait(publisher: Any) -> bool:
    """Answer the first query within a second. Return whether there was one."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        if publisher.answer(0.0):
            return True
        time.sleep(0.01)
    return False


def test_batches_arrive_and_a_lost_one_is_replayed(places: tuple[str, str]) -> None:
    with sockets.Publisher(*places) as publisher, sockets.Subscriber(*places) as subscriber:
        connected(subscriber, publisher)
        before = subscriber.mirror.list_findable()
        publisher.publish(BATCHES[0])
        follow(subscriber, 1)
        assert subscriber.mirror.count(2) == 1
        publisher.journal.append(BATCHES[1])  # it is not sent
        publisher.publish(BATCHES[2])
        follow(subscriber, 1)
        assert not subscriber.mirror.is_whole
        assert subscriber.mirror.list_findable() == {}
        subscriber.ask_for_missing()
        assert wait(publisher)
        assert subscriber.heal()
        assert subscriber.mirror.list_findable() == {1: before[1] + 1, 2: 1, 3: 1}


def test_a_late_subscriber_begins_with_a_snapshot(
    places: tuple[str, str],
) -> None:
    with sockets.Publisher(*places, num_kept=2) as publisher:
        for payload in BATCHES:
            publisher.publish(payload)
        with sockets.Subscriber(*places) as subscriber:
            subscriber.ask_for_missing()
            assert wait(publisher)
            assert not subscriber.heal()
            connected(subscriber, publisher)
            assert subscriber.mirror.count(4) == 2
            assert subscriber.mirror.count(5) == 1
            assert subscriber.mirror.count(3) == 0


@pytest.mark.parametrize("form", list(Form))
def test_replay_answers_have_a_topic_if_events_are_maps(
    places: tuple[str, str], form: Form
) -> None:
    """Both forms are those of the release that writes them."""
    topic, payload = ([], BATCHES[0]) if form is Form.ARRAYS else ([b"kv"], batch(to_map(store(1))))
    client = zmq.Context.instance().socket(zmq.DEALER)
    try:
        with sockets.Publisher(*places, topic="kv", form=form) as publisher:
            seq = publisher.publish(payload).to_bytes(8, "big")
            client.connect(places[1])
            client.send_multipart((b"", seq))
            assert wait(publisher)
            assert client.recv_multipart() == [b"", *topic, seq, payload]
            assert client.recv_multipart() == [b"", *(b"" for _ in topic), sockets.END, b""]
            with sockets.Subscriber(*places) as subscriber:
                subscriber.ask(sockets.SNAPSHOT)
                assert wait(publisher)
                assert subscriber.restore()
                assert subscriber.mirror.count(1) == 1
    finally:
        client.close(linger=0)


def test_a_query_without_a_publisher_times_out(places: tuple[str, str]) -> None:
    with sockets.Subscriber(*places, timeout_s=0.05) as subscriber:
        subscriber.ask_for_missing()
        with pytest.raises(TimeoutError, match="replay endpoint"):
            subscriber.heal()


def test_a_subscriber_follows_the_publisher_of_a_release(places: tuple[str, str]) -> None:
    """The unmodified publisher of vLLM sends live batches and replays lost ones."""
    release = pytest.importorskip("vllm.distributed.kv_events")
    theirs = release.ZmqEventPublisher(0, *places)
    stored = {"block_size": 1, "lora_id": None, "medium": "GPU", "lora_name": None}
    stored = {
        name: stored[name] for name in release.BlockStored.__struct_fields__ if name in stored
    }

    def publish(name: int) -> None:
        event = release.BlockStored([name], None, [0], **stored)
        theirs.publish(release.KVEventBatch(ts=0.0, events=[event]))

    try:
        for name in range(5):
            publish(name)
        time.sleep(0.5)  # no subscriber listens yet
        with sockets.Subscriber(*places, timeout_s=5) as subscriber:
            end = time.monotonic() + 5
            while not subscriber.poll(0.2) and time.monotonic() < end:
                publish(9)
            assert not subscriber.mirror.is_whole
            subscriber.ask_for_missing()
            assert subscriber.heal()
            assert [subscriber.mirror.count(name) for name in range(5)] == [1] * 5
            assert subscriber.mirror.count(9) >= 1
    finally:
        theirs.shutdown()


def test_a_release_can_read_our_stream(places: tuple[str, str]) -> None:
    """The frames are split as its subscribers do, and decoded with its own classes."""
    release = pytest.importorskip("vllm.distributed.kv_events")
    is_array = release.BlockRemoved.__struct_config__.array_like
    sent = BATCHES[0] if is_array else batch(to_map(store(1, 2)))
    stream = zmq.Context.instance().socket(zmq.SUB)
    stream.setsockopt(zmq.SUBSCRIBE, b"kv")
    try:
        with sockets.Publisher(*places, topic="kv") as publisher:
            stream.connect(places[0])
            end = time.monotonic() + 5
            while not stream.poll(100) and time.monotonic() < end:
                seq = publisher.publish(sent)
            topic, number, payload = stream.recv_multipart()
            read = msgspec.msgpack.decode(payload, type=release.KVEventBatch)
            assert topic == b"kv"
            assert int.from_bytes(number, "big") <= seq
            assert read.events[0].block_hashes == [1, 2]
            assert read.data_parallel_rank == 0
    finally:
        stream.close(linger=0)
