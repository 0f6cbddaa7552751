"""Copies of whole blocks: inside a cache, and to and from a staging buffer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockstep.kernels import blocks, copy_blocks, gather_blocks, scatter_blocks

PAIRS = {
    "none": [],
    "one": [(0, 5)],
    "one to many": [(0, 5), (0, 6), (0, 7)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "swap through a third": [(0, 7), (1, 0), (7, 1)],
    "written twice": [(0, 5), (1, 5)],
    "onto itself": [(3, 3)],
    "cycle": [(0, 1), (1, 0)],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def make_cache(dtype: torch.dtype, device: str, *block: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, *block, generator=draw).to(dtype).to(device)


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairs_are_copied_in_sequence(
    backend: str, device: str, dtype: torch.dtype, pairs: list[tuple[int, int]]
) -> None:
    caches = [make_cache(dtype, device, 4, 2, 16), make_cache(dtype, device, 3, 1, 10)]
    expected = [cache.float().tolist() for cache in caches]
    for source, destination in pairs:
        for cache in expected:
            cache[destination] = cache[source]
    copy_blocks(caches, torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2))
    assert [cache.float().tolist() for cache in caches] == expected


def test_independent_pairs_are_copied_at_once(backend: str, device: str) -> None:
    cache = make_cache(torch.float16, device, 3, 2, 10)
    expected = cache.tolist()
    pairs = [(0, 5), (0, 6), (3, 2)]
    for source, destination in pairs:
        expected[destination] = expected[source]
    copy_blocks([cache], torch.tensor(pairs, device=device), independent=True)
    assert cache.tolist() == expected


def test_a_cache_may_be_a_slice_of_an_allocation(backend: str, device: str) -> None:
    both = make_cache(torch.float32, device, 2, 4, 2, 16)
    before = both.clone()
    copy_blocks([both[:, 1]], torch.tensor([[0, 3]], device=device))
    assert torch.equal(both[3, 1], before[0, 1])
    assert torch.equal(both[:, 0], before[:, 0])


@pytest.mark.parametrize("ids", [[], [3], [7, 0, 3, 4]], ids=["none", "one", "scattered"])
@pytest.mark.parametrize("large", [False, True], ids=["kernel", "copy engines"])
def test_blocks_swapped_out_and_in_are_unchanged(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, ids: list[int], large: bool
) -> None:
    if large:
        monkeypatch.setattr("blockstep.kernels.blocks.DMA_BLOCK_BYTES_MIN", 1)
    cache = make_cache(torch.bfloat16, device, 3, 2, 10)
    block_ids = torch.tensor(ids, dtype=torch.int64)
    for place in {device, "cpu"}:
        staging = torch.zeros(len(ids), 3, 2, 10, dtype=torch.bfloat16, device=place)
        gather_blocks(cache, block_ids, staging)
        if device == "cuda":
            torch.cuda.synchronize()
        assert staging.tolist() == [cache[block].tolist() for block in ids]
        back = torch.zeros_like(cache)
        scatter_blocks(staging, block_ids.to(device), back)
        expected = torch.zeros_like(cache)
        expected[ids] = cache[ids]
        assert torch.equal(back, expected)


@pytest.mark.parametrize("num_bytes", [1, 500, 1 << 20])
def test_blocks_are_copied_to_the_host_in_parts(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, num_bytes: int
) -> None:
    """Each part passes through a device buffer; here staging counts as host memory."""
    monkeypatch.setattr(blocks, "NUM_BUFFER_BYTES_MAX", num_bytes)
    parts = blocks.list_parts(torch.zeros(7, 60), torch.device("meta"))
    rows = torch.arange(7)
    assert [row for part in parts for row in rows[part].tolist()] == rows.tolist()
    assert all(len(rows[part]) <= max(1, num_bytes // 240) for part in parts)
    monkeypatch.setattr(blocks, "list_parts", lambda staging, device: parts)
    cache, back = (make_cache(torch.float32, device, 60) for _ in range(2))
    ids, staging = torch.tensor([5, 1, 7, 0, 2, 6, 3], device=device), torch.zeros(7, 60)
    gather_blocks(cache, ids, staging)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(staging, cache[ids].cpu())
    scatter_blocks(-staging, ids, back)
    assert torch.equal(back[ids], -cache[ids])
    assert torch.equal(back[4], cache[4])


def test_a_wrong_call_is_rejected() -> None:
    cache = torch.zeros(8, 4, 2, 16)
    with pytest.raises(ValueError, match=r"pairs: must hold ids .* 0 <= x < 8, but holds 8"):
        copy_blocks([cache], torch.tensor([[0, 8]]))
    for pairs in ([[0, 1], [1, 2]], [[0, 1], [2, 1]]):
        with pytest.raises(ValueError, match="leave out independent"):
            copy_blocks([cache], torch.tensor(pairs), independent=True)
    with pytest.raises(ValueError, match=r"pairs: dimension 1 .* must be 2 as in the layout"):
        copy_blocks([cache], torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match=r"caches\[1\]: dimension 0"):
        copy_blocks([cache, cache[:7]], torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="each block must be contiguous"):
        copy_blocks([cache.transpose(0, 1)], torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="staging: must be contiguous of shape"):
        gather_blocks(cache, torch.tensor([1, 2]), torch.zeros(1, 4, 2, 16))
    with pytest.raises(TypeError, match=r"staging: must be torch.float32 as the cache"):
        scatter_blocks(torch.zeros(1, 4, 2, 16).half(), torch.tensor([1]), cache)
    with pytest.raises(ValueError, match=r"block_ids: must hold ids of blocks .* but holds -1"):
        scatter_blocks(torch.zeros(1, 4, 2, 16), torch.tensor([-1]), cache)
