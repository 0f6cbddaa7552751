"""RoPE: the angle by which each position rotates each pair of a head's components.

    pair i of a head: (x[i], x[i + head_size / 2]), rotated by position * inv_freq[i]

A variant changes `inv_freq`; yarn also scales the result:

| rope_type | angles |
|---|---|
| default | theta ** (-2 i / head_size) |
| linear  | all slower by `factor` |
| llama3  | long waves slower by `factor`, short ones unchanged, a ramp between (Llama 3.1) |
| yarn    | the same idea with a ramp over the number of turns (arXiv 2309.00071) |
| dynamic | as default, up to the length that the model was trained for |

Refused: `dynamic` past that length, because its angles depend on the length of the sequence, so
that KV in the cache would have other angles; `longrope` for the same reason; anything unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from blockstep.impl.engine.config_json import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True, slots=True)
class Rope:
    """One RoPE variant with its numbers."""

    head_size: int
    inv_freq: tuple[float, ...]
    """Radians per position, [head_size / 2]."""
    attention_factor: float = 1.0
    """Scale of the rotated queries and of the rotated keys."""
    max_model_len: int = 2048
    """Number of positions for which the angles are right."""

    def build_table(self, num_positions: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return the cosines of each position, then its sines: [num_positions, head_size].

        They are computed in float32 and rounded to `dtype`.
        """
        positions = torch.arange(num_positions, dtype=torch.float32)
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32)
        angles = positions[:, None] * inv_freq
        table = torch.cat((angles.cos(), angles.sin()), dim=1) * self.attention_factor
        return table.to(device=device, dtype=dtype)


def get_rope(fields: Fields, head_size: int, max_position_embeddings: int) -> Rope:
    """Return the RoPE variant of a `config.json`, in the older or the newer spelling.

    If both are given, `rope_scaling` is used. The original length is read from the top level first.
    As in transformers.

    Raises:
        CheckpointError: an unknown type, a missing or impossible number, or an odd head size.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    given = fields.get(name, {})
    if not isinstance(given, dict):
        raise fields.error(name, "must be an object")
    if any(isinstance(value, dict) for value in given.values()):
        raise fields.error(name, "angles per kind of layer are not supported: one set for all")
    numbers = Fields(fields.path, given, f"{name}.")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise fields.error(name, f"rope_type {kind!r} is not supported; use one of {ROPE_TYPES}")
    if head_size % 2:
        raise fields.error("head_dim", "must be even: RoPE turns pairs")
    for holder in (fields, numbers):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "must be 1: whole heads are turned")
    holder = fields if numbers.get("rope_theta") is None else numbers
    theta = holder.number("rope_theta", 10000.0, above=1.0)
    inv_freq = tuple(theta ** -(pair / head_size) for pair in range(0, head_size, 2))
    length, attention_factor = max_position_embeddings, 1.0
    holder = numbers if fields.get("original_max_position_embeddings") is None else fields
    original = holder.count("original_max_position_embeddings", length)
    if kind == "linear":
        factor = numbers.number("factor")
        inv_freq = tuple(freq / factor for freq in inv_freq)
        length = max(length, int(length * factor))
    elif kind == "llama3":
        inv_freq = _slow_llama3(inv_freq, numbers, original)
    elif kind == "yarn":
        factor = numbers.number("factor", length / original)
        inv_freq = _slow_yarn(inv_freq, theta, factor, numbers, original)
        attention_factor = _get_yarn_attention_factor(factor, numbers)
        length = max(length, int(original * factor))
    return Rope(head_size, inv_freq, attention_factor, length)


def _slow_llama3(inv_freq: tuple[float, ...], numbers: Fields, original: int) -> tuple[float, ...]:
    """Return Llama 3.1's angles: slower, unchanged or between, by the turns in the original
    length."""
    factor, low = numbers.number("factor"), numbers.number("low_freq_factor")
    high = numbers.number("high_freq_factor", above=low)
    slowed = []
    for freq in inv_freq:
        num_turns = original * freq / (2 * math.pi)
        kept = min(max((num_turns - low) / (high - low), 0.0), 1.0)
        slowed.append(kept * freq + (1 - kept) * freq / factor)
    return tuple(slowed)


def _slow_yarn(
    inv_freq: tuple[float, ...], theta: float, factor: float, numbers: Fields, original: int
) -> tuple[float, ...]:
    """Return yarn's angles: pairs with many turns unchanged, with few slower, a ramp between."""
    head_size = 2 * len(inv_freq)

    def find_pair(num_turns: float) -> float:
        """Return the (fractional) pair that makes `num_turns` turns over the original length."""
        return head_size * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first = find_pair(numbers.number("beta_fast", 32))
    last = find_pair(numbers.number("beta_slow", 1))
    if numbers.flag("truncate", default="truncate" not in numbers.data):  # null means False
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    width = last - first or 0.001
    slowed = []
    for pair, freq in enumerate(inv_freq):
        ramp = min(max((pair - first) / width, 0.0), 1.0)
        slowed.append((1 - ramp) * freq + ramp * freq / factor)
    return tuple(slowed)


def _get_yarn_attention_factor(factor: float, numbers: Fields) -> float:
    if numbers.get("attention_factor") is not None:
        return numbers.number("attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if numbers.get("mscale") and numbers.get("mscale_all_dim"):
        return scale(numbers.number("mscale")) / scale(numbers.number("mscale_all_dim"))
    return scale(1.0)
