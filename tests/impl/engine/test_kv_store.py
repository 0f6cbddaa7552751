"""KV stores and the engine: saved, loaded, lost and late blocks change no token."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.adapters import ADAPTERS
from engine_support.models import MAX_TOKENS, Checkpoint

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import (
    LLM,
    HostStore,
    KVRole,
    KVStore,
    RemoteStore,
    SamplingParams,
    SettingsError,
    StoreError,
    StoreServer,
)
from blockstep.impl.engine.block_transfers import LateJobs
from blockstep.impl.engine.connector import Connector
from blockstep.impl.engine.model import Model
from blockstep.impl.engine.staging import ArrayStep, Staging
from blockstep.impl.engine.store import BlockKV, BlockName
from blockstep.spec.vocabulary import FinishReason, KVLoadFailurePolicy

NUM_PROMPTS = 32
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
ONE = SamplingParams(max_tokens=1)


@dataclass
class Failing:
    """A store that loses blocks between a query and a load, or fails for a while."""

    inner: KVStore = field(default_factory=HostStore)
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    loses: float = 0.0
    is_away: float = 0.0
    num_lost: int = 0

    def _reach(self) -> None:
        if self.draw.random() < self.is_away:
            raise StoreError("away")

    def count(self, names: Sequence[BlockName]) -> int | None:
        self._reach()
        return self.inner.count(names)

    def expect(self, names: Sequence[BlockName], is_coming: bool) -> None:
        self._reach()
        self.inner.expect(names, is_coming)

    def save(self, names: Sequence[BlockName], first: int, blocks: Sequence[BlockKV]) -> None:
        self._reach()
        self.inner.save(names, first, blocks)

    def load(self, names: Sequence[BlockName]) -> list[BlockKV]:
        self._reach()
        found = self.inner.load(names)
        if self.draw.random() < self.loses:
            self.num_lost += 1
            return found[: self.draw.randrange(len(found) + 1)]
        return found


def make_llm(
    checkpoint: Checkpoint, store: KVStore | None, late: int | None = None, **more: Any
) -> LLM:
    """Return an engine with a store.

    Its jobs run in a thread, or each is done `late` polls later.
    """
    settings = {"block_size": 4, "num_blocks": 120, "max_num_seqs": 8, **more}
    settings |= {"disable_hybrid_kv_cache_manager": True}
    llm = LLM(checkpoint.folder, kv_store=store, **settings)
    if late is not None:
        get_connector(llm)._jobs = LateJobs(late)
    return llm


def get_connector(llm: LLM) -> Connector:
    assert llm._connector is not None
    return llm._connector


def serve(
    llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS
) -> list[tuple[int, ...]]:
    return [one.token_ids for one in llm.generate(prompts, params)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the computed tokens of each step, counted where inputs are built.

    A replay of a graph does not call `Model.forward`.
    """
    counts: list[int] = []
    build: Any = Staging.build

    def count(self: Staging, step: ArrayStep, *given: Any) -> Any:
        counts.append(int(step.counts.sum()))
        return build(self, step, *given)

    monkeypatch.setattr(Staging, "build", count)
    return counts


def test_an_engine_loads_blocks_that_another_one_computed(
    qwen3: Checkpoint, computed: list[int]
) -> None:
    store, prompt = HostStore(), list(range(2, 25))
    alone = serve(make_llm(qwen3, None), [prompt])
    serve(make_llm(qwen3, store, kv_role=KVRole.PRODUCER), [prompt], ONE)
    assert len(store) == 23 // 4
    computed.clear()
    other = make_llm(qwen3, store, kv_role=KVRole.CONSUMER)
    assert serve(other, [prompt]) == alone
    assert computed[0] == 23 - 20
    stats = other.get_stats()
    assert (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits) == (23, 20)


@pytest.mark.parametrize("is_async", [False, True])
def test_producer_and_consumer_generate_the_tokens_of_one_engine(
    qwen3: Checkpoint, prompts: list[list[int]], is_async: bool
) -> None:
    asked, store = prompts[:NUM_PROMPTS], HostStore()
    serve(make_llm(qwen3, store, kv_role="kv_producer"), asked, ONE)
    llm = make_llm(qwen3, store, kv_role="kv_consumer", enable_async_kv_loads=is_async)
    assert serve(llm, asked) == qwen3.expected.token_ids[:NUM_PROMPTS]
    assert llm.get_stats().external_prefix_cache_hits > 200


STORMS: dict[str, dict[str, Any]] = {
    "now": {},
    "later": {"enable_async_kv_loads": True},
    "ahead": {"max_frames_in_flight": 2},
    "ahead-later": {"max_frames_in_flight": 3, "enable_async_kv_loads": True},
    "chunks": {"max_num_batched_tokens": 7},
    "chunks-ahead": {"max_num_batched_tokens": 7, "max_frames_in_flight": 2},
    "no-cache": {"enable_prefix_caching": False},
    "drafts": {"spec_method": "ngram", "num_speculative_tokens": 2},
    "drafts-ahead": {
        "spec_method": "ngram",
        "num_speculative_tokens": 2,
        "max_frames_in_flight": 2,
        "enable_async_kv_loads": True,
    },
    "draft-model": {"spec_method": "draft_model", "num_speculative_tokens": 2},
}
SMALL = 40
"""Blocks of a pool where requests are preempted and wait for blocks that are being saved."""


TESTED = {("chunks-ahead", "recompute"), ("ahead-later", "fail")}
"""Storms and policies that are a test; the others are a soak."""


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[pytest.mark.soak] * ((name, policy) not in TESTED))
        for name in STORMS
        for policy in KVLoadFailurePolicy
    ],
)
def test_a_store_that_loses_blocks_changes_no_token(
    qwen3: Checkpoint, prompts: list[list[int]], name: str, policy: KVLoadFailurePolicy
) -> None:
    """Blocks are lost after the query, the store fails, jobs are late, pool and store are small."""
    draw = random.Random(name)
    store = Failing(HostStore(1 << 20), draw, loses=0.3, is_away=0.1)
    more = dict(STORMS[name])
    if name == "draft-model":
        more["draft_model"] = qwen3.draft_folder
    llm = make_llm(
        qwen3, store, late=draw.choice((1, 2, 5)), num_blocks=SMALL, kv_load_failure_policy=policy,
        check=ServingChecker, **more,
    )  # fmt: skip
    for _ in range(2):
        numbers = list(range(NUM_PROMPTS))
        draw.shuffle(numbers)
        made = llm.generate([prompts[number] for number in numbers], PARAMS)
        for number, one in zip(numbers, made, strict=True):
            if one.finish_reason is FinishReason.ERROR:
                assert policy is KVLoadFailurePolicy.FAIL
                assert one.token_ids == qwen3.expected.token_ids[number][: len(one.token_ids)]
            else:
                assert one.token_ids == qwen3.expected.token_ids[number]
    assert store.num_lost > 3
    stats = llm.get_stats()
    assert stats.external_prefix_cache_hits > 50
    snapshot = llm._scheduler.snapshot()
    assert snapshot.transfers is not None
    assert snapshot.transfers.held == ()
    assert len(snapshot.free_queue) == SMALL - 1


def test_blocks_of_other_adapters_and_salts_are_not_loaded(
    qwen3: Checkpoint, tmp_path: Path, computed: list[int]
) -> None:
    folders = {
        name: ADAPTERS[name].save(qwen3.model, tmp_path / name) for name in ("some", "whole")
    }
    prompt, store = list(range(2, 19)), HostStore()

    def ask(modules: dict[str, Path], adapter: str | None, salt: str | None) -> tuple[Any, int]:
        """Return the tokens, and how many prompt tokens were computed."""
        llm = make_llm(qwen3, store, lora_modules=modules, max_lora_rank=64)
        computed.clear()
        name = llm.add_request(prompt, PARAMS, adapter=adapter, cache_salt=salt)
        while llm.has_unfinished_requests or llm._is_saving(name):
            llm.step()
        return llm.pop_completion(name).token_ids, computed[0]

    kinds = [(None, None), ("some", None), ("whole", None), ("some", "s"), (None, "s"), (None, "t")]
    first = [ask(folders, *kind) for kind in kinds]
    assert [count for _, count in first] == [17] * len(kinds)
    assert [ask(folders, *kind) for kind in kinds] == [(tokens, 1) for tokens, _ in first]
    assert len({tokens for tokens, _ in first}) == 3
    # The same name for other weights is another adapter.
    swapped = {"some": folders["whole"], "whole": folders["some"]}
    assert ask(swapped, "some", None) == (first[2][0], 17)
    assert ask({"whole": folders["whole"]}, "whole", None) == (first[2][0], 1)


@pytest.mark.parametrize(
    ("more", "num_computed"), [({}, 1), ({"block_size": 8}, 17), ({"dtype": "bfloat16"}, 17)]
)
def test_blocks_of_another_shape_are_not_found(
    qwen3: Checkpoint, computed: list[int], more: dict[str, Any], num_computed: int
) -> None:
    prompt, store = list(range(2, 19)), HostStore()
    serve(make_llm(qwen3, store), [prompt])
    computed.clear()
    serve(make_llm(qwen3, store, **more), [prompt])
    assert computed[0] == num_computed


def test_a_store_with_window_layers_is_rejected(windows: Checkpoint) -> None:
    with pytest.raises(SettingsError, match="give disable_hybrid_kv_cache_manager=True"):
        LLM(windows.folder, kv_store=HostStore(), block_size=4, num_blocks=40)


def test_a_store_keeps_whole_windows_without_the_hybrid_manager(
    windows: Checkpoint, prompts: list[list[int]]
) -> None:
    store = HostStore()
    for role in (KVRole.PRODUCER, KVRole.CONSUMER):
        made = serve(make_llm(windows, store, kv_role=role), prompts[:4])
        assert made == windows.expected.token_ids[:4]


class Stuck(HostStore):
    """A store whose loads do not end while `is_stuck` is set."""

    is_stuck = True

    def load(self, names: Sequence[BlockName]) -> list[BlockKV]:
        assert not self.is_stuck, "jobs wait while the store is stuck"
        return super().load(names)


class StuckJobs(LateJobs):
    def __init__(self, store: Stuck) -> None:
        super().__init__(1)
        self.store = store

    def poll(self, timeout_s: float = 0.0) -> None:
        if not self.store.is_stuck:
            super().poll(timeout_s)


@pytest.fixture
def stuck(qwen3: Checkpoint) -> tuple[LLM, Stuck]:
    store = Stuck()
    serve(make_llm(qwen3, store, kv_role="kv_producer"), [[*range(2, 25)]], ONE)
    llm = make_llm(qwen3, store, enable_async_kv_loads=True, kv_role="kv_consumer")
    get_connector(llm)._jobs = StuckJobs(store)
    return llm, store


def test_other_requests_run_while_a_load_hangs(
    qwen3: Checkpoint, stuck: tuple[LLM, Stuck], computed: list[int]
) -> None:
    llm, store = stuck
    hanging = llm.add_request([*range(2, 25)], PARAMS)
    serve(llm, [[5, 6, 7]])
    assert llm.is_live(hanging)
    store.is_stuck = False
    computed.clear()
    while llm.has_unfinished_requests:
        llm.step()
    assert computed[0] == 3
    assert (
        llm.pop_completion(hanging).token_ids == serve(make_llm(qwen3, None), [[*range(2, 25)]])[0]
    )


def test_blocks_of_an_aborted_load_are_held_until_it_ends(stuck: tuple[LLM, Stuck]) -> None:
    llm, store = stuck
    hanging = llm.add_request([*range(2, 25)], PARAMS)
    llm.step()
    llm.abort(hanging)
    assert llm.pop_completion(hanging).finish_reason is FinishReason.ABORT
    llm.step()
    (held,) = llm._scheduler.snapshot().transfers.held  # type: ignore[union-attr]
    assert (held.request_id, held.is_recving, len(held.block_tables[0])) == (hanging, True, 5)
    store.is_stuck = False
    for _ in range(3):
        llm.step()
    assert len(llm._scheduler.snapshot().free_queue) == 119


def test_an_exception_ends_loads_before_the_next_ones_start(
    qwen3: Checkpoint, stuck: tuple[LLM, Stuck], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, store = stuck
    llm.add_request([*range(2, 25)], PARAMS)
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(Model, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            serve(llm, [[5, 6]])
    store.is_stuck = False
    torch.manual_seed(0)
    prompt = [*range(30, 50)]
    assert serve(llm, [prompt]) == serve(make_llm(qwen3, None), [prompt])
    assert len(get_connector(llm)._jobs) == 0


class Unreadable(HostStore):
    """A store that reports all blocks, but loads only the first `num_readable` of each call."""

    num_readable = 2

    def load(self, names: Sequence[BlockName]) -> list[BlockKV]:
        return super().load(names)[: self.num_readable]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_finishes_if_its_loads_always_fail(qwen3: Checkpoint, is_async: bool) -> None:
    store, asked = Unreadable(), [[*range(2, 25)]]
    made = serve(make_llm(qwen3, store, kv_role="kv_producer"), asked)
    for num_readable in (2, 0):
        store.num_readable = num_readable
        llm = make_llm(
            qwen3, store, enable_async_kv_loads=is_async, kv_role="kv_consumer",
            kv_load_failure_policy=KVLoadFailurePolicy.RECOMPUTE, check=ServingChecker,
        )  # fmt: skip
        name = llm.add_request(asked[0], PARAMS)
        for _ in range(60):
            llm.step()
        assert llm.pop_completion(name).token_ids == made[0]


def test_a_request_waits_for_announced_blocks(qwen3: Checkpoint, computed: list[int]) -> None:
    store, prompt = HostStore(), list(range(2, 25))
    producer = make_llm(qwen3, store, kv_role="kv_producer")
    first = producer.add_request(prompt, ONE)
    consumer = make_llm(qwen3, store, kv_role="kv_consumer")
    name = consumer.add_request(prompt, PARAMS)
    for _ in range(3):
        assert consumer.step() == []
    while producer.has_unfinished_requests or producer._is_saving(first):
        producer.step()
    computed.clear()
    while consumer.has_unfinished_requests:
        consumer.step()
    assert computed[0] == 3
    made = consumer.pop_completion(name).token_ids
    assert made == serve(make_llm(qwen3, None), [prompt])[0]


@pytest.mark.parametrize("end", ["abort", "raise"])
def test_a_request_does_not_wait_for_blocks_of_a_failed_producer(
    qwen3: Checkpoint, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    store, prompt = HostStore(), list(range(2, 25))
    producer = make_llm(qwen3, store, kv_role="kv_producer")
    name = producer.add_request(prompt, ONE)
    if end == "abort":
        producer.abort(name)
        while producer._is_saving(name):
            producer.step()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Model, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                producer.step()
    consumer = make_llm(qwen3, store, kv_role="kv_consumer")
    assert serve(consumer, [prompt]) == serve(make_llm(qwen3, None), [prompt])


def test_sessions_save_blocks_of_all_generated_tokens(
    qwen3: Checkpoint, computed: list[int]
) -> None:
    """B68: blocks of tokens that were not known at the start of the session are saved too."""
    store = HostStore()
    llm = make_llm(qwen3, store, enable_sessions=True)
    session = llm.open_session([*range(2, 10)], SamplingParams(max_tokens=6, ignore_eos=True))
    first = session.receive()
    session.send([40, 41])
    second = session.receive()
    session.close()
    while llm._is_saving(session.request_id):
        llm.step()
    whole = [*second.prompt_token_ids, *second.token_ids]
    assert whole[8:13] == list(first.token_ids[:-1])
    assert len(store) == (len(whole) - 1) // 4
    computed.clear()
    serve(make_llm(qwen3, store), [whole])
    assert computed[0] == 1


@contextmanager
def produce(
    folder: Path, socket: Path, prompts: list[list[int]]
) -> Iterator[subprocess.Popen[str]]:
    """Run a producer in another process; yield after it has announced all prompts."""
    command = [sys.executable, "-m", "engine_support.producer", str(folder), str(socket)]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            write_line(process, json.dumps(prompts))
            expect_line(process, "announced")
            yield process
        finally:
            process.kill()


def write_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def expect_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line


CONSUMER: dict[str, Any] = {"kv_role": "kv_consumer", "enable_async_kv_loads": True}


def test_a_consumer_finishes_after_its_producer_was_killed(
    qwen3: Checkpoint, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Saved blocks are loaded, blocks that were only announced are computed."""
    asked, expected = prompts[:NUM_PROMPTS], qwen3.expected.token_ids[:NUM_PROMPTS]
    store, socket = HostStore(), tmp_path_factory.mktemp("s") / "kv"
    with StoreServer(store, socket), produce(qwen3.folder, socket, asked) as producer:
        llm = make_llm(qwen3, store, **CONSUMER)
        names = [llm.add_request(prompt, PARAMS) for prompt in asked]
        expect_line(producer, "half")
        while sum(not llm.is_live(name) for name in names) < NUM_PROMPTS // 2:
            llm.step()
        for _ in range(5):
            llm.step()
        assert llm.has_unfinished_requests
        assert llm.get_stats().external_prefix_cache_hits > 100
        producer.kill()
        while llm.has_unfinished_requests:
            llm.step()
    assert [llm.pop_completion(name).token_ids for name in names] == expected


@pytest.mark.soak
def test_all_prompts_are_loaded_after_a_producer_recovers(
    qwen3: Checkpoint, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked, expected = prompts[:NUM_PROMPTS], qwen3.expected.token_ids[:NUM_PROMPTS]
    store, socket = HostStore(), tmp_path_factory.mktemp("s") / "kv"
    with StoreServer(store, socket):
        with produce(qwen3.folder, socket, asked) as producer:
            expect_line(producer, "half")
            producer.kill()
        num_before = len(store)
        with produce(qwen3.folder, socket, asked) as producer:
            expect_line(producer, "half")
            write_line(producer, "go on")
            expect_line(producer, "all")
        assert 0 < num_before < len(store)
        remote = RemoteStore(socket)
        llm = make_llm(qwen3, remote, enable_prefix_caching=False, num_blocks=300, **CONSUMER)
        assert serve(llm, asked) == expected
        remote.close()
    assert llm.get_stats().external_prefix_cache_hits == sum(
        min(len(prompt) // 4 * 4, len(prompt) - 1) for prompt in asked
    )


def test_a_store_that_stops_and_restarts_changes_no_token(
    qwen3: Checkpoint, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked, expected = prompts[:NUM_PROMPTS], qwen3.expected.token_ids[:NUM_PROMPTS]
    store, socket = HostStore(), tmp_path_factory.mktemp("s") / "kv"
    remote = RemoteStore(socket)
    llm = make_llm(qwen3, remote, num_blocks=SMALL, enable_async_kv_loads=True)
    names = [llm.add_request(prompt, PARAMS) for prompt in asked]
    for _ in range(2):
        with StoreServer(store, socket):
            for _ in range(25):
                llm.step()
            while not len(store) and (llm.has_unfinished_requests or llm._is_saving(*names)):
                llm.step()  # the server runs until a finished request is saved
        for _ in range(5):
            llm.step()
    while llm.has_unfinished_requests or llm._is_saving(*names):
        llm.step()
    assert [llm.pop_completion(name).token_ids for name in names] == expected
    assert len(store) > 0
    remote.close()
