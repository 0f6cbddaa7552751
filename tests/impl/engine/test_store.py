"""KV stores: which blocks are kept and evicted, locally and in another process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_support.models import Checkpoint

from blockstep.impl.engine.block_transfers import Jobs, LateJobs, Mover, ThreadJobs
from blockstep.impl.engine.cache import PagedCache
from blockstep.impl.engine.config import ModelConfig, load_config
from blockstep.impl.engine.remote_store import RemoteStore, StoreServer
from blockstep.impl.engine.store import (
    BlockKV,
    BlockName,
    HostStore,
    KVStore,
    StoreError,
    identify_folder,
)

NUM_BYTES = 8


def block(number: int) -> BlockKV:
    return (torch.tensor([number, -number], dtype=torch.float32),)


def names(*numbers: int) -> list[BlockName]:
    return [bytes([number]) for number in numbers]


def numbers(blocks: list[BlockKV]) -> list[int]:
    return [int(one[0]) for (one,) in blocks]


def save(store: KVStore, *kept: int, first: int = 0) -> None:
    store.save(names(*kept), first, [block(number) for number in kept[first:]])


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "kv"


@pytest.fixture(params=["host", "remote"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[KVStore]:
    """Return a store for four blocks, in this process or on the other side of a socket."""
    host = HostStore(4 * NUM_BYTES)
    if request.param == "host":
        yield host
        return
    with StoreServer(host, path):
        remote = RemoteStore(path)
        yield remote
        remote.close()


def test_leading_blocks_are_counted_and_loaded(store: KVStore) -> None:
    assert store.count([]) == store.count(names(1)) == 0
    save(store, 1, 2, 3)
    assert store.count(names(1, 2, 4, 3)) == 2
    assert numbers(store.load(names(1, 2, 4, 3))) == [1, 2]
    assert store.load(names(4, 1)) == []


def test_blocks_used_together_are_evicted_from_the_last(store: KVStore) -> None:
    save(store, 1, 2, 3)
    save(store, 4)
    save(store, 5)
    assert [store.count(names(one)) for one in (1, 2, 3, 4, 5)] == [1, 1, 0, 1, 1]
    assert numbers(store.load(names(1, 2))) == [1, 2]
    save(store, 6, 7)
    assert [store.count(names(one)) for one in (1, 2, 4, 5)] == [1, 1, 0, 0]


def test_a_save_evicts_no_block_of_the_same_call(store: KVStore) -> None:
    """B69: neither new blocks of the call nor those that were stored before are evicted."""
    save(store, 1, 2)
    save(store, 3)
    save(store, 1, 2, 4, 5, 6, first=2)
    assert store.count(names(1, 2, 4, 5)) == 4
    assert store.count(names(3)) == store.count(names(6)) == 0


def test_count_is_none_while_announced_blocks_are_missing(store: KVStore) -> None:
    save(store, 1)
    store.expect(names(1, 2, 3), is_coming=True)
    assert store.count(names(1, 2)) is None
    assert store.count(names(1)) == 1
    save(store, 1, 2)
    assert store.count(names(1, 2)) == 2
    assert store.count(names(1, 2, 3)) is None
    store.expect(names(1, 2, 3), is_coming=False)
    assert store.count(names(1, 2, 3)) == 2


def test_two_clients_may_announce_the_same_block(store: KVStore) -> None:
    for _ in range(2):
        store.expect(names(1), is_coming=True)
    store.expect(names(1), is_coming=False)
    assert store.count(names(1)) is None
    store.expect(names(1), is_coming=False)
    assert store.count(names(1)) == 0


def test_clear_removes_all_blocks() -> None:
    store = HostStore(4 * NUM_BYTES)
    save(store, 1, 2)
    assert (len(store), store.num_bytes) == (2, 2 * NUM_BYTES)
    store.clear()
    assert (len(store), store.num_bytes, store.count(names(1))) == (0, 0, 0)
    save(store, 1, 2, 3, 4)
    assert len(store) == 4


def test_announcements_end_when_their_client_disconnects(path: Path) -> None:
    host = HostStore()
    with StoreServer(host, path):
        one, other = RemoteStore(path), RemoteStore(path)
        one.expect(names(1, 2), is_coming=True)
        other.expect(names(2), is_coming=True)
        other.expect(names(1), is_coming=False)  # not its own
        assert host.count(names(1)) is None
        one.close()
        wait_until(lambda: host.count(names(1)) == 0)
        assert host.count(names(2)) is None
        other.close()


def wait_until(is_so: object) -> None:
    assert callable(is_so)
    for _ in range(500):
        if is_so():
            return
        threading.Event().wait(0.01)
    pytest.fail("the condition does not become true")


def test_a_stopped_store_is_an_error_until_it_restarts(path: Path) -> None:
    host = HostStore()
    store = RemoteStore(path)
    with pytest.raises(StoreError, match=f"the store at {path}"):
        store.count(names(1))
    with StoreServer(host, path):
        wait_until(lambda: reaches(store))
        save(store, 1)
    with pytest.raises(StoreError):
        store.load(names(1))
    with StoreServer(host, path):
        wait_until(lambda: reaches(store))
        assert numbers(store.load(names(1))) == [1]
        store.close()


def reaches(store: KVStore) -> bool:
    try:
        store.load([])
        store.count([])
    except StoreError:
        return False
    return True


def test_a_store_that_does_not_answer_times_out(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(path))
        silent.listen()
        store = RemoteStore(path, timeout_s=0.05)
        with pytest.raises(StoreError, match="timed out"):
            store.load(names(1))
        with pytest.raises(StoreError, match="a moment ago"):
            store.load(names(1))


def test_malformed_messages_close_only_their_connection(path: Path) -> None:
    with StoreServer(HostStore(), path):
        for nonsense in (b"\0\0\0\1\0\0\0\0x", b"\0\0\0\2\0\0\0\0[]"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(5)
                client.connect(str(path))
                client.sendall(nonsense)
                assert client.recv(1) == b""
        store = RemoteStore(path)
        with pytest.raises(StoreError, match=r"fromhex"):
            store._kv.call({"op": "load", "names": ["?"]})
        with pytest.raises(StoreError, match="not an operation of a store"):
            store._kv.call({"op": "sell", "names": []})
        save(store, 1)
        assert store.count(names(1)) == 1
        store.close()


# Moves.


@pytest.fixture
def config(qwen3: Checkpoint) -> ModelConfig:
    return load_config(qwen3.folder)


def make_cache(config: ModelConfig, dtype: torch.dtype = torch.float32) -> PagedCache:
    layers = [tuple(range(config.num_layers))]
    return PagedCache(config, layers, 8, 4, dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_blocks_of_all_caches_equal_the_saved_ones(
    config: ModelConfig, path: Path, dtype: torch.dtype
) -> None:
    caches = [make_cache(config, dtype), make_cache(config, dtype)]
    for number, cache in enumerate(caches):
        torch.manual_seed(number)
        cache.kv.copy_(torch.randn(cache.kv.shape))
    before = [cache.kv.clone() for cache in caches]
    mover = Mover(caches)
    with StoreServer(HostStore(), path):
        store = RemoteStore(path)
        store.save(names(1, 2), 0, mover.read([5, 2]))
        mover.write([7, 1], store.load(names(1, 2)))
        store.close()
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.kv[:, :, [7, 1]], old[:, :, [5, 2]])
        untouched = [0, 2, 3, 4, 5, 6]
        assert torch.equal(cache.kv[:, :, untouched], old[:, :, untouched])


def test_read_blocks_are_copies(config: ModelConfig) -> None:
    cache = make_cache(config)
    mover = Mover([cache])
    (read,) = mover.read([3])
    cache.kv += 1
    assert not read[0].any()
    mover.write([], [])


def test_jobs_in_a_thread_are_reported_in_order() -> None:
    jobs, events, may_end = ThreadJobs(), [], threading.Event()
    jobs.add(lambda: may_end.wait(5), lambda _: events.append("slow"))
    jobs.add(lambda: "quick", events.append)
    jobs.poll()
    assert (events, len(jobs)) == ([], 2)
    may_end.set()
    while len(jobs):
        jobs.poll(1.0)
    assert events == ["slow", "quick"]


def test_a_late_job_runs_in_the_poll_that_reports_it() -> None:
    jobs, events = LateJobs(2), []
    jobs.add(lambda: events.append("done"), lambda _: events.append("reported"))
    jobs.poll()
    assert events == []
    jobs.poll()
    assert events == ["done", "reported"]
    jobs.poll()
    assert len(events) == 2


@pytest.mark.parametrize("jobs", [LateJobs(1), ThreadJobs()])
def test_a_discarded_job_neither_runs_nor_is_reported(jobs: Jobs) -> None:
    begun, may_end, events = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert may_end.wait(5)
        events.append("done")

    jobs.add(work, lambda _: events.append("reported"))
    jobs.add(lambda: events.append("later"), lambda _: events.append("reported"))
    if isinstance(jobs, ThreadJobs):
        assert begun.wait(5)
        threading.Timer(0.05, may_end.set).start()
    jobs.stop()
    jobs.poll()
    assert events == (["done"] if isinstance(jobs, ThreadJobs) else [])
    assert len(jobs) == 0


def test_other_weights_give_another_model_identity(
    qwen3: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(name: str) -> Path:
        (tmp_path / name).mkdir()
        for file in qwen3.folder.iterdir():
            if file.suffix in (".json", ".safetensors"):
                (tmp_path / name / file.name).write_bytes(file.read_bytes())
        return tmp_path / name

    same, other = copy("same"), copy("other")
    weights = other / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-5] ^= 1
    weights.write_bytes(changed)
    assert identify_folder(same) == identify_folder(qwen3.folder) != identify_folder(other)
    monkeypatch.setattr("blockstep.impl.engine.store.WHOLE_BYTES_MAX", 64)
    assert identify_folder(same) == identify_folder(qwen3.folder)
