"""The kernels on one GPU: time, percent of a bound measured in the same run, and peers.

    python benchmarks/kernels.py [--only WORD] [--json FILE or folder]
    python benchmarks/kernels.py --tilings

Bounds: what a device-to-device copy of 1 GiB reaches (read + write), what a pinned copy reaches
over the link, or nothing for what is bound by its launch. Times are of the device, median and 99th
percentile, with the L2 cache flushed before each run (`triton.testing.do_bench`). What is bound by
its launch is replayed from CUDA graphs of many runs, with the L2 cache as it is; the percentile is
of ten means then. A peer that cannot run is listed with its reason. In a folder the file is named
by date and device. `--tilings` times the decodes under other tilings than the one that is chosen,
which nobody has tuned. Without a GPU this says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention

from blockstep.kernels import (
    copy_blocks,
    gather_blocks,
    paged_attention,
    prepare_step,
    rejection_sample,
    reshape_and_cache,
)

Run = Callable[[], object]


@dataclass
class Case:
    """Something to time, and what it is held against."""

    name: str
    run: Run
    bound: str
    """`copy`, `link` or `launch`."""
    good: str
    """What is aimed at on an H100, for the reader of the table."""
    num_bytes: int = 0
    """Bytes that must be moved at least: reads and writes for `copy`, one way for `link`."""
    peers: dict[str, Callable[[], Run]] = field(default_factory=dict)
    """Each makes its own inputs; so one that does not exist here harms no other."""


@dataclass
class Size:
    """How large the cases are; the small one is for a test of this file."""

    num_seqs: int = 64
    context: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    num_tokens: int = 32768
    num_rows: int = 1024
    vocab_size: int = 131_072
    num_copied: int = 1024
    num_swapped: int = 256
    dtype: torch.dtype = torch.bfloat16


BLOCK_SIZE = 16


class Decode:
    """A token of each sequence over distinct blocks in shuffled order, and over contiguous KV."""

    def __init__(self, size: Size, num_seqs: int, context: int, device: str) -> None:
        self.size, self.context = size, context
        shape = (num_seqs, context, size.num_kv_heads, size.head_size)
        self.key, self.value = (torch.randn(shape, dtype=size.dtype, device=device) for _ in "kv")
        heads = (num_seqs, size.num_heads, size.head_size)
        self.query = torch.randn(heads, dtype=size.dtype, device=device)
        per_seq = -(-context // BLOCK_SIZE)
        order = torch.randperm(num_seqs * per_seq, device=device)
        self.tables = order.view(num_seqs, per_seq).int()
        blocks = (order.numel(), BLOCK_SIZE, *shape[2:])
        self.caches = [torch.zeros(blocks, dtype=size.dtype, device=device) for _ in "kv"]
        position = torch.arange(context, device=device)
        slots = self.tables[:, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        key, value = (tensor.view(-1, *shape[2:]) for tensor in (self.key, self.value))
        reshape_and_cache(key, value, self.caches[0], self.caches[1], slots.view(-1))
        self.starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self.lens = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
        self.scale = size.head_size**-0.5
        self.num_bytes = self.key.nbytes + self.value.nbytes

    def run(self) -> object:
        """Ours."""
        return paged_attention(
            self.query, self.caches[0], self.caches[1], self.tables, self.starts, self.lens,
            scale=self.scale, max_query_len=1, max_seq_len=self.context,
        )  # fmt: skip

    def make_sdpa(self) -> Run:
        """torch's attention on contiguous KV: what paging costs."""
        query, key, value = self.query[:, :, None], self.key.transpose(1, 2), self.value
        return lambda: scaled_dot_product_attention(
            query, key, value.transpose(1, 2), enable_gqa=True
        )

    def make_vllm(self) -> Run:
        """FlashAttention 3 as vLLM brings it, on our cache and tables."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - a guest

        return lambda: flash_attn_varlen_func(
            q=self.query, k=self.caches[0], v=self.caches[1], max_seqlen_q=1,
            cu_seqlens_q=self.starts, max_seqlen_k=self.context, seqused_k=self.lens,
            softmax_scale=self.scale, causal=True, block_table=self.tables, fa_version=3,
        )  # fmt: skip

    def make_flashinfer(self) -> Run:
        """FlashInfer on our cache and tables; its plan is made beforehand and not timed."""
        import flashinfer  # noqa: PLC0415 - a guest

        size, per_seq, device = self.size, self.tables.shape[1], self.query.device
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        last = (self.lens - 1) % BLOCK_SIZE + 1
        wrapper.plan(
            self.starts * per_seq, self.tables.flatten(), last, size.num_heads, size.num_kv_heads,
            size.head_size, BLOCK_SIZE, q_data_type=size.dtype, kv_data_type=size.dtype,
        )  # fmt: skip
        return lambda: wrapper.run(self.query, tuple(self.caches))


def make_flex(size: Size, device: str) -> Run:
    """torch's flex_attention over its own page table; pages of 128, which its kernel wants."""
    # Slow to import, and not in every release.
    from torch.nn.attention import flex_attention as flex  # noqa: PLC0415
    from torch.nn.attention.experimental._paged_attention import PagedAttention  # noqa: PLC0415

    page, num_seqs, context = 128, size.num_seqs, size.context
    num_pages = num_seqs * -(-context // page)
    paged = PagedAttention(num_pages, page, num_seqs, device=device)
    paged.empty_pages = torch.randperm(num_pages).tolist()
    for seq in range(num_seqs):
        paged.reserve(torch.tensor([seq], device=device), torch.tensor([context], device=device))
    shape = (1, size.num_kv_heads, num_pages * page, size.head_size)
    key, value = (torch.randn(shape, dtype=size.dtype, device=device) for _ in range(2))
    query = torch.randn(
        num_seqs, size.num_heads, 1, size.head_size, dtype=size.dtype, device=device
    )
    logical = flex.create_block_mask(
        flex.noop_mask, num_seqs, 1, 1, context, device, BLOCK_SIZE=(128, page)
    )
    mask = paged.convert_logical_block_mask(logical)
    compiled = torch.compile(flex.flex_attention)
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True)


def list_cases(size: Size, device: str) -> Iterator[Case]:
    """Every case, made when it is its turn: they do not fit a device all at once."""
    decode = Decode(size, size.num_seqs, size.context, device)
    yield Case(
        f"decode {size.num_seqs} x {size.context}", decode.run, "copy", "80 %", decode.num_bytes,
        {
            "SDPA, contiguous": decode.make_sdpa, "FlashAttention 3 of vLLM": decode.make_vllm,
            "FlashInfer": decode.make_flashinfer,
            "flex_attention, paged": partial(make_flex, size, device),
        },
    )  # fmt: skip
    decode = Decode(size, 1, 500, device)
    yield Case(
        "decode 1 x 500", decode.run, "launch", "8 us",
        peers={
            "SDPA, contiguous": decode.make_sdpa, "FlashAttention 3 of vLLM": decode.make_vllm,
        },
    )  # fmt: skip
    yield from list_copies(size, device)
    rows = torch.arange(size.num_rows, device=device)
    ones = torch.ones(size.num_rows, dtype=torch.int32, device=device)
    computed = ones * 4000
    tables = torch.zeros(size.num_rows, 256, dtype=torch.int32, device=device)
    gathered = torch.zeros_like(tables)
    yield Case(
        f"prepare_step {size.num_rows}",
        lambda: prepare_step(
            tables, computed, ones, BLOCK_SIZE, row_indices=rows, num_tokens=size.num_rows,
            out_block_tables=gathered,
        ),
        "launch", "8 us",
    )  # fmt: skip
    num_drafts = 3
    logits = torch.randn(64 * (num_drafts + 1), size.vocab_size, dtype=size.dtype, device=device)
    starts = torch.arange(0, 65 * num_drafts, num_drafts, dtype=torch.int32, device=device)
    seeds = torch.arange(64, device=device)
    greedy = {"temperature": torch.zeros(64, device=device), "seeds": seeds, "positions": seeds}
    drafts = torch.zeros(64 * num_drafts, dtype=torch.int64, device=device)
    yield Case(
        "rejection_sample greedy 64 x 4",
        lambda: rejection_sample(logits, drafts, starts, max_num_drafts=num_drafts, **greedy),
        "copy", "67 %", logits.nbytes,
        {"argmax": lambda: partial(logits.argmax, -1)},
    )  # fmt: skip


def list_copies(size: Size, device: str) -> Iterator[Case]:
    """What only moves bytes."""
    shape = (size.num_tokens, size.num_kv_heads, size.head_size)
    key, value = (torch.randn(shape, dtype=size.dtype, device=device) for _ in range(2))
    cache = torch.zeros(size.num_tokens // BLOCK_SIZE, BLOCK_SIZE, *shape[1:], dtype=size.dtype,
                        device=device)  # fmt: skip
    other = torch.zeros_like(cache)
    slots = torch.randperm(size.num_tokens, device=device)
    yield Case(
        f"reshape_and_cache {size.num_tokens}",
        lambda: reshape_and_cache(key, value, cache, other, slots),
        "copy", "2400 GB/s", 4 * key.nbytes,
        {"index_copy": lambda: lambda: (cache.view(shape).index_copy_(0, slots, key),
                                        other.view(shape).index_copy_(0, slots, value))},
    )  # fmt: skip
    blocks = torch.zeros(2 * size.num_copied, 64 * 1024, dtype=torch.bfloat16, device=device)
    order = torch.randperm(2 * size.num_copied, device=device)
    pairs = order.view(-1, 2).contiguous()
    num_bytes = 2 * size.num_copied * blocks.shape[1] * blocks.element_size()
    yield Case(
        f"copy_blocks {size.num_copied} x 128 KiB, independent",
        lambda: copy_blocks([blocks], pairs, independent=True), "copy", "2500 GB/s",
        num_bytes,
    )  # fmt: skip
    yield Case(
        f"copy_blocks {size.num_copied} x 128 KiB, in sequence",
        lambda: copy_blocks([blocks], pairs), "copy", "no aim: order costs",
        num_bytes,
    )  # fmt: skip
    for kib in (64, 2048):
        swapped = torch.zeros(size.num_swapped, kib * 512, dtype=torch.bfloat16, device=device)
        staging = torch.zeros_like(swapped, device="cpu")
        staging = staging.pin_memory() if device == "cuda" else staging
        # Where each of the two ways wants them: the kernel on the device, copies on the host.
        ids = torch.randperm(size.num_swapped, device=device if kib == 64 else "cpu")
        yield Case(
            f"gather_blocks {size.num_swapped} x {kib} KiB to the host",
            partial(gather_blocks, swapped, ids, staging), "link",
            "45 GB/s" if kib == 64 else "50 GB/s", staging.nbytes,
        )  # fmt: skip


def measure(run: Run, bound: str) -> tuple[float, float]:
    """Median and 99th percentile, microseconds."""
    from triton.testing import do_bench, do_bench_cudagraph  # noqa: PLC0415 - not on a CPU

    if bound == "launch":
        median, tail = do_bench_cudagraph(run, rep=20, quantiles=[0.5, 0.99])
    else:
        median, tail = do_bench(run, rep=200, quantiles=[0.5, 0.99])
    return 1e3 * median, 1e3 * tail


def measure_rates() -> dict[str, float]:
    """Bytes per second of a device copy (read + write) and of a pinned copy to the host."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target, host = torch.empty_like(source), torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    copied, _ = measure(lambda: target.copy_(source), "copy")
    sent, _ = measure(lambda: host.copy_(source[: host.numel()], non_blocking=True), "link")
    return {"copy": 2 * source.numel() / copied * 1e6, "link": host.numel() / sent * 1e6}


def report(case: Case, rates: dict[str, float]) -> dict[str, Any]:
    """Time a case and its peers, and print a line for each."""
    median, tail = measure(case.run, case.bound)
    row: dict[str, Any] = {
        "name": case.name, "us": median, "us_p99": tail, "good": case.good, "peers": {}
    }  # fmt: skip
    of_bound = ""
    if case.bound in rates:
        rate = case.num_bytes / (median * 1e-6)
        row["bytes_per_second"], row["percent_of_bound"] = rate, 100 * rate / rates[case.bound]
        of_bound = f"{rate / 1e9:6.0f} GB/s, {row['percent_of_bound']:5.1f} % of {case.bound}"
    print(f"{case.name:<48} {median:10.1f} us (p99 {tail:.1f})  {of_bound}  (good: {case.good})")
    for name, make in case.peers.items():
        try:
            row["peers"][name], _ = measure(make(), case.bound)
            print(f"    {name:<44} {row['peers'][name]:10.1f} us")
        except Exception as error:  # a peer of any release may fail in any way
            row["peers"][name] = f"{type(error).__name__}: {error}"[:300]
            print(f"    {name:<44} not measured: {row['peers'][name]}")
    return row


def list_tilings(group: int) -> Iterator[Any]:
    """For decodes of `group` heads per KV head, 16 at most.

    Loads that go through a block table take two stages each: only from 5 on, keys are on their way
    while those before them are multiplied. With fewer, other programs have to fill the time.
    """
    from blockstep.kernels.attention_triton import Tiling  # noqa: PLC0415 - not everywhere

    for tile, num_warps, num_stages in product((32, 64, 128), (4, 8), (1, 3, 5)):
        yield Tiling(group, 16, tile, num_warps, num_stages)


def report_tilings(size: Size, rates: dict[str, float], device: str) -> None:
    """Print a line for each tiling, of a batch that fills the device and of one that is split."""
    from blockstep.kernels import attention_triton  # noqa: PLC0415 - not everywhere

    group = size.num_heads // size.num_kv_heads
    for num_seqs in (size.num_seqs, size.num_seqs // 8 or 1):
        decode = Decode(size, num_seqs, size.context, device)
        chosen = attention_triton.choose_tiling(size.head_size, group, size.dtype.itemsize, 1)
        print(f"decode {num_seqs} x {size.context}; chosen is {chosen}")
        for tiling in list_tilings(group):
            name = f"    tile {tiling.tile:3} warps {tiling.num_warps} stages {tiling.num_stages}"
            with patch.object(attention_triton, "choose_tiling", lambda *_, t=tiling: t):
                try:
                    median, _ = measure(decode.run, "copy")
                except Exception as error:  # more shared memory than there is, for example
                    print(f"{name}  not measured: {type(error).__name__}: {error}"[:200])
                    continue
            percent = 100 * decode.num_bytes / rates["copy"] / (median * 1e-6)
            print(f"{name} {median:10.1f} us {percent:5.1f} % of copy")


def choose_file(path: Path, day: str, device: str) -> Path:
    """Where results go: into the file that was named, or one of this name in the folder."""
    if not path.is_dir():
        return path
    words = re.findall("[a-z0-9]+", device.lower())
    name = "-".join([day, "kernels", *(word for word in words if word != "nvidia")])
    return path / f"{name}.json"


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    parser.add_argument("--tilings", action="store_true", help="time tilings of the decodes")
    parser.add_argument("--json", type=Path, metavar="FILE or folder")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "benchmarks/kernels.py: no CUDA device is available, and times of a CPU would say "
            "nothing of these kernels; run it on a machine with a GPU",
            file=sys.stderr,
        )
        return 2
    rates = measure_rates()
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": version("triton"), "command": shlex.join(["python", *sys.argv]),
        "bytes_per_second": rates, "size": {**asdict(Size()), "dtype": str(Size().dtype)},
    }  # fmt: skip
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}")
    print(", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in rates.items()))
    if args.tilings:
        report_tilings(Size(), rates, "cuda")
        return 0
    day = datetime.now(UTC).date().isoformat()
    file = args.json and choose_file(args.json, day, about["device"])
    rows: list[dict[str, Any]] = []
    for case in list_cases(Size(), "cuda"):
        if args.only in case.name:
            rows.append(report(case, rates))
            if file:  # after each: a machine that is lent may be gone before the last
                file.write_text(json.dumps({**about, "cases": rows}, indent=2) + "\n")
    if file:
        print(f"written to {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
