"""The KV scatter: it writes the right value to every slot and changes no other slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockstep.kernels import reshape_and_cache

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn


def make(num_tokens: int, dtype: torch.dtype, device: str, heads: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)
    made = [torch.randn(num_tokens, heads, 16, generator=draw).to(dtype) for _ in range(2)]
    return [tensor.to(device) for tensor in made]


def scatter_one_by_one(source: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // cache.shape[1], slot % cache.shape[1]] = source[token]
    return expected


def bits(tensor: Tensor) -> Tensor:
    """Return the bits, so that NaN compares equal to the same NaN."""
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "slots", [[], [-1], [0], [5, -1, 31, 2], list(range(30, -2, -1))],
    ids=["nothing", "padding", "one", "scattered", "all, reversed"],
)  # fmt: skip
@pytest.mark.parametrize("block_size", [8, 3, 1])
def test_slots_have_the_kv_of_their_tokens(
    backend: str, device: str, dtype: torch.dtype, slots: list[int], block_size: int
) -> None:
    key, value = make(len(slots), dtype, device)
    shape = (32 // block_size + 1, block_size, 2, 16)
    caches = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    expected = [
        scatter_one_by_one(x, c, mapping) for x, c in zip((key, value), caches, strict=True)
    ]
    reshape_and_cache(key, value, caches[0], caches[1], mapping)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache), bits(wanted))


def test_sources_and_caches_may_be_slices(backend: str, device: str) -> None:
    fused = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0)).to(device)
    caches = torch.zeros(4, 2, 8, 2, 16, device=device)
    mapping = torch.tensor([9, 0, 31], device=device)
    reshape_and_cache(fused[:, 4:6], fused[:, 6:], caches[:, 0], caches[:, 1], mapping)
    for index, source in enumerate((fused[:, 4:6], fused[:, 6:])):
        expected = scatter_one_by_one(source, torch.zeros(4, 8, 2, 16, device=device), mapping)
        assert torch.equal(caches[:, index], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_values_are_cast_to_the_dtype_of_the_cache(
    backend: str, device: str, dtype: torch.dtype
) -> None:
    key, value = make(3, torch.float32, device)
    caches = [torch.zeros(1, 4, 2, 16, dtype=dtype, device=device) for _ in range(2)]
    reshape_and_cache(key, value, caches[0], caches[1], torch.tensor([0, 1, 2], device=device))
    assert torch.equal(caches[0][0, :3], key.to(dtype))
    assert torch.equal(caches[1][0, :3], value.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_scaled_and_clamped(backend: str, device: str, dtype: torch.dtype) -> None:
    key, value = make(3, dtype, device)
    if backend == "triton" and device == "cpu":
        # Triton's interpreter loses the carry when it rounds to fp8 (1.96 becomes 1): nothing to
        # round, then. Compiled, the hardware rounds.
        key, value = key.to(FP8).to(dtype) * 0.5, value.to(FP8).to(dtype) * 4
    key[0, 0, 0], key[0, 0, 1] = 3000.0, -3000.0
    caches = [torch.zeros(1, 4, 2, 16, dtype=FP8, device=device) for _ in range(2)]
    mapping = torch.tensor([0, 1, 2], device=device)
    reshape_and_cache(key, value, caches[0], caches[1], mapping, k_scale=0.5, v_scale=4.0)
    for cache, source, scale in zip(caches, (key, value), (0.5, 4.0), strict=True):
        exact = (source.double() / scale).clamp(-448, 448).cpu()
        error = (cache[0, :3].cpu().double() - exact).abs()
        # Half a step of three bits of mantissa; 2**-10 is half a step of the smallest.
        assert bool((error <= torch.maximum(exact.abs() / 16, torch.tensor(2.0**-10))).all())
    assert caches[0][0, 0, 0, :2].tolist() == [448.0, -448.0]


def test_a_nan_stays_a_nan_in_fp8(backend: str, device: str) -> None:
    if backend == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter makes 384 of it")
    key, value = make(1, torch.float32, device)
    key[:], value[:] = 1.0, float("nan")
    caches = [torch.zeros(1, 4, 2, 16, dtype=FP8, device=device) for _ in range(2)]
    reshape_and_cache(key, value, caches[0], caches[1], torch.tensor([2], device=device))
    assert caches[0][0, 2].float().tolist() == key[0].tolist()
    assert bool(caches[1][0, 2].float().isnan().all())


def test_heads_may_be_the_outermost_dimension_of_a_large_cache(backend: str, device: str) -> None:
    """Addresses two KV heads after the first exceed 32 bits."""
    key, value = (x.to(FP8).float() for x in make(3, torch.float32, device, heads=3))
    stride = 1 << 30
    memory = torch.empty(2 * stride + (1 << 16), dtype=FP8, device=device)  # hardly any is touched
    shape = ((2, 8, 3, 16), (128, 16, stride, 1))
    caches = [memory.as_strided(*shape, storage_offset=start) for start in (0, 1 << 15)]
    slots = torch.tensor([9, 0, 15], device=device)
    reshape_and_cache(key, value, caches[0], caches[1], slots)
    for cache, source in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[slots // 8, slots % 8].float(), source)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "slots as int32": (
        {"slot_mapping": torch.zeros(3, dtype=torch.int32)}, TypeError,
        r"slot_mapping: must be int64, but is int32; convert it with slot_mapping.to\(...\)",
    ),
    "slots missing": (
        {"slot_mapping": torch.zeros(2, dtype=torch.int64)}, ValueError,
        "slot_mapping: dimension 0 .* must be 3 as in key",
    ),
    "slot outside": (
        {"slot_mapping": torch.tensor([0, 8, 1])}, ValueError,
        "slot_mapping: must hold slots, or -1, in -1 <= x < 8, but holds 8",
    ),
    "slot below": ({"slot_mapping": torch.tensor([0, -2, 1])}, ValueError, "but holds -2"),
    "heads": ({"value": torch.zeros(3, 1, 16)}, ValueError, "value: dimension 1"),
    "dtypes": ({"value": torch.zeros(3, 2, 16).half()}, TypeError, "value: must be float32"),
    "scale": ({"k_scale": 2.0}, ValueError, "k_scale: must be 1 unless the cache is float8_e4m3"),
    "scale of 0": ({"v_scale": 0.0}, ValueError, "v_scale: must be positive"),
    "layout": (
        {"key_cache": torch.zeros(2, 4, 16, 2).transpose(2, 3)}, ValueError,
        "key_cache: its last dimension must be contiguous",
    ),
    "device": ({"value_cache": torch.zeros(2, 4, 2, 16, device="meta")}, ValueError, "device"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_is_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    key, value = make(3, torch.float32, "cpu")
    call = {
        "key": key, "value": value, "key_cache": torch.zeros(2, 4, 2, 16),
        "value_cache": torch.zeros(2, 4, 2, 16), "slot_mapping": torch.tensor([0, 1, 2]), **change,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        reshape_and_cache(**call)
