"""Connectors of vLLM: a release with one of its connectors agrees with the specification.

    the connector --> its answers, as offers --> the specification
    the scheduler <-- answers <-- the connector

Each answer of the connector becomes an offer before the next event. Only the scheduler's half of
the connector runs, so nothing is loaded; a worker's reports are drawn.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm_support.installed import PROFILE, needs_reference, quiet

from blockstep.conformance.engine import get_declines
from blockstep.conformance.protocol.compare import observation_differences, snapshot_differences
from blockstep.conformance.protocol.registry import SpecEngine, load_engine
from blockstep.spec import vocabulary as v

pytestmark = [quiet, needs_reference]
BLOCK_SIZE = 2
BYTES_PER_BLOCK = 2 * 2 * BLOCK_SIZE
"""Keys and values in float16, of one head of one element."""


class Pair:
    """The release with one of its connectors, and the specification under its profile."""

    def __init__(self, config: v.Config, connector: str, **settings: Any) -> None:
        self.engine: Any = load_engine("vllm")(config)
        self.declines = get_declines(self.engine)
        self.spec = SpecEngine(config, PROFILE)
        self.real = install(self.engine, connector, settings)
        self.num_events = 0

    def apply(self, event: v.Event) -> v.Observation | None:
        """Send an event and the connector's offers to both sides, and compare; None if declined."""
        assert self.declines is not None
        if self.declines(event) is not None:
            return None
        seen = self.engine.apply(event)
        for offer in self.real.take_learned():
            self.spec.apply(offer)
        expected = self.spec.apply(event)
        mine, theirs = map(without_counts, (self.spec.snapshot(), self.engine.snapshot()))
        found = observation_differences(expected, seen) or snapshot_differences(mine, theirs)
        assert not found, (event, found)
        self.num_events += 1
        return expected


def without_counts(shown: v.Snapshot | None) -> v.Snapshot:
    """Return the snapshot without counters and without offers of the last step."""
    assert shown is not None
    assert shown.transfers is not None
    return replace(shown, stats=v.Stats(), transfers=replace(shown.transfers, offers=()))


def install(engine: Any, connector: str, settings: dict[str, Any]) -> Any:
    """Replace the adapter's store by one that asks a connector of the release."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

    from blockstep.conformance.engines.adapters.vllm_store import Store

    class Real(Store):
        """A store that answers as its backend does, and keeps the answers as offers."""

        backend: Any
        learned: list[v.KVOffer]
        metadata: Any = None

        def take_learned(self) -> list[v.KVOffer]:
            learned, self.learned = self.learned, []
            return learned

        def learn(self, offer: v.KVOffer) -> None:
            self.learned.append(offer)
            self.offers[offer.request_id] = offer

        def get_num_new_matched_tokens(
            self, request: Any, num_computed_tokens: int
        ) -> tuple[int | None, bool]:
            found, is_async = self.backend.get_num_new_matched_tokens(request, num_computed_tokens)
            num_tokens = None if found is None else num_computed_tokens + found
            self.learn(v.KVOffer(request.request_id, num_tokens, is_async))
            answer: tuple[int | None, bool]
            answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
            assert answer == (found, is_async)
            return answer

        def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
            self.backend.update_state_after_alloc(request, blocks, num_tokens)
            super().update_state_after_alloc(request, blocks, num_tokens)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            self.metadata = self.backend.build_connector_meta(scheduler_output)
            return super().build_connector_meta(scheduler_output)

        def update_connector_output(self, connector_output: Any) -> None:
            self.backend.update_connector_output(connector_output)
            super().update_connector_output(connector_output)

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
            delays, _ = self.backend.request_finished(request, block_ids[0])
            name = request.request_id
            self.learn(replace(self.offers.get(name, v.KVOffer(name)), delays_free=delays))
            return super().request_finished_all_groups(request, block_ids)

    scheduler = engine.scheduler
    config = copy.copy(scheduler.vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.kv_transfer_config = KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=settings
    )
    cache = scheduler.kv_cache_config
    tensors = [KVCacheTensor(size=BYTES_PER_BLOCK * cache.num_blocks, shared_by=["layer.0"])]
    layers = KVCacheConfig(cache.num_blocks, tensors, cache.kv_cache_groups)
    role = KVConnectorRole.SCHEDULER
    real = Real(scheduler.vllm_config, role, cache)
    real.backend = KVConnectorFactory.create_connector(config, role, layers)
    real.learned = []
    scheduler.connector = engine.run.store = real
    return real


def play(pair: Pair, seed: int, save: Callable[[Any], None], num_steps: int = 40) -> None:
    """Run requests with common prefixes; loads and reads end at random."""
    draw = random.Random(seed)
    for number in range(num_steps):
        if draw.random() < 0.5:
            prompt = tuple(draw.choice(((0, 0), (1, 2), (1, 2, 3)))) * draw.randint(1, 4)
            pair.apply(v.Submit(v.Request(f"r{number}", prompt, max_tokens=draw.randint(1, 5))))
        shown = pair.spec.snapshot()
        assert shown.transfers is not None
        if shown.requests and draw.random() < 0.1:
            pair.apply(v.Abort((draw.choice(shown.requests).request_id,)))
        plan = pair.apply(v.Schedule())
        assert isinstance(plan, v.Plan)
        save(pair.real.metadata)
        shown = pair.spec.snapshot()
        assert shown.transfers is not None
        loading = [
            one.request_id
            for one in shown.requests
            if one.status is v.Status.WAITING_FOR_REMOTE_KVS
            and one.request_id not in shown.transfers.received
        ]
        loading += [one.request_id for one in shown.transfers.held if one.is_recving]
        reading = [one.request_id for one in shown.transfers.held if one.is_sending]
        report = v.KVTransfers(
            finished_recving=tuple(name for name in loading if draw.random() < 0.4),
            finished_sending=tuple(name for name in reading if draw.random() < 0.4),
        )
        if not plan.rows:
            pair.apply(v.TransfersReported(report))
            continue
        sampled = [
            v.RowTokens(row.request_id, (draw.randint(7, 8),) if samples(shown, row) else ())
            for row in plan.rows
        ]
        pair.apply(v.Commit(plan.frame_id, tuple(sampled), report))


def samples(shown: v.Snapshot, row: Any) -> bool:
    """Return whether a row of the last plan reaches the last known token."""
    name = row.request.request_id if isinstance(row, v.NewRow) else row.request_id
    found = shown.request(name)
    return found is not None and not found.is_prefill_chunk


def build(draw: random.Random, **fields: Any) -> v.Config:
    """Return a config with a small pool, so that blocks are evicted that the store still has."""
    return v.Config(
        num_blocks=draw.randint(9, 14),
        block_size=BLOCK_SIZE,
        max_num_seqs=draw.randint(1, 4),
        max_num_batched_tokens=draw.choice((4, 16)),
        max_model_len=16,
        kv_connector=True,
        **fields,
    )


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_offloaded_to_host_memory_are_loaded_again(seed: int) -> None:
    """Blocks are loaded again later, and read from finished requests."""
    draw = random.Random(seed)
    pair = Pair(
        build(draw, scheduler_reserve_full_isl=draw.random() < 0.5),
        "OffloadingConnector",
        cpu_bytes_to_use=BYTES_PER_BLOCK * draw.randint(4, 20),
    )
    play(pair, seed, lambda _: None)
    assert pair.num_events > 50


def make_folder(folder: Path, draw: random.Random) -> Pair:
    """A pair with prompts in a folder."""
    config = build(draw, enable_prefix_caching=False)
    return Pair(config, "ExampleConnector", shared_storage_path=str(folder))


def save_in(pair: Pair, metadata: Any) -> None:
    """Create the folders that the connector's worker creates, without data."""
    for one in metadata.requests:
        if one.is_store:
            name = pair.real.backend._generate_foldername_debug
            name(one.token_ids, one.mm_hashes, create_folder=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_prompts_are_loaded_from_a_shared_folder(seed: int, tmp_path: Path) -> None:
    """Loads are synchronous, and leave out the last block."""
    pair = make_folder(tmp_path, random.Random(seed))
    play(pair, seed, partial(save_in, pair))
    assert pair.num_events > 50


def test_a_shared_folder_offers_negative_tokens_for_a_prompt_of_one(tmp_path: Path) -> None:
    """The second such prompt would be computed from a position before its first token."""
    pair = make_folder(tmp_path, random.Random(0))
    pair.apply(v.Submit(v.Request("A", (0,), max_tokens=1)))
    pair.apply(v.Schedule())
    save_in(pair, pair.real.metadata)
    pair.apply(v.Submit(v.Request("B", (0,), max_tokens=1)))
    answer = pair.real.backend.get_num_new_matched_tokens(pair.engine.scheduler.requests["B"], 0)
    assert answer == (-BLOCK_SIZE, False)
