"""Paged attention on one GPU: per cent of the copy rate, and how evenly its work is shared out.

    python benchmarks/attention.py [--only WORD] [--json FILE]
    python benchmarks/attention.py --variants [--only WORD] [--json FILE]
    python benchmarks/attention.py --partition

A decode must read each key and value once; its bound is the rate of a device-to-device copy (read
and write) of the same run, and the peak of the memory where it is known. A prefill is held against
torch's attention on contiguous KV. Times are those of calls in a CUDA graph, one after the other;
calls take turns at copies of the KV that together exceed the L2 cache, except for short ones, which
are bound by latency. The plan, which the layers of a step share, is made before and timed apart.
Heads: 32, 8 of KV, size 128, or as the case says; bfloat16, blocks of 16 in shuffled order.

`--variants` times other tilings. `--partition` needs no GPU: it prints tiles of keys per program,
mean and most, computed with the rule that the kernel follows. The others exit with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blockstep.kernels import make_attention_workspace, paged_attention, plan_attention
from blockstep.kernels import partition as rule

Run = Callable[[], object]
Lengths = Sequence[tuple[int, int]]
"""Tokens of this step and keys, those of this step included, for each request."""
Heads = tuple[int, int, int]
"""Heads, heads of KV, size of a head."""
HEADS: Heads = (32, 8, 128)
SMALL_HEADS: Heads = (32, 4, 64)
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
NUM_BYTES_ROTATED = 512 << 20
"""Bytes of KV that calls take turns at: ten times the L2 cache of an H200."""
PEAKS = {"H200": 4.8e12, "H100 80GB HBM3": 3.35e12}
"""Bytes per second of the memory, by a part of the device's name."""
NUM_PROCESSORS = 132
"""Number of streaming multiprocessors of an H100 or an H200."""
IMBALANCE_MAX = 1.15


@dataclass(frozen=True)
class Case:
    """A batch to time."""

    name: str
    lengths: Lengths
    aim: float
    kind: str = "copy"
    """Kind of `aim`: per cent of the `copy` rate, per cent of `sdpa`, or at most `us`
    microseconds."""
    heads: Heads = HEADS

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        _, num_kv_heads, head_size = self.heads
        slot = 2 * num_kv_heads * head_size * DTYPE.itemsize
        return int(sum(seq_len for _, seq_len in self.lengths) * slot)


def repeat(num_seqs: int, query_len: int, seq_len: int) -> Lengths:
    """Requests that are all alike."""
    return [(query_len, seq_len)] * num_seqs


CASES = [
    Case("decode 64 x 4096", repeat(64, 1, 4096), 90),
    Case("decode 256 x 1024", repeat(256, 1, 1024), 90),
    Case("decode 16 x 32768", repeat(16, 1, 32768), 90),
    Case("decode 40 x 8192", repeat(40, 1, 8192), 90),
    Case("decode 8 x 4096", repeat(8, 1, 4096), 75),
    Case("decode 1 x 32768", repeat(1, 1, 32768), 75),
    Case("decode 31 x 256 + 100000", [*repeat(31, 1, 256), (1, 100_000)], 75),
    Case("decode 1 x 500", repeat(1, 1, 500), 6.0, "us"),
    Case("decode 64 x 200, heads of 64", repeat(64, 1, 200), 7.0, "us", SMALL_HEADS),
    Case("8 drafts 1 x 30000", repeat(1, 9, 30000), 50),
    Case("prefill 4 x 2048", repeat(4, 2048, 2048), 60, "sdpa"),
    Case("prefill 1 x 8192", repeat(1, 8192, 8192), 60, "sdpa"),
    Case("prefill 512 behind 8192", repeat(1, 512, 8704), 60, "sdpa"),
]


class Inputs:
    """Arguments of a call, with distinct blocks in shuffled order."""

    def __init__(self, lengths: Lengths, device: str, seed: int = 0, heads: Heads = HEADS) -> None:
        self.heads = num_heads, num_kv_heads, head_size = heads
        draw = torch.Generator(device).manual_seed(seed)
        self.query_lens = [query_len for query_len, _ in lengths]
        self.lens = [seq_len for _, seq_len in lengths]
        counts = [-(-seq_len // BLOCK_SIZE) for seq_len in self.lens]
        order = torch.randperm(sum(counts), generator=draw, device=device, dtype=torch.int32)
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
        first = 0
        for row, count in enumerate(counts):
            self.tables[row, :count] = order[first : first + count]
            first += count
        shape = (len(order), BLOCK_SIZE, num_kv_heads, head_size)
        self.caches = [torch.randn(shape, generator=draw, device=device, dtype=DTYPE) for _ in "kv"]
        heads_shape = (sum(self.query_lens), num_heads, head_size)
        self.query = torch.randn(heads_shape, generator=draw, device=device, dtype=DTYPE)
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        self.starts = starts.to(device, torch.int32)
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32, device=device)
        self.out = torch.empty_like(self.query)
        self.workspace = make_attention_workspace(
            self.query, self.caches[0], max(counts) * BLOCK_SIZE
        )
        self.plan = self.make_plan()

    def make_plan(self) -> Any:
        """Return the plan that all layers of a step share."""
        return plan_attention(
            self.query, self.caches[0], self.starts, self.seq_lens,
            max_query_len=max(self.query_lens),
        )  # fmt: skip

    def run(self) -> Tensor:
        """Run our kernel."""
        return paged_attention(
            self.query, self.caches[0], self.caches[1], self.tables, self.starts, self.seq_lens,
            scale=self.heads[2] ** -0.5, max_query_len=max(self.query_lens), plan=self.plan,
            workspace=self.workspace, out=self.out,
        )  # fmt: skip

    def make_vllm(self) -> Run:
        """FlashAttention 3 as vLLM brings it, on the same cache and tables."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - a guest

        return lambda: flash_attn_varlen_func(
            q=self.query, k=self.caches[0], v=self.caches[1], max_seqlen_q=max(self.query_lens),
            cu_seqlens_q=self.starts, max_seqlen_k=max(self.lens), seqused_k=self.seq_lens,
            softmax_scale=self.heads[2] ** -0.5, causal=True, block_table=self.tables, fa_version=3,
        )  # fmt: skip

    def make_sdpa(self) -> Run:
        """torch's attention on contiguous KV; all requests must have the same lengths."""
        num_seqs, query_len, seq_len = len(self.lens), self.query_lens[0], self.lens[0]
        num_heads, num_kv_heads, head_size = self.heads
        shape = (num_seqs, -1, num_kv_heads, head_size)
        key, value = (
            cache[self.tables.long()].view(shape)[:, :seq_len].transpose(1, 2)
            for cache in self.caches
        )
        query = self.query.view(num_seqs, query_len, num_heads, head_size).transpose(1, 2)
        if query_len == 1:
            key, value = key.contiguous(), value.contiguous()
            return lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True)
        group = num_heads // num_kv_heads  # repeated beforehand: the fastest that torch has
        key, value = (x.repeat_interleave(group, 1).contiguous() for x in (key, value))
        if query_len == seq_len:
            return lambda: scaled_dot_product_attention(query, key, value, is_causal=True)
        from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415 - new in torch 2.3

        bias: Any = causal_lower_right(query_len, seq_len)
        return lambda: scaled_dot_product_attention(query, key, value, attn_mask=bias)


def measure(runs: Sequence[Run]) -> float:
    """Microseconds of one call, the calls being made in turn."""
    from triton.testing import do_bench_cudagraph  # noqa: PLC0415 - not on a CPU

    def run_all() -> None:
        for run in runs:
            run()

    median: float = do_bench_cudagraph(run_all, rep=10, return_mode="median")
    return 1e3 * median / len(runs)


def measure_copy_rate() -> float:
    """Bytes per second of a device copy, read and write."""
    from triton.testing import do_bench  # noqa: PLC0415 - not on a CPU

    num_bytes = 1 << 30
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # Not in a graph: there a copy is slower.
    median: float = do_bench(lambda: target.copy_(source), rep=100, return_mode="median")
    return 2 * num_bytes / median * 1e3


def make_turns(case: Case, device: str) -> list[Inputs]:
    """Inputs that together exceed the L2 cache."""
    large = case.kind == "copy"
    count = math.ceil(NUM_BYTES_ROTATED / case.num_bytes) if large else 1
    return [Inputs(case.lengths, device, seed, case.heads) for seed in range(count)]


def find_peak(name: str) -> float | None:
    """Return the rate of a device's memory, None if it is not known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def report(case: Case, copy_rate: float, peak: float | None) -> dict[str, Any]:
    """Time a case and torch's attention for comparison, and print a line."""
    turns = make_turns(case, "cuda")
    row: dict[str, Any] = {"name": case.name, "us": measure([turn.run for turn in turns])}
    row["plan_us"] = measure([turns[0].make_plan])
    words = [f"{case.name:<28} {row['us']:8.1f} us  plan {row['plan_us']:4.1f} us"]
    rate = case.num_bytes / (row["us"] * 1e-6)
    if case.kind == "copy":
        row["percent_of_copy"] = 100 * rate / copy_rate
        words.append(f"{row['percent_of_copy']:5.1f} % of copy")
        if peak is not None:
            row["percent_of_peak"] = 100 * rate / peak
            words.append(f"{row['percent_of_peak']:5.1f} % of peak")
    words += list(time_peers(turns, row))
    row["aim"] = f"{case.aim:g} us" if case.kind == "us" else f"{case.aim:g} % of {case.kind}"
    reached = row["us"] if case.kind == "us" else row.get(f"percent_of_{case.kind}")
    if reached is not None:
        row["met"] = reached <= case.aim if case.kind == "us" else reached >= case.aim
        words.append(f"aim {row['aim']}: {'met' if row['met'] else 'MISSED'}")
    print("  ".join(words), flush=True)
    return row


def time_peers(turns: Sequence[Inputs], row: dict[str, Any]) -> Iterator[str]:
    """Time those that do the same, note them in the row, and yield words for its line."""
    peers: dict[str, Callable[[Inputs], Run]] = {"vllm": Inputs.make_vllm}
    if len(set(zip(turns[0].query_lens, turns[0].lens, strict=True))) == 1:
        peers["sdpa"] = Inputs.make_sdpa
    for name, make in peers.items():
        try:
            out: Any = make(turns[0])()
            shape = (len(turns[0].lens), -1, turns[0].heads[0], turns[0].heads[2])
            expected = out.transpose(1, 2) if name == "sdpa" else out.view(shape)
            difference = float((turns[0].run().view(shape) - expected).abs().max())
            row[f"{name}_us"] = measure([make(turn) for turn in turns])
            row[f"percent_of_{name}"] = 100 * row[f"{name}_us"] / row["us"]
            row[f"{name}_differs_by"] = difference
            yield (
                f"{name} {row[f'{name}_us']:8.1f} us ({row[f'percent_of_{name}']:.0f} %, "
                f"differs by {difference:.4f})"
            )
        except Exception as error:  # a peer may be missing, or fail in any way
            row[f"{name}_failure"] = f"{type(error).__name__}: {error}"[:300]


# Variants.


def list_variants() -> dict[str, dict[str, Any]]:
    """Return variants by name: fields of the tiling, `few` or `many`, that the name begins with."""
    few, many = rule.FEW, rule.MANY
    return {
        "few chosen": {},
        "few 1 program": {"num_programs": 1},
        "few 3 programs, 2 stages": {"num_programs": 3, "num_stages": 2, "registers_max": 168},
        "few tile 32, 4 stages, 3 programs": {
            "tile": 32, "num_stages": 4, "num_programs": 3, "registers_max": 168,
        },
        "few 3 programs": {"num_programs": 3, "registers_max": 168},
        "few splits of 512": {"splits": few._replace(large=8)},
        "few splits of 1024": {"splits": few._replace(tiles=16)},
        "few splits of 2048": {"splits": few._replace(tiles=16, large=32)},
        "few 4 wanted": {"splits": few._replace(wanted=4)},
        "few merged by 4, 4 stages": {"num_merged_at_once": 4, "num_merge_stages": 4},
        "few merged by 8, 3 stages": {"num_merged_at_once": 8, "num_merge_stages": 3},
        "few merged by 1, 6 stages": {"num_merged_at_once": 1, "num_merge_stages": 6},
        "many chosen": {},
        "many tile 64": {"tile": 64},
        "many tile 64, 3 stages": {"tile": 64, "num_stages": 3},
        "many 3 stages": {"num_stages": 3},
        "many 64 rows, 4 warps, 2 programs": {
            "block_m": 64, "tile": 64, "num_warps": 4, "num_programs": 2,
        },
        "many at most 16 splits": {"splits": many._replace(most=16)},
    }  # fmt: skip


def use_variant(name: str) -> Any:
    """Return a context in which tilings are changed as `list_variants` says."""
    from blockstep.kernels import attention_triton  # noqa: PLC0415 - not everywhere

    kind, changes = name.split(maxsplit=1)[0], list_variants()[name]
    choose = attention_triton.choose_tilings

    def choose_changed(*args: int, is_fp8: bool = False) -> Any:
        tilings = choose(*args, is_fp8=is_fp8)
        return tilings._replace(**{kind: getattr(tilings, kind)._replace(**changes)})

    return patch.object(attention_triton, "choose_tilings", choose_changed)


def compile_variant(name: str) -> str:
    """Run a variant once, so that Triton's cache on disk has it; what went wrong, or nothing."""
    try:
        with use_variant(name):
            query_len = 1 if name.startswith("few") else 40
            Inputs(repeat(2, query_len, 600), "cuda").run()
            torch.cuda.synchronize()
    except Exception as error:  # more shared memory than there is, for example
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def report_variants(only: str, copy_rate: float) -> list[dict[str, Any]]:
    """Time each variant with the cases of its kind, and print a line for each."""
    names = list(list_variants())
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=8, mp_context=spawn) as pool:
        failures = dict(zip(names, pool.map(compile_variant, names), strict=True))
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if only not in case.name:
            continue
        print(f"{case.name}")
        is_few = max(query_len for query_len, _ in case.lengths) == 1
        for name in names:
            if name.startswith("few") != is_few:
                continue
            row: dict[str, Any] = {"case": case.name, "variant": name, "failure": failures[name]}
            rows.append(row)
            if failures[name]:
                print(f"    {name:<36} not measured: {failures[name]}"[:150])
                continue
            with use_variant(name):
                turns = make_turns(case, "cuda")
                row["us"] = measure([turn.run for turn in turns])
            percent = 100 * case.num_bytes / (row["us"] * 1e-6) / copy_rate
            print(f"    {name:<36} {row['us']:8.1f} us {percent:6.1f} % of copy", flush=True)
    return rows


# The partition.


@dataclass
class Shares:
    """Tiles of keys that each program of a launch computes."""

    name: str
    num_programs: int
    largest: int = 0
    """Tiles of the largest split."""
    tiles: list[int] = field(default_factory=list)
    """Number of tiles of each program."""

    @property
    def mean(self) -> float:
        """Tiles per program."""
        return sum(self.tiles) / self.num_programs

    @property
    def imbalance(self) -> float:
        """Return the most tiles of a program, by the mean."""
        return max(self.tiles) / self.mean

    @property
    def is_small(self) -> bool:
        """Return whether a single split more than the mean is already more than is aimed at."""
        return self.mean + self.largest > IMBALANCE_MAX * self.mean


def share_out(
    name: str, lengths: Lengths, tilings: Any, num_groups: int, num_programs: int, *, is_few: bool
) -> Shares:  # fmt: skip
    """Share out the splits of the requests that a launch serves, as its programs do."""
    partition: Any = rule  # its functions have no types, which Triton would not compile
    tiling = tilings.few if is_few else tilings.many
    block_q, tile, few_max = tiling.block_m // tilings.part, tiling.tile, tilings.few_max
    served = [(q, s) for q, s in lengths if q > 0 and (q <= few_max) == is_few]
    weights = [
        partition.weigh_query_tile(q, s, 0, 0, block_q, tile, is_few, has_limit=False)
        for q, s in served
    ]
    counts = [-(-q // block_q) * num_groups for q, _ in served]
    if partition.has_program_for_each(sum(counts), max(weights), num_programs, tiling.splits):
        weights = [1] * len(weights)
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    shares = Shares(name, num_programs, tiles=[0] * num_programs)
    before = 0
    for (query_len, seq_len), weight, count in zip(served, weights, counts, strict=True):
        num_query_tiles = -(-query_len // block_q)
        for index in range(count):
            local = partition.find_query_tile(index % num_query_tiles, num_query_tiles) * block_q
            last = seq_len - query_len + min(local + block_q, query_len)
            num_tiles = -(-last // tile)
            split_tiles = partition.choose_split_tiles(num_tiles, num_query_tiles, tiling.splits)
            num_splits = -(-num_tiles // split_tiles)
            shares.largest = max(shares.largest, split_tiles)
            first = before + index * weight
            program, split = first * num_programs // total, 0
            while split < num_splits:
                stop = partition.count_splits_before(
                    program + 1, first, weight, num_splits, total, num_programs
                )
                last_tile = min(num_tiles, stop * split_tiles)
                shares.tiles[program] += last_tile - split * split_tiles
                program, split = program + 1, stop
        before += count * weight
    return shares


def list_batches() -> Iterator[tuple[str, Lengths]]:
    """Yield the cases, and ragged batches drawn with fixed seeds."""
    yield from ((case.name, case.lengths) for case in CASES if case.heads == HEADS)
    draw = random.Random(0)  # noqa: S311 - not for secrets
    yield "decode, uniform to 8192, 64", [(1, draw.randint(1, 8192)) for _ in range(64)]
    yield "decode, uniform to 2048, 256", [(1, draw.randint(1, 2048)) for _ in range(256)]
    chat = [(1, min(32768, int(draw.lognormvariate(6.5, 1.2)) + 1)) for _ in range(256)]
    yield "decode, chats, 256", chat
    yield "decode, chats, 32", chat[:32]
    # Conversations with an assistant: a median of 7,000 tokens, and a long tail.
    long = [(1, min(125_000, int(draw.lognormvariate(8.9, 0.9)) + 200)) for _ in range(48)]
    yield "decode, conversations, 48", long
    yield "decode, conversations, 8", long[:8]
    yield "drafts of 3, chats, 64", [(4, seq_len + 3) for _, seq_len in chat[:64]]
    yield "prefill, chats, 16", [(seq_len + 8, seq_len + 8) for _, seq_len in chat[64:80]]
    chunks = [(min(seq_len, 1024), seq_len) for _, seq_len in long[:8]]
    yield "chunks of 1024, conversations, 8", chunks
    yield "mixed: 2 chunks among 62 chats", [*chat[80:142], *chunks[:2]]


def list_shares() -> Iterator[Shares]:
    """Yield how the launches of each batch are shared out on an H100."""
    from blockstep.kernels.attention_triton import choose_tilings  # noqa: PLC0415 - has Triton

    num_heads, num_kv_heads, head_size = HEADS
    tilings = choose_tilings(head_size, num_heads // num_kv_heads, DTYPE.itemsize)
    for name, lengths in list_batches():
        for kind, tiling in (("few", tilings.few), ("many", tilings.many)):
            is_few = kind == "few"
            if any((q <= tilings.few_max) == is_few for q, _ in lengths):
                yield share_out(
                    f"{name} ({kind})", lengths, tilings, num_kv_heads,
                    NUM_PROCESSORS * tiling.num_programs, is_few=is_few,
                )  # fmt: skip


def print_partition() -> None:
    """Print the table of shares."""
    print(f"{'batch (rows of queries)':<44} programs  tiles per program: mean   most   most/mean")
    for shares in list_shares():
        words = "too small to be even" if shares.is_small else ""
        print(
            f"{shares.name:<44} {shares.num_programs:8}  {shares.mean:23.1f} "
            f"{max(shares.tiles):6}   {shares.imbalance:9.3f}  {words}"
        )


def main() -> int:
    """Measure or print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="WORD", help="run cases with WORD in their name"
    )
    parser.add_argument("--variants", action="store_true", help="time other tilings")
    parser.add_argument("--partition", action="store_true", help="print shares of programs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.partition:
        print_partition()
        return 0
    if not torch.cuda.is_available():
        print(
            "benchmarks/attention.py: no CUDA device is available; only --partition runs "
            "without one",
            file=sys.stderr,
        )
        return 2
    device, copy_rate = torch.cuda.get_device_name(), measure_copy_rate()
    about: dict[str, Any] = {
        "device": device, "torch": torch.__version__, "triton": version("triton"),
        "copy_bytes_per_second": copy_rate,
    }  # fmt: skip
    print(f"{device}, torch {about['torch']}, copy {copy_rate / 1e9:.0f} GB/s", flush=True)
    if args.variants:
        rows = report_variants(args.only, copy_rate)
    else:
        cases = [case for case in CASES if args.only in case.name]
        rows = [report(case, copy_rate, find_peak(device)) for case in cases]
        print(f"{sum(row.get('met', False) for row in rows)} of {len(rows)} aims met")
    if args.json:
        args.json.write_text(json.dumps({**about, "cases": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
