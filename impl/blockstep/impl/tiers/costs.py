"""Costs: the size of a block, the time to move it, and when computing it again is cheaper.

    preempted request     swap       | out ...... |   others run   | back ...... |
                          recompute  |                others run   | prefill ............... |

Inputs are whole numbers; results are whole numbers and fractions, and nothing is rounded. Units
are in the names: bytes, bytes per second (a GB/s is 10^9 bytes per second), nanoseconds. Times are
fractions of a second; use `float(...)` to print them. Source: seed 002 "Physical Memory Layout of
a Single Block", "Transfer Latency Math", "Preemption Strategies: Swap vs Recompute"; where its
figures are wrong the page on discrepancies has the right ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from fractions import Fraction
from math import floor
from typing import Final, TypeAlias

Seconds: TypeAlias = Fraction
NS_PER_SECOND: Final = 10**9


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the KV of a token: keys and values of `num_kv_heads` heads in each layer.

    `num_layers` counts the layers of a block: all of a model whose layers are one KV group.

    Raises:
        ValueError: a field is no whole number, or below 1.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        _require(self, **{field.name: 1 for field in fields(self)})

    @property
    def token_bytes_per_layer(self) -> int:
        """Bytes of a token in one layer: a key and a value for each head."""
        return self.num_kv_heads * self.head_size * 2 * self.dtype_bytes

    @property
    def block_bytes_per_layer(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_size * self.token_bytes_per_layer

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.block_bytes_per_layer

    def count_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens; the last may be partly filled."""
        return -(-num_tokens // self.block_size)

    def count_fitting(self, memory_bytes: int) -> int:
        """Return the number of blocks that fit into the memory, including the null block."""
        return memory_bytes // self.block_bytes


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between two memories.

    Raises:
        ValueError: a field is no whole number; no speed, or a latency below 0.
    """

    bytes_per_second: int
    ns_per_copy: int = 0
    """Time before the first byte moves, once for each copy."""
    ns_per_block: int = 0
    """Time for each block in addition to its bytes, such as a call for each block."""

    def __post_init__(self) -> None:
        _require(self, bytes_per_second=1, ns_per_copy=0, ns_per_block=0)

    @property
    def setup_time(self) -> Seconds:
        """Time before the first byte of a copy moves."""
        return Fraction(self.ns_per_copy, NS_PER_SECOND)

    def compute_block_time(self, block_bytes: int) -> Seconds:
        """Return the time that each block of a copy takes."""
        moved = Fraction(block_bytes, self.bytes_per_second)
        return moved + Fraction(self.ns_per_block, NS_PER_SECOND)

    def compute_copy_time(self, num_blocks: int, block_bytes: int) -> Seconds:
        """Return the time of one copy of `num_blocks` blocks; 0 for no blocks."""
        per_block = self.compute_block_time(block_bytes)
        return self.setup_time + num_blocks * per_block if num_blocks else Fraction(0)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Speed at which an engine computes KV that it has lost.

    Raises:
        ValueError: a field is no whole number; no speed, or a latency below 0.
    """

    tokens_per_second: int
    ns_per_prefill: int = 0
    """Time for each prefill in addition to its tokens."""

    def __post_init__(self) -> None:
        _require(self, tokens_per_second=1, ns_per_prefill=0)

    @property
    def setup_time(self) -> Seconds:
        """Time of a prefill in addition to its tokens."""
        return Fraction(self.ns_per_prefill, NS_PER_SECOND)

    def compute_time(self, num_tokens: int) -> Seconds:
        """Return the time to compute `num_tokens` tokens; 0 for no tokens."""
        per_token = Fraction(1, self.tokens_per_second)
        return self.setup_time + num_tokens * per_token if num_tokens else Fraction(0)


class Way(StrEnum):
    """The two ways to restore the KV of a preempted request."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class SwapSpeeds:
    """Speeds measured on a machine (`benchmarks/links.py`), for a model of any shape."""

    out: Link | None
    """The link out, as in `Costs`."""
    back: Link
    prefill: Prefill

    def get_break_even(self, block_bytes: int, block_size: int) -> int | None:
        """Return `Costs.get_break_even` for blocks of these numbers of bytes and tokens."""
        shape = KVShape(1, 1, block_bytes // (2 * block_size), block_size, 1)
        return Costs(shape, self.out, self.back, self.prefill).get_break_even()


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of preempting and resuming a request, by swap or by computing again.

    A swap moves whole blocks out and back; seed 002 counts the way back only.
    """

    shape: KVShape
    out: Link | None
    """None if the blocks are in the lower tier already, because the store saves blocks while
    requests run."""
    back: Link
    prefill: Prefill

    def compute_swap_time(self, num_tokens: int) -> Seconds:
        """Return the time to move the blocks of `num_tokens` tokens out and back."""
        num_blocks, size = self.shape.count_blocks(num_tokens), self.shape.block_bytes
        return _add(link.compute_copy_time(num_blocks, size) for link in self._links)

    def compute_recompute_time(self, num_tokens: int) -> Seconds:
        """Return the time to compute `num_tokens` tokens again."""
        return self.prefill.compute_time(num_tokens)

    def choose(self, num_tokens: int) -> Way:
        """Return the cheaper way for `num_tokens` tokens; at equal cost RECOMPUTE, which takes no
        memory of a lower tier."""
        is_cheaper = self.compute_swap_time(num_tokens) < self.compute_recompute_time(num_tokens)
        return Way.SWAP if is_cheaper else Way.RECOMPUTE

    def get_break_even(self) -> int | None:
        """Return the number of tokens from which swapping is always cheaper; None if it never is.

        The cost of computing grows with each token, the cost of moving with each block, so the
        choice may change several times just below this number:

            lead of swapping     /|  /|  /      it falls by a block's time where a block begins,
                             ___/_|_/_|_/__     and rises by a token's with each token in it
                               /  |/  |/ ^ from here on it is above 0
                              /   /   /
        """
        token, block_size = Fraction(1, self.prefill.tokens_per_second), self.shape.block_size
        block = _add(link.compute_block_time(self.shape.block_bytes) for link in self._links)
        handicap = _add(link.setup_time for link in self._links) - self.prefill.setup_time
        gain = block_size * token - block  # with each full block
        lead = token - block - handicap  # at the first token
        if gain < 0 or (gain == 0 and lead <= 0):
            return None
        if lead > 0:
            return 1
        num_dips = floor(-lead / gain) + 1  # blocks at whose first token swapping does not lead
        leads_in_last_from = floor((handicap + num_dips * block) / token) + 1
        return min(leads_in_last_from, num_dips * block_size + 1)

    @property
    def _links(self) -> tuple[Link, ...]:
        return (self.back,) if self.out is None else (self.out, self.back)


def _add(times: Iterable[Seconds]) -> Seconds:
    return sum(times, Fraction(0))


def _require(numbers: object, **least: int) -> None:
    """Raise ValueError unless each named field is an int and at least the given bound."""
    for name, bound in least.items():
        value = getattr(numbers, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < bound:
            raise ValueError(f"{name} = {value!r}: must be a whole number, {bound} or more")
