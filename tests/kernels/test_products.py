"""Matrix products of few rows: against float64, and added up by the next kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockstep.kernels import (
    add_rms_norm,
    is_product_of_few,
    multiply_in_parts,
    multiply_silu_and_mul,
    rotate_and_cache,
    use_backend,
)
from blockstep.kernels.products import NUM_FEW_MAX, find_part_size, has_room

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative to the largest number of a result, which is rounded to 16 bits once."""


def skip_wide(backend: str, device: str, dtype: torch.dtype) -> None:
    """Skip float32 on a GPU, where the kernels multiply 16-bit numbers only."""
    if (backend, device, dtype) == ("triton", "cuda", torch.float32):
        pytest.skip("float32 is multiplied by torch on a GPU")


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def check(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == exact.shape
    error = float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-9))
    assert error < ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_size", "in_size"), [(48, 64), (200, 1040), (64, 2304), (16, 3)])
@pytest.mark.parametrize(
    ("num_tokens", "has_bias"), [(0, False), (1, False), (1, True), (17, True), (64, False)]
)
def test_parts_add_up_to_the_product(
    backend: str, device: str, dtype: torch.dtype, out_size: int, in_size: int, num_tokens: int,
    has_bias: bool,
) -> None:  # fmt: skip
    skip_wide(backend, device, dtype)
    hidden = draw(num_tokens, in_size, dtype=dtype, device=device)
    weight = draw(out_size, in_size, dtype=dtype, device=device, seed=1)
    bias = draw(out_size, dtype=dtype, device=device, seed=2) if has_bias else None
    parts = multiply_in_parts(hidden, weight, bias)
    size = find_part_size(num_tokens, out_size, in_size)
    assert parts.shape == (-(-in_size // size), num_tokens, out_size)
    assert parts.dtype == torch.float32
    exact = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    if num_tokens:
        check(parts.double().sum(0), exact, torch.float32)
        first = hidden[:, :size].double() @ weight[:, :size].double().T
        check(parts[0] - (0 if bias is None else bias.float()), first, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner_size", "in_size"), [(48, 64), (150, 200), (7, 129), (9, 4096)])
@pytest.mark.parametrize(
    ("num_tokens", "has_bias"), [(0, False), (1, True), (20, False), (64, True)]
)
def test_the_product_is_gated(
    backend: str, device: str, dtype: torch.dtype, inner_size: int, in_size: int, num_tokens: int,
    has_bias: bool,
) -> None:  # fmt: skip
    skip_wide(backend, device, dtype)
    hidden = draw(num_tokens, in_size, dtype=dtype, device=device)
    weight = draw(2 * inner_size, in_size, dtype=dtype, device=device, seed=1)
    bias = draw(2 * inner_size, dtype=dtype, device=device, seed=2) if has_bias else None
    gated = multiply_silu_and_mul(hidden, weight, bias)
    assert gated.dtype == dtype
    both = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, up = both.chunk(2, dim=-1)
    if num_tokens:
        check(gated, gate * gate.sigmoid() * up, dtype)


@pytest.mark.parametrize("num_tokens", [3, 17, 64])
def test_bits_of_a_row_do_not_depend_on_its_batch(
    backend: str, device: str, num_tokens: int
) -> None:
    if backend == "torch":
        pytest.skip("the reference multiplies by whatever torch takes for a size")
    dtype = torch.float16
    hidden = draw(num_tokens, 1100, dtype=dtype, device=device)
    weight = draw(96, 1100, dtype=dtype, device=device, seed=1)
    two = hidden[-2:]
    assert torch.equal(multiply_in_parts(two, weight), multiply_in_parts(hidden, weight)[:, -2:])
    assert torch.equal(
        multiply_silu_and_mul(two, weight), multiply_silu_and_mul(hidden, weight)[-2:]
    )


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_adds_parts(backend: str, device: str, dtype: torch.dtype, num_parts: int) -> None:
    parts = draw(num_parts, 5, 100, dtype=torch.float32, device=device)
    residual = draw(5, 100, dtype=dtype, device=device, seed=1)
    weight = draw(100, dtype=dtype, device=device, seed=2)
    total = parts.double().sum(0) + residual.double()
    normed = add_rms_norm(parts, residual, weight, 1e-5)
    check(residual, total, dtype)
    wide = residual.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    check(normed, exact, dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotation_adds_parts(backend: str, device: str, dtype: torch.dtype, normed: bool) -> None:
    """The result is the rotation of the sum, rounded to the model's dtype."""
    heads, kv_heads, size, num_tokens = 6, 2, 16, 3
    parts = draw(3, num_tokens, (heads + 2 * kv_heads) * size, dtype=torch.float32, device=device)
    table = draw(9, size, dtype=dtype, device=device, seed=1)
    norm = draw(size, dtype=dtype, device=device, seed=2) if normed else None
    places = torch.tensor([4, -1, 7], device=device)
    positions = torch.tensor([0, 8, 3], device=device)
    made = []
    summed = parts[0] + parts[1] + parts[2]
    for qkv in (parts, summed.to(dtype)):
        keys = torch.zeros(2, 4, kv_heads, size, dtype=dtype, device=device)
        values = keys.clone()
        query = rotate_and_cache(
            qkv, keys, values, places, positions, table, q_norm=norm, k_norm=norm
        )
        made.append((query, keys, values))
    for found, wanted in zip(*made, strict=True):
        check(found, wanted.double(), dtype)


WRONG = {
    "a weight of another width": (("weight", (8, 15)), ValueError, "weight: dimension 1"),
    "a weight of another dtype": (("weight", torch.float16), TypeError, "weight: must be float32"),
    "a short bias": (("bias", (7,)), ValueError, "bias: dimension 0"),
    "hidden of three dimensions": (("hidden", (1, 2, 16)), ValueError, "hidden: must have 2"),
}


@pytest.mark.parametrize("call", [multiply_in_parts, multiply_silu_and_mul])
@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_rejected(
    call: Callable[..., Tensor], change: tuple[str, Any], error: type[Exception], message: str,
    device: str,
) -> None:  # fmt: skip
    given = {
        "hidden": torch.zeros(2, 16, device=device), "weight": torch.zeros(8, 16, device=device),
        "bias": torch.zeros(8, device=device),
    }  # fmt: skip
    name, what = change
    given[name] = (
        torch.zeros(what, device=device) if isinstance(what, tuple) else given[name].to(what)
    )
    with pytest.raises(error, match=message):
        call(*given.values())


def test_an_odd_gate_and_too_many_rows_are_rejected(device: str) -> None:
    with pytest.raises(ValueError, match="gate_up: dimension 0 must be even"):
        multiply_silu_and_mul(torch.zeros(1, 16, device=device), torch.zeros(7, 16, device=device))
    many = torch.zeros(NUM_FEW_MAX + 1, 16, dtype=torch.float16, device=device)
    with use_backend("triton"), pytest.raises(ValueError, match="at most 64 tokens, but has 65"):
        multiply_in_parts(many, many[:8])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float32_is_rejected_on_a_gpu() -> None:
    hidden = torch.zeros(2, 16, device="cuda")
    with pytest.raises(TypeError, match="hidden: must be float16 or bfloat16 on a GPU"):
        multiply_in_parts(hidden, hidden)


def test_products_with_few_rows_are_recognized() -> None:
    weight = torch.zeros(8, 16, dtype=torch.bfloat16)
    few, many = weight[:4], torch.zeros(65, 16, dtype=torch.bfloat16)
    assert not is_product_of_few(few, weight)  # the reference
    with use_backend("triton"):
        assert is_product_of_few(few, weight)
        assert not is_product_of_few(many, weight)
        assert not is_product_of_few(few[:0], weight)
        assert not is_product_of_few(few.float(), weight.float())
        assert not is_product_of_few(few[:, :12], weight[:, :12])


@pytest.mark.parametrize(("shared", "expected"), [(99, False), (163, True), (227, True)])
def test_a_gpu_with_little_shared_memory_multiplies_with_torch(
    monkeypatch: pytest.MonkeyPatch, shared: int, expected: bool
) -> None:
    """The sizes in KiB are those of an RTX 4090, an A100 and an H100."""
    properties = SimpleNamespace(shared_memory_per_block_optin=shared << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    has_room.cache_clear()
    assert has_room(torch.device("cuda", 0)) is expected
    has_room.cache_clear()
    assert has_room(torch.device("cpu"))
