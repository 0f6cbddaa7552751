"""Tiers in the engine: KV of victims is saved and loaded, and tokens do not change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_support.models import MAX_TOKENS, Checkpoint

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import (
    LLM,
    HostStore,
    KVRole,
    SamplingParams,
    SettingsError,
    TieredStore,
)
from blockstep.impl.engine.block_transfers import LateJobs
from blockstep.impl.engine.connector import Connector
from blockstep.impl.tiers import Link, Prefill, SwapSpeeds

NUM_PROMPTS = 32
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
SMALL: dict[str, Any] = {
    "block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "disable_hybrid_kv_cache_manager": True,
}  # fmt: skip
STORMS: dict[str, dict[str, Any]] = {
    "now": {},
    "later": {"enable_async_kv_loads": True},
    "ahead": {"max_frames_in_flight": 2},
    "ahead-later-chunks": {
        "max_frames_in_flight": 3,
        "enable_async_kv_loads": True,
        "max_num_batched_tokens": 7,
    },
    "no-cache": {"enable_prefix_caching": False},
    "drafts-ahead": {
        "spec_method": "ngram",
        "num_speculative_tokens": 2,
        "max_frames_in_flight": 2,
    },
    "draft-model": {"spec_method": "draft_model", "num_speculative_tokens": 2},
    "thresholds": {"admission_low_blocks": 2, "admission_high_blocks": 9},
}


class Spoilt(TieredStore):
    """A store whose files are changed from outside."""

    def spoil(self, draw: random.Random) -> int:
        """Change a byte in half of the store's files. Return how many were changed."""
        assert self._files is not None
        files = sorted(self._files.folder.glob("*.kv"))
        chosen = draw.sample(files, (len(files) + 1) // 2)
        for path in chosen:
            data = bytearray(path.read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        return len(chosen)


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of tokens of each victim whose KV is saved."""
    saved: list[int] = []
    swap = Connector.swap

    def count(self: Connector, plan: Any, batch: Any) -> None:
        saved.extend(victim.num_tokens for victim in plan.kv_saves)
        swap(self, plan, batch)

    monkeypatch.setattr(Connector, "swap", count)
    return saved


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("name", STORMS)
def test_a_swap_storm_changes_no_token(
    qwen3: Checkpoint, prompts: list[list[int]], tmp_path: Path, swapped: list[int], name: str
) -> None:
    """The pool is the smallest, tiers overflow, jobs are late, and files are changed meanwhile."""
    draw = random.Random(name)
    more = dict(STORMS[name])
    if name == "draft-model":
        more["draft_model"] = qwen3.draft_folder
    store = Spoilt(6, 60, tmp_path / "kv")
    longest = (
        max(map(len, prompts[:NUM_PROMPTS])) + MAX_TOKENS + more.get("num_speculative_tokens", 0)
    )
    num_blocks = -(-longest // 4) + 1 + 6 * (name == "thresholds")
    llm = LLM(
        qwen3.folder, kv_store=store, check=ServingChecker, swap_min_tokens=4,
        **{**SMALL, "num_blocks": num_blocks, **more},
    )  # fmt: skip
    assert llm._connector is not None
    llm._connector._jobs = LateJobs(draw.choice((1, 2, 5)))
    num_spoilt = 0
    for _ in range(2):
        numbers = list(range(NUM_PROMPTS))
        draw.shuffle(numbers)
        names = [llm.add_request(prompts[number], PARAMS) for number in numbers]
        num_steps = 0
        while llm.has_unfinished_requests or llm._is_saving(*names):
            llm.step()
            num_steps += 1
            if num_steps % 40 == 0:
                num_spoilt += store.spoil(draw)
        made = [llm.pop_completion(one).token_ids for one in names]
        assert made == [qwen3.expected.token_ids[number] for number in numbers]
    assert len(swapped) > 3
    assert all(num_tokens >= 4 and num_tokens % 4 == 0 for num_tokens in swapped)
    assert num_spoilt > 3
    assert store.num_lost > 0
    assert llm.get_stats().external_prefix_cache_hits > 50
    store.close()
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["blockstep-kv-store"]


def test_a_workload_larger_than_the_cache_is_loaded_from_both_tiers(
    qwen3: Checkpoint, prompts: list[list[int]], tmp_path: Path
) -> None:
    asked, expected = prompts[:NUM_PROMPTS], qwen3.expected.token_ids[:NUM_PROMPTS]
    store = TieredStore(30, 1000, tmp_path)
    llm = LLM(qwen3.folder, kv_store=store, swap_min_tokens=4, **SMALL)
    for _ in range(2):
        assert [one.token_ids for one in llm.generate(asked, PARAMS)] == expected
    in_host, in_files = store.count_by_tier()
    assert in_host == 30
    assert in_files > SMALL["num_blocks"]
    assert store.num_host_hits > 10
    assert store.num_file_hits > 10
    assert store.num_lost == 0
    store.clear()
    assert (len(store), store.count([b"x"])) == (0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["blockstep-kv-store"]
    assert [one.token_ids for one in llm.generate(asked, PARAMS)] == expected


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_store_with_changed_files_changes_no_token(
    qwen3: Checkpoint, prompts: list[list[int]], tmp_path: Path, when: str
) -> None:
    asked, expected = prompts[:NUM_PROMPTS], qwen3.expected.token_ids[:NUM_PROMPTS]
    store, draw = Spoilt(0, 1000, tmp_path), random.Random(5)
    llm = LLM(qwen3.folder, kv_store=store, check=ServingChecker, **SMALL)
    assert [one.token_ids for one in llm.generate(asked, PARAMS)] == expected
    if when == "before":
        store.spoil(draw)
    else:
        names = [llm.add_request(prompt, PARAMS) for prompt in asked]
        store.spoil(draw)  # it has offered what it cannot give
        while llm.has_unfinished_requests:
            llm.step()
        assert [llm.pop_completion(name).token_ids for name in names] == expected
    assert [one.token_ids for one in llm.generate(asked, PARAMS)] == expected
    assert store.num_lost > 3


SPEEDS = SwapSpeeds(Link(10**9), Link(10**9), Prefill(1_000))


def test_the_shortest_saved_victim_follows_from_measured_costs(qwen3: Checkpoint) -> None:
    def ask(**more: Any) -> int:
        return LLM(qwen3.folder, kv_store=HostStore(), **SMALL, **more).config.swap_min_tokens

    assert ask() == 0
    assert ask(swap_min_tokens=12) == 12
    assert ask(swap_speeds=SPEEDS) == 1
    late = SwapSpeeds(Link(10**9, ns_per_copy=4_500_000), Link(10**9), Prefill(1_000))
    assert ask(swap_speeds=late) == 5
    assert ask(swap_speeds=SwapSpeeds(None, Link(1), Prefill(1_000))) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"swap_min_tokens": 4}, "give a kv_store"),
        ({"swap_min_tokens": 4, "swap_speeds": SPEEDS}, "give one"),
        ({"swap_min_tokens": 4, "kv_role": KVRole.PRODUCER, "kv_store": HostStore()}, "kv_both"),
        ({"swap_min_tokens": -1, "kv_store": HostStore()}, "swap_min_tokens"),
        ({"admission_low_blocks": 3, "admission_high_blocks": 2}, "admission_low_blocks"),
        ({"admission_high_blocks": 40}, "admission_high_blocks"),
    ],
)
def test_impossible_tier_settings_are_rejected(
    qwen3: Checkpoint, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        LLM(qwen3.folder, **SMALL, **more)
