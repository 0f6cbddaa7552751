"""Kernels of a layer (norms, gates, rotation and caching) against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockstep.kernels import (
    add_rms_norm,
    reshape_and_cache,
    rms_norm,
    rotate_and_cache,
    silu_and_mul,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
EPS = 1e-5
ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Absolute and relative tolerance, by dtype.

A GPU approximates roots and exponentials of float32. For 16 bits the tolerance is a unit in the
last place, since the interpreter truncates where hardware rounds.
"""


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def check(found: Tensor, exact: Tensor) -> None:
    error = ERROR[found.dtype]
    torch.testing.assert_close(found.double(), exact, rtol=error, atol=error)


def norm_exactly(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


# Norms.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", [1, 64, 100, 2048])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_rows_are_normalized(
    backend: str, device: str, dtype: torch.dtype, hidden_size: int, num_tokens: int
) -> None:
    hidden = draw(num_tokens, hidden_size, dtype=dtype, device=device)
    weight = draw(hidden_size, dtype=dtype, device=device, seed=1)
    check(rms_norm(hidden, weight, EPS), norm_exactly(hidden, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", [1, 100, 2048])
def test_the_sum_is_stored_and_normalized(
    backend: str, device: str, dtype: torch.dtype, hidden_size: int
) -> None:
    hidden, residual = (
        draw(3, hidden_size, dtype=dtype, device=device, seed=seed) for seed in (1, 2)
    )
    weight = draw(hidden_size, dtype=dtype, device=device, seed=3)
    given, total = hidden.clone(), hidden.double() + residual.double()
    normed = add_rms_norm(hidden, residual, weight, EPS)
    check(residual, total)
    check(normed, norm_exactly(residual, weight))
    assert torch.equal(hidden, given)


def test_rows_may_be_strided(backend: str, device: str) -> None:
    both = draw(4, 2 * 80, dtype=torch.float32, device=device)
    hidden, residual = both[:, :80], both[:, 80:]
    weight = draw(80, dtype=torch.float32, device=device, seed=1)
    check(rms_norm(hidden, weight, EPS), norm_exactly(hidden, weight))
    total = hidden.double() + residual.double()
    check(add_rms_norm(hidden, residual, weight, EPS), norm_exactly(total, weight))


def test_large_numbers_do_not_overflow(backend: str, device: str) -> None:
    """The squares of float16's largest numbers need float32."""
    hidden = torch.full((1, 64), 60_000.0, dtype=torch.float16, device=device)
    weight = torch.ones(64, dtype=torch.float16, device=device)
    assert rms_norm(hidden, weight, EPS).tolist() == [[1.0] * 64]


# The gate.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner_size", [1, 100, 1024, 1400])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_silu_and_mul_agrees_with_float64(
    backend: str, device: str, dtype: torch.dtype, inner_size: int, num_tokens: int
) -> None:
    gate_up = 4 * draw(num_tokens, 2 * inner_size, dtype=dtype, device=device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check(silu_and_mul(gate_up), gate * gate.sigmoid() * up)


def test_large_gates_are_0_or_1(backend: str, device: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 3.0, 3.0, 3.0]], device=device)
    assert silu_and_mul(gate_up).tolist() == [[0.0, 3e4, 0.0]]


# Rotation and cache.


class Call:
    """A call with random numbers, and its expected result."""

    def __init__(
        self, num_tokens: int, heads: tuple[int, int], head_size: int, device: str, *,
        dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None, normed: bool = False,
        slots: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.head_size = heads, head_size
        width = (heads[0] + 2 * heads[1]) * head_size
        self.qkv = draw(num_tokens, width, dtype=dtype, device=device)
        shape = (8, 4, heads[1], head_size)
        self.caches = [torch.full(shape, -7.0, device=device).to(cache or dtype) for _ in "kv"]
        slots = [(5 * token + 3) % 32 for token in range(num_tokens)] if slots is None else slots
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        self.positions = torch.arange(num_tokens, device=device) * 7 % 20
        angles = torch.arange(20)[:, None] * 0.7 ** torch.arange(head_size // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(dtype).to(device)
        self.norms: dict[str, Any] = {}
        if normed:
            for seed, name in enumerate(("q_norm", "k_norm"), 1):
                self.norms[name] = draw(head_size, dtype=dtype, device=device, seed=seed)
            self.norms["eps"] = EPS

    def run(self, **scales: float) -> Tensor:
        keys, values = self.caches
        return rotate_and_cache(
            self.qkv, keys, values, self.slots, self.positions, self.cos_sin,
            **self.norms, **scales,
        )  # fmt: skip

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the expected query and key in float64, and the value unchanged."""
        parts = [count * self.head_size for count in (self.heads[0], *2 * [self.heads[1]])]
        found = []
        for x, name in zip(
            self.qkv.clone().split(parts, -1), ("q_norm", "k_norm", ""), strict=True
        ):
            x = x.unflatten(-1, (-1, self.head_size))
            if name in self.norms:
                x = norm_exactly(x, self.norms[name])
            if name:
                cos, sin = self.cos_sin[self.positions].double()[:, None].chunk(2, -1)
                left, right = x.double().chunk(2, -1)
                x = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
            found.append(x)
        return found[0], found[1], found[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_size"),
    [((2, 1), 16), ((4, 2), 80), ((32, 4), 64), ((1, 1), 256), ((9, 3), 128)],
)
def test_queries_are_rotated_and_keys_and_values_cached(
    backend: str, device: str, dtype: torch.dtype, normed: bool, heads: tuple[int, int],
    head_size: int,
) -> None:  # fmt: skip
    call = Call(3, heads, head_size, device, dtype=dtype, normed=normed)
    wanted_query, wanted_key, wanted_value = call.compute()
    query = call.run()
    assert query.data_ptr() == call.qkv.data_ptr()
    check(query, wanted_query)
    where = call.slots // 4, call.slots % 4
    check(call.caches[0][where], wanted_key)
    assert torch.equal(call.caches[1][where], wanted_value)
    untouched = torch.ones(8, 4, dtype=torch.bool)
    untouched[where[0].cpu(), where[1].cpu()] = False
    for cache in call.caches:
        assert cache.cpu()[untouched].float().unique().tolist() == [-7.0]


def test_padding_is_not_cached(backend: str, device: str) -> None:
    call = Call(4, (4, 2), 16, device, slots=[-1, 9, -1, 0])
    wanted_query, wanted_key, wanted_value = call.compute()
    check(call.run(), wanted_query)
    for cache, wanted in zip(call.caches, (wanted_key, wanted_value), strict=True):
        flat = cache.flatten(0, 1)
        check(flat[[9, 0]], wanted[[1, 3]].double())
        assert int((flat != -7.0).flatten(1).any(1).sum()) == 2


def test_a_call_without_tokens_has_an_empty_result(backend: str, device: str) -> None:
    assert Call(0, (4, 2), 16, device).run().shape == (0, 4, 16)


@pytest.mark.parametrize("cache", [FP8, torch.float16], ids=str)
def test_a_cache_of_another_dtype_equals_that_of_reshape_and_cache(
    backend: str, device: str, cache: torch.dtype
) -> None:
    call = Call(3, (4, 2), 16, device, cache=cache)
    scales = {"k_scale": 0.5, "v_scale": 4.0} if cache == FP8 else {}
    if cache == FP8:  # no rotation and few bits: the interpreter loses the carry when it rounds
        call.positions.zero_()
        call.qkv = call.qkv.to(FP8).float() * 2
        call.qkv[0, -16:] = 3000.0
    apart = [memory.clone() for memory in call.caches]
    _, key, value = call.compute()
    call.run(**scales)
    reshape_and_cache(key.float(), value, apart[0], apart[1], call.slots, **scales)
    for found, wanted in zip(call.caches, apart, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-3, atol=1e-6)


def test_an_infinite_value_is_cached_as_it_is(backend: str, device: str) -> None:
    """Values use the registers of keys, and must not be multiplied by an angle."""
    call = Call(1, (2, 1), 16, device)
    call.qkv[0, -16:] = torch.inf
    call.run()
    assert call.caches[1].flatten(0, 1)[call.slots[0]].tolist() == [[torch.inf] * 16]


def test_projection_and_caches_may_be_strided_views(backend: str, device: str) -> None:
    """The engine has a strided projection and strided views of one allocation."""
    call = Call(3, (4, 2), 16, device)
    wanted_query, wanted_key, wanted_value = call.compute()
    padded = torch.zeros(3, 8 * 16 + 48, device=device)
    padded[:, : 8 * 16] = call.qkv
    call.qkv = padded[:, : 8 * 16]
    memory = torch.zeros(8, 2, 4, 2, 16, device=device)
    call.caches = [memory[:, 0], memory[:, 1]]
    check(call.run(), wanted_query)
    where = call.slots // 4, call.slots % 4
    check(call.caches[0][where], wanted_key)
    assert torch.equal(call.caches[1][where], wanted_value)
    assert padded[:, 8 * 16 :].unique().tolist() == [0.0]


# Refusals.


def refuse(change: dict[str, Any]) -> None:
    call = Call(3, (4, 2), 16, "cpu", normed=True)
    arguments = {
        "qkv": call.qkv, "key_cache": call.caches[0], "value_cache": call.caches[1],
        "slot_mapping": call.slots, "positions": call.positions, "cos_sin": call.cos_sin,
        **call.norms,
    }  # fmt: skip
    rotate_and_cache(**{**arguments, **change})


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "width": (
        {"qkv": torch.zeros(3, 7 * 16 + 1)}, ValueError,
        r"qkv: its last dimension must be \(num_heads \+ 2 \* num_kv_heads\) \* head_size",
    ),
    "no query": ({"qkv": torch.zeros(3, 4 * 16)}, ValueError, "qkv: its last dimension must be"),
    "ids": ({"qkv": torch.zeros(3, 8 * 16).long()}, TypeError, "qkv: must be float32 or"),
    "positions": (
        {"positions": torch.tensor([0, 20, 1])}, ValueError,
        "positions: must hold positions in 0 <= x < 20, but holds 20",
    ),
    "slots": ({"slot_mapping": torch.tensor([0, 32, 1])}, ValueError, "slot_mapping: must hold"),
    "table": ({"cos_sin": torch.zeros(20, 8)}, ValueError, "cos_sin: dimension 1"),
    "table in rows": (
        {"cos_sin": torch.zeros(20, 32)[:, :16]}, ValueError, "cos_sin: must be contiguous",
    ),
    "one norm": ({"q_norm": None}, ValueError, "q_norm, k_norm: must be given together"),
    "norm": ({"k_norm": torch.zeros(8)}, ValueError, "k_norm: dimension 0"),
    "eps": ({"eps": 0.0}, ValueError, "eps: must be positive"),
    "scale": ({"k_scale": 2.0}, ValueError, "k_scale: must be 1 unless"),
    "head size": (
        {"key_cache": torch.zeros(8, 4, 2, 24), "value_cache": torch.zeros(8, 4, 2, 24),
         "cos_sin": torch.zeros(20, 24)}, ValueError, "key_cache: head_size must be one of",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_rotation_is_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        refuse(change)


def test_a_wrong_norm_or_gate_is_rejected() -> None:
    hidden, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="weight: dimension 0"):
        rms_norm(hidden, weight[:7], EPS)
    with pytest.raises(ValueError, match="eps: must be positive"):
        rms_norm(hidden, weight, -1.0)
    with pytest.raises(TypeError, match="residual: must be float32, but is float16"):
        add_rms_norm(hidden, hidden.half(), weight, EPS)
    with pytest.raises(ValueError, match="gate_up: its last dimension must be even"):
        silu_and_mul(torch.zeros(2, 7))
