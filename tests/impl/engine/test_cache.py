"""KV cache memory: size of a block, and number of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.models import Checkpoint

from blockstep.impl.engine import LLM, RequestError, SamplingParams, SettingsError
from blockstep.impl.engine.cache import compute_num_blocks
from blockstep.impl.tiers import KVShape


def test_memory_is_rounded_down_to_blocks() -> None:
    assert [compute_num_blocks(size, 100) for size in (200, 299, 300)] == [2, 2, 3]


@pytest.mark.parametrize("size", [0, 99, 199])
def test_memory_for_less_than_two_blocks_is_rejected(size: int) -> None:
    with pytest.raises(SettingsError, match=f"kv_cache_bytes = {size}: .* give 200 or more"):
        compute_num_blocks(size, 100)


def test_the_engine_sizes_its_cache_from_memory(qwen3: Checkpoint) -> None:
    block_bytes = KVShape(2, 2, 32, 16, 4).block_bytes
    llm = LLM(qwen3.folder, kv_cache_bytes=10 * block_bytes + 1)
    assert llm.config.num_blocks == 10
    assert llm.config.max_model_len == 9 * 16


def test_a_draft_model_shares_the_memory(qwen3: Checkpoint) -> None:
    block_bytes = KVShape(2, 2, 32, 16, 4).block_bytes
    llm = LLM(
        qwen3.folder,
        kv_cache_bytes=10 * block_bytes,
        spec_method="draft_model",
        num_speculative_tokens=1,
        draft_model=qwen3.draft_folder,
    )
    assert llm.config.num_blocks == 5


def test_windows_allow_longer_requests_in_the_same_memory(windows: Checkpoint) -> None:
    """With one table, a block has KV of both layers; with two groups, that of one layer."""
    size: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 8}
    size["kv_cache_bytes"] = 12 * KVShape(2, 2, 16, 4, 4).block_bytes
    one = LLM(windows.folder, **size, disable_hybrid_kv_cache_manager=True)
    assert one.config.groups == ()
    assert (one.config.num_blocks, one.config.max_model_len) == (12, 11 * 4)
    two = LLM(windows.folder, **size)
    assert [group.sliding_window for group in two.config.groups] == [0, 7]
    # A window holds 6 tokens before a step of 8, wherever that begins in a block: 5 blocks.
    assert (two.config.num_blocks, two.config.max_model_len) == (24, (23 - 5) * 4)
    four, prompt = SamplingParams(4), list(range(2, 42))
    (made,), (expected,) = two.generate([prompt], four), one.generate([prompt], four)
    assert made.token_ids == expected.token_ids
    longer = LLM(windows.folder, **size, max_model_len=76)
    with pytest.raises(RequestError, match="at its longest it needs 24 blocks"):
        longer.generate([list(range(2, 74))], four)


def test_a_small_model_does_not_take_all_memory(qwen3: Checkpoint) -> None:
    llm = LLM(qwen3.folder, max_num_seqs=4, max_model_len=64)
    assert llm.config.num_blocks == 4 * 4 + 1


def test_bfloat16_takes_half_the_memory(qwen3: Checkpoint) -> None:
    block_bytes = KVShape(2, 2, 32, 16, torch.bfloat16.itemsize).block_bytes
    llm = LLM(qwen3.folder, dtype="bfloat16", kv_cache_bytes=10 * block_bytes)
    assert llm.config.num_blocks == 10


def test_a_cache_too_large_for_the_machine_is_rejected(
    qwen3: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*shape: object, **more: object) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr("blockstep.impl.engine.cache.torch.zeros", fail)
    with pytest.raises(SettingsError, match=r"num_blocks = 50: the machine has no .* bytes"):
        LLM(qwen3.folder, num_blocks=50)


def test_a_draft_model_without_its_method_is_rejected(qwen3: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="if and only if spec_method is draft_model"):
        LLM(qwen3.folder, draft_model=tmp_path)
