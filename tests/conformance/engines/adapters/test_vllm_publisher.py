"""`blockstep events` follows the KV events that vLLM's own ZeroMQ publisher sends."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm_support.installed import PROFILE, RELEASE, needs, quiet

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.recorded.stream import Follower, read_dump
from blockstep.conformance.search.episodes import record_episode
from blockstep.conformance.search.options import CheckOptions

pytestmark = [quiet, needs(RELEASE.has_events, "the adapter reads no KV events of the release")]


def record_batches(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], int]:
    """Return what the release publishes in an episode, and its number of cached blocks then."""
    from blockstep.conformance.engines.adapters.vllm_events import Recorder

    batches: list[Any] = []
    keep = Recorder.publish

    def publish(recorder: Any, batch: Any) -> None:
        batches.append(batch)
        keep(recorder, batch)

    monkeypatch.setattr(Recorder, "publish", publish)
    engines: list[Any] = []

    def make(config: Any) -> Any:
        engines.append(load_engine("vllm")(config))
        return engines[-1]

    features = ("events", "caching")
    options = CheckOptions(
        engine="vllm", profile=PROFILE.name, with_features=features, without_features=("groups",)
    )
    for episode in range(20):
        batches.clear()
        record_episode(replace(options, episode=episode), make)
        if sum(len(batch.events) for batch in batches) >= 40:
            break
    assert sum(len(batch.events) for batch in batches) >= 40
    cache = engines[-1].scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    return batches, len(cache)


def test_a_publisher_of_vllm_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    batches, num_cached = record_batches(monkeypatch)
    from vllm.distributed.kv_events import ZmqEventPublisher

    stream, replay = (f"ipc://{tmp_path}/{name}" for name in ("stream", "replay"))
    publisher = ZmqEventPublisher(0, endpoint=stream, replay_endpoint=replay)

    def publish() -> None:
        for number, batch in enumerate(batches):  # the first before anything listens
            publisher.publish(batch)
            time.sleep(2.0 if number == 0 else 0.005)

    thread = threading.Thread(target=publish)
    thread.start()
    save = tmp_path / "saved.jsonl"
    command = (
        "events",
        stream,
        "--replay",
        replay,
        "--seconds",
        "6",
        "--save",
        save,
        "--json",
        "-",
    )
    try:
        counts = json.loads(CliRunner().invoke(app, [str(word) for word in command]).stdout)
    finally:
        thread.join()
        publisher.shutdown()
    assert (counts["batches"], counts["gaps"], counts["num_contradictions"]) == (
        len(batches),
        [],
        0,
    )
    follower = Follower()
    for batch in read_dump(save):
        follower.take(batch)
    assert len({block_hash for _, block_hash in follower.blocks}) == counts["cached"] == num_cached
