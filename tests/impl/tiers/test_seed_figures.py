"""The worked figures of seed 002 (`002_784d0e11d4d20367.txt`), right ones and wrong ones.

A right figure tests our arithmetic. A wrong one is listed on the page on discrepancies with the
right figure, which these tests compute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from blockstep.impl.tiers import Costs, KVShape, Link, Prefill, Way

PAGE: Final = Path(__file__).parents[3] / "docs" / "explanation" / "discrepancies.md"
Number: TypeAlias = int | Fraction
KIB, MB, GB = 1 << 10, 10**6, 10**9
MILLI, MICRO, PERCENT = Fraction(1, 10**3), Fraction(1, 10**6), Fraction(1, 100)

# The shapes of its table: block_size=16, FP16.
LLAMA_70B = KVShape(num_layers=80, num_kv_heads=8, head_size=128, block_size=16, dtype_bytes=2)
MODELS = {
    "Llama 7B": replace(LLAMA_70B, num_layers=32, num_kv_heads=32),
    "Llama 13B": replace(LLAMA_70B, num_layers=40, num_kv_heads=40),
    "Llama 70B (GQA)": LLAMA_70B,
    "Mixtral 8x7B (GQA)": replace(LLAMA_70B, num_layers=32),
    "Llama 405B (GQA)": replace(LLAMA_70B, num_layers=126),
}
BLOCK = LLAMA_70B.block_bytes
ALL_HEADS = replace(LLAMA_70B, num_kv_heads=64)
TOKEN = LLAMA_70B.token_bytes_per_layer

# Its speeds, in bytes of 10^9 a second, as vendors count them.
PCIE_5, PCIE_4 = Link(28 * GB), Link(21 * GB)
NVME_READ, NVME_WRITE = Link(7 * GB), Link(5 * GB)
NVLINK = Link(450 * GB)
HBM_BYTES_PER_SECOND = 3_350 * GB
PREFILL = Prefill(tokens_per_second=4_000)
ONE_WAY = Costs(LLAMA_70B, None, PCIE_5, PREFILL)
BOTH_WAYS = Costs(LLAMA_70B, PCIE_5, PCIE_5, PREFILL)


def format_like(number: Number, stated: str) -> str:
    """Return the number with as many decimals as the figure of the seed."""
    decimals = len(stated.partition(".")[2])
    return f"{Decimal(round(Fraction(number) * 10**decimals)).scaleb(-decimals):,f}"


def time_block(link: Link) -> Fraction:
    """Return the milliseconds that a copy of a block of the 70B model takes."""
    return link.compute_copy_time(1, BLOCK) / MILLI


def time_swap(costs: Costs, num_tokens: int) -> Fraction:
    """Return milliseconds."""
    return costs.compute_swap_time(num_tokens) / MILLI


def time_recompute(num_tokens: int) -> Fraction:
    """Return milliseconds."""
    return BOTH_WAYS.compute_recompute_time(num_tokens) / MILLI


def count_more(link: Link) -> Fraction:
    """Return by how many percent a block takes longer than over NVLink."""
    return (time_block(link) / time_block(NVLINK) - 1) / PERCENT


def get_mean(numbers: list[Fraction]) -> Fraction:
    return sum(numbers, Fraction(0)) / len(numbers)


def list_waste(block_size: int) -> list[Fraction]:
    """Return the unused percent of the last block, for each number of tokens in it."""
    shape = replace(LLAMA_70B, block_size=block_size)
    every = range(1, block_size + 1)
    unused = [shape.count_blocks(tokens) * block_size - tokens for tokens in every]
    return [Fraction(tokens, block_size) / PERCENT for tokens in unused]


RIGHT: Final[dict[str, tuple[Number, str]]] = {
    "bytes of a block per layer": (LLAMA_70B.block_bytes_per_layer, "65,536"),
    "the same in KB, of 1,024": (Fraction(LLAMA_70B.block_bytes_per_layer, KIB), "64"),
    "bytes of a block in all layers": (BLOCK, "5,242,880"),
    "the same in MB, of 10^6": (Fraction(BLOCK, MB), "5.24"),
    "8 of 64 heads, percent": (Fraction(BLOCK, ALL_HEADS.block_bytes) / PERCENT, "12.5"),
    "64 heads for 8, times per layer": (
        Fraction(ALL_HEADS.block_bytes_per_layer, LLAMA_70B.block_bytes_per_layer),
        "8",
    ),
    "layers of 70B by those of 7B": (
        Fraction(LLAMA_70B.num_layers, MODELS["Llama 7B"].num_layers),
        "2.5",
    ),
    "2,048 blocks of 70B, GB": (Fraction(2_048 * BLOCK, GB), "10.7"),
    "weights of 70B in INT4, GB": (Fraction(70 * GB, 2 * GB), "35"),
    "tokens in 8,206 blocks": (8_206 * LLAMA_70B.block_size, "131,296"),
    "a watermark of 1 % of 8,206": (8_206 * 1 // 100, "82"),
    "the same of the blocks that fit": (LLAMA_70B.count_fitting(43 * GB) // 100, "82"),
    "one of the two directions of NVLink, GB/s": (900 // 2, "450"),
    "blocks of 4,096 tokens": (LLAMA_70B.count_blocks(4_096), "256"),
    "blocks of a sequence of 100 tokens": (LLAMA_70B.count_blocks(100), "7"),
    "64 tokens, swapped one way, ms": (time_swap(ONE_WAY, 64), "0.7"),
    "64 tokens, computed again, ms": (time_recompute(64), "16"),
    "256 tokens, computed again, ms": (time_recompute(256), "64"),
    "1,024 tokens, computed again, ms": (time_recompute(1_024), "256"),
    "4,096 tokens, computed again, ms": (time_recompute(4_096), "1,024"),
    "16,384 tokens, computed again, ms": (time_recompute(16_384), "4,096"),
    "a block's bytes at the speed of HBM, us": (
        Fraction(BLOCK, HBM_BYTES_PER_SECOND) / MICRO,
        "1.6",
    ),
    "waste with a block size of 1, percent": (max(list_waste(1)), "0"),
    "15 tokens by 65,536 bytes, KB": (Fraction(15 * 65_536, KIB), "960"),
    "memory of 8,206 blocks, GB": (Fraction(8_206 * BLOCK, GB), "43.0"),
    "blocks of its serving session": (6_200 + 1_500 + 82 + 424, "8,206"),
    "free on the GPU behind alloc(100 tokens)": (1_024 - LLAMA_70B.count_blocks(100), "1,017"),
    "free on the CPU behind the offload": (2_048 - LLAMA_70B.count_blocks(100), "2,041"),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_figure_of_seed_002_is_right(what: str) -> None:
    exact, stated = RIGHT[what]
    assert format_like(exact, stated) == stated


@pytest.mark.parametrize(
    ("model", "bytes_per_layer", "megabytes"),
    [
        ("Llama 7B", "262,144", "8.39"),
        ("Llama 13B", "327,680", "13.11"),
        ("Llama 70B (GQA)", "65,536", "5.24"),
        ("Mixtral 8x7B (GQA)", "65,536", "2.10"),
        ("Llama 405B (GQA)", "65,536", "8.26"),
    ],
)
def test_block_sizes_equal_those_in_the_table_of_seed_002(
    model: str, bytes_per_layer: str, megabytes: str
) -> None:
    shape = MODELS[model]
    assert format_like(shape.block_bytes_per_layer, bytes_per_layer) == bytes_per_layer
    assert format_like(Fraction(shape.block_bytes, MB), megabytes) == megabytes


def test_one_decode_step_in_sixteen_allocates_a_block() -> None:
    # "15 out of 16 decode iterations are allocation-free."
    held = [LLAMA_70B.count_blocks(num_tokens) for num_tokens in range(100, 100 + 16 * 50 + 1)]
    steps = [after - before for before, after in pairwise(held)]
    assert set(steps) == {0, 1}
    assert sum(steps) * 16 == len(steps)


def test_less_than_a_ten_thousandth_of_gpu_memory_is_wasted() -> None:
    # "Under 0.01% of an 80 GB GPU": so it is, though the bytes are of one layer only.
    assert 15 * TOKEN * LLAMA_70B.num_layers < 80 * GB / 10_000


def test_swapping_wins_at_every_length_of_its_table() -> None:
    for costs in (ONE_WAY, BOTH_WAYS):
        chosen = [costs.choose(length) for length in (64, 256, 1_024, 4_096, 16_384)]
        assert set(chosen) == {Way.SWAP}


@dataclass(frozen=True)
class Wrong:
    """A wrong figure of the seed, the exact value, and the right figure."""

    stated: str
    exact: Number
    right: str


FITTING = LLAMA_70B.count_fitting(43 * GB)
PCIE_5_BYTES_PER_SECOND = Fraction(32 * GB * 16 * 128, 130 * 8)
"""32 GT/s on 16 lanes, 128 bits of 130: one direction."""
CALLS = replace(PCIE_5, ns_per_block=80 * 10_000)
"""A copy of 10 us for each layer of each block."""
SETUP = replace(PCIE_5, ns_per_copy=29 * 10**6)

WRONG: Final[dict[str, Wrong]] = {
    "blocks in 43 GB": Wrong("8,206", FITTING, "8,201"),
    "tokens in them": Wrong("131,296", FITTING * 16, "131,216"),
    "PCIe Gen5 x16, one direction, GB/s": Wrong("32", PCIE_5_BYTES_PER_SECOND / GB, "63"),
    "PCIe Gen5 x16, both, GB/s": Wrong("63", 2 * PCIE_5_BYTES_PER_SECOND / GB, "126"),
    "a block over PCIe Gen5, ms": Wrong("0.183", time_block(PCIE_5), "0.187"),
    "the same in its summary, ms": Wrong("0.18", time_block(PCIE_5), "0.19"),
    "a block over PCIe Gen4, ms": Wrong("0.244", time_block(PCIE_4), "0.250"),
    "a block read from NVMe, ms": Wrong("0.731", time_block(NVME_READ), "0.749"),
    "a block written to NVMe, ms": Wrong("0.731", time_block(NVME_WRITE), "1.049"),
    "a block over NVLink, ms": Wrong("0.011", time_block(NVLINK), "0.012"),
    "PCIe Gen5 by NVLink, percent more": Wrong("1563.6", count_more(PCIE_5), "1,507.1"),
    "PCIe Gen4 by NVLink, percent more": Wrong("2118.2", count_more(PCIE_4), "2,042.9"),
    "NVMe by NVLink, percent more": Wrong("6545.5", count_more(NVME_READ), "6,328.6"),
    "256 tokens, one way, ms": Wrong("2.9", time_swap(ONE_WAY, 256), "3.0"),
    "1,024 tokens, one way, ms": Wrong("11.7", time_swap(ONE_WAY, 1_024), "12.0"),
    "4,096 tokens, one way, ms": Wrong("46.8", time_swap(ONE_WAY, 4_096), "47.9"),
    "4,096 tokens, out and back, ms": Wrong("46.8", time_swap(BOTH_WAYS, 4_096), "95.9"),
    "16,384 tokens, one way, ms": Wrong("187", time_swap(ONE_WAY, 16_384), "192"),
    "swapping ahead of computing, one way, times": Wrong(
        "22", time_recompute(4_096) / time_swap(ONE_WAY, 4_096), "21"
    ),
    "swapping ahead of computing, out and back, times": Wrong(
        "22", time_recompute(4_096) / time_swap(BOTH_WAYS, 4_096), "11"
    ),
    "break-even, tokens": Wrong("256", BOTH_WAYS.get_break_even() or 0, "2"),
    "break-even with 10 us for each layer of a block, tokens": Wrong(
        "256", replace(BOTH_WAYS, out=CALLS, back=CALLS).get_break_even() or 0, "8"
    ),
    "break-even with 29 ms for each copy, tokens": Wrong(
        "256", replace(BOTH_WAYS, out=SETUP, back=SETUP).get_break_even() or 0, "258"
    ),
    "tokens computed in 50 ms": Wrong("long", Fraction(50, 1_000) * 4_000, "200"),
    "tokens computed in 200 ms": Wrong("long", Fraction(200, 1_000) * 4_000, "800"),
    "copy of a block inside the GPU, us": Wrong(
        "1.6", 2 * Fraction(BLOCK, HBM_BYTES_PER_SECOND) / MICRO, "3.1"
    ),
    "worst waste, block size 8, percent": Wrong("43.75", max(list_waste(8)), "87.50"),
    "worst waste, block size 16, percent": Wrong("46.88", max(list_waste(16)), "93.75"),
    "worst waste, block size 32, percent": Wrong("48.44", max(list_waste(32)), "96.88"),
    "worst waste, block size 64, percent": Wrong("49.22", max(list_waste(64)), "98.44"),
    "mean waste of a block of 16, tokens": Wrong(
        "8", get_mean(list_waste(16)) * PERCENT * 16, "7.5"
    ),
    "copy per layer, block size 1, KB": Wrong("64", Fraction(TOKEN, KIB), "4"),
    "copy per layer, block size 8, KB": Wrong("512", Fraction(8 * TOKEN, KIB), "32"),
    "copy per layer, block size 16, KB": Wrong("1,024", Fraction(16 * TOKEN, KIB), "64"),
    "copy per layer, block size 32, KB": Wrong("2,048", Fraction(32 * TOKEN, KIB), "128"),
    "copy per layer, block size 64, KB": Wrong("4,096", Fraction(64 * TOKEN, KIB), "256"),
    "15 unused tokens in all layers, KB": Wrong(
        "960", Fraction(15 * TOKEN * LLAMA_70B.num_layers, KIB), "4,800"
    ),
    "15 unused tokens in one layer, KB": Wrong("960", Fraction(15 * TOKEN, KIB), "60"),
    "memory pressure of its session, percent": Wrong(
        "94.8", Fraction(6_200 + 82, 8_206) / PERCENT, "76.6"
    ),
    "bytes of a block in its own class": Wrong(
        "65,536", KVShape(4, 8, 64, 16, 2).block_bytes, "131,072"
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_figure_of_seed_002_is_wrong_and_the_right_one_is_on_the_page(what: str) -> None:
    one = WRONG[what]
    assert format_like(one.exact, one.right) == one.right
    assert one.stated != one.right
    assert list_rows().get(what) == (one.stated, one.right)


def list_rows() -> dict[str, tuple[str, str]]:
    """Return the rows of the page: for each figure, the stated one and the right one."""
    page = PAGE.read_text()
    section = page.partition("\n## Figures of the block manager\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
    return {what: (stated, right) for what, stated, right in rows if what != "figure"}


def test_the_page_has_no_other_figures() -> None:
    assert {*list_rows()} - {"---"} == {*WRONG}


def test_the_worst_percentages_of_the_seed_are_means() -> None:
    for block_size, stated in ((8, "43.75"), (16, "46.88"), (32, "48.44"), (64, "49.22")):
        assert format_like(get_mean(list_waste(block_size)), stated) == stated


def test_the_block_count_of_the_seed_exceeds_the_memory() -> None:
    assert 8_206 * BLOCK > 43 * GB >= FITTING * BLOCK
    assert 43 * GB // 5_240_000 == 8_206  # a block's size that was rounded down


def test_a_fast_engine_recomputes_rather_than_swaps() -> None:
    """The limit at 28 GB/s each way is 16 tokens in the time that a block takes out and back."""
    quick = [replace(BOTH_WAYS, prefill=Prefill(rate)) for rate in (42_724, 42_725)]
    assert quick[0].get_break_even() is not None
    assert quick[1].get_break_even() is None
