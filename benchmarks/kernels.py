"""The kernels on one GPU: time, percent of a bound measured in the same run, and peers.

    python benchmarks/kernels.py [--only WORD] [--json FILE]

Bounds: what a device-to-device copy of 1 GiB reaches (read + write), what a pinned copy reaches
over the link, or nothing for what is bound by its launch. Times are of the device, median and 99th
percentile, with the L2 cache flushed before each run (`triton.testing.do_bench`); what is bound by
its launch is replayed from a CUDA graph. A peer that cannot run is listed with its reason. Without
a GPU this says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
    num_tokens: int = 8192
    num_rows: int = 1024
    vocab_size: int = 131_072
    num_copied: int = 1024
    num_swapped: int = 64
    dtype: torch.dtype = torch.bfloat16


BLOCK_SIZE = 16


def make_decode(size: Size, num_seqs: int, context: int, device: str) -> tuple[Any, Run]:
    """Query and contiguous KV for peers, and our call on distinct blocks in shuffled order."""
    shape = (num_seqs, context, size.num_kv_heads, size.head_size)
    key, value = (torch.randn(shape, dtype=size.dtype, device=device) for _ in range(2))
    query = torch.randn(num_seqs, size.num_heads, size.head_size, dtype=size.dtype, device=device)
    per_seq = -(-context // BLOCK_SIZE)
    order = torch.randperm(num_seqs * per_seq, device=device)
    tables = order.view(num_seqs, per_seq).int()
    caches = [torch.zeros(order.numel(), BLOCK_SIZE, *shape[2:], dtype=size.dtype, device=device)
              for _ in range(2)]  # fmt: skip
    position = torch.arange(context, device=device)
    slots = tables[:, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    flat = (-1, *shape[2:])
    reshape_and_cache(key.view(flat), value.view(flat), caches[0], caches[1], slots.view(-1))
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    lens = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
    scale = size.head_size**-0.5

    def run() -> object:
        return paged_attention(
            query, caches[0], caches[1], tables, starts, lens, scale=scale, max_query_len=1,
            max_seq_len=context,
        )  # fmt: skip

    return (query[:, :, None], key.transpose(1, 2), value.transpose(1, 2)), run


def make_sdpa(inputs: Any) -> Run:
    """torch's attention on contiguous KV: what paging costs."""
    query, key, value = inputs
    return lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True)


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
    inputs, run = make_decode(size, size.num_seqs, size.context, device)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in inputs[1:])
    peers = {"SDPA, contiguous": lambda: make_sdpa(inputs), "flex_attention, paged":
             lambda: make_flex(size, device)}  # fmt: skip
    yield Case(f"decode {size.num_seqs} x {size.context}", run, "copy", num_bytes, peers)
    inputs, run = make_decode(size, 1, 500, device)
    yield Case(
        "decode 1 x 500", run, "launch", peers={"SDPA, contiguous": lambda: make_sdpa(inputs)}
    )
    yield from list_copies(size, device)
    rows = torch.arange(size.num_rows, device=device)
    ones = torch.ones(size.num_rows, dtype=torch.int32, device=device)
    tables = torch.zeros(size.num_rows, 256, dtype=torch.int32, device=device)
    gathered = torch.zeros_like(tables)
    yield Case(
        f"prepare_step {size.num_rows}",
        lambda: prepare_step(
            tables, ones * 4000, ones, BLOCK_SIZE, row_indices=rows, num_tokens=size.num_rows,
            out_block_tables=gathered,
        ),
        "launch",
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
        "copy", logits.numel() * logits.element_size(),
        {"argmax": lambda: partial(logits.argmax, -1)},
    )  # fmt: skip


def list_copies(size: Size, device: str) -> Iterator[Case]:
    """What only moves bytes."""
    shape = (size.num_tokens, size.num_kv_heads, size.head_size)
    tokens = torch.randn(shape, dtype=size.dtype, device=device)
    cache = torch.zeros(size.num_tokens // BLOCK_SIZE, BLOCK_SIZE, *shape[1:], dtype=size.dtype,
                        device=device)  # fmt: skip
    other = torch.zeros_like(cache)
    slots = torch.randperm(size.num_tokens, device=device)
    yield Case(
        f"reshape_and_cache {size.num_tokens}",
        lambda: reshape_and_cache(tokens, tokens, cache, other, slots),
        "copy", 4 * tokens.numel() * tokens.element_size(),
        {"index_put": lambda: lambda: (cache.view(shape).index_copy_(0, slots, tokens),
                                       other.view(shape).index_copy_(0, slots, tokens))},
    )  # fmt: skip
    blocks = torch.zeros(2 * size.num_copied, 64 * 1024, dtype=torch.bfloat16, device=device)
    order = torch.randperm(2 * size.num_copied, device=device)
    pairs = order.view(-1, 2).contiguous()
    num_bytes = 2 * size.num_copied * blocks.shape[1] * blocks.element_size()
    yield Case(
        f"copy_blocks {size.num_copied} x 128 KiB, independent",
        lambda: copy_blocks([blocks], pairs, independent=True), "copy", num_bytes,
    )  # fmt: skip
    yield Case(
        f"copy_blocks {size.num_copied} x 128 KiB, in sequence",
        lambda: copy_blocks([blocks], pairs), "copy", num_bytes,
    )  # fmt: skip
    for kib in (64, 2048):
        swapped = torch.zeros(size.num_swapped, kib * 512, dtype=torch.bfloat16, device=device)
        staging = torch.zeros_like(swapped, device="cpu")
        staging = staging.pin_memory() if device == "cuda" else staging
        ids = torch.randperm(size.num_swapped)
        yield Case(
            f"gather_blocks {size.num_swapped} x {kib} KiB to the host",
            partial(gather_blocks, swapped, ids, staging), "link", staging.nbytes,
        )  # fmt: skip


def measure(run: Run, bound: str) -> tuple[float, float]:
    """Median and 99th percentile, microseconds."""
    from triton.testing import do_bench, do_bench_cudagraph  # noqa: PLC0415 - not on a CPU

    bench = do_bench_cudagraph if bound == "launch" else do_bench
    median, tail = bench(run, rep=200, quantiles=[0.5, 0.99])
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
    row: dict[str, Any] = {"name": case.name, "us": median, "us_p99": tail, "peers": {}}
    percent = ""
    if case.bound in rates:
        row["percent_of_bound"] = 100 * case.num_bytes / rates[case.bound] / (median * 1e-6)
        percent = f"{row['percent_of_bound']:5.1f} % of {case.bound}"
    print(f"{case.name:<48} {median:10.1f} us (p99 {tail:.1f})  {percent}")
    for name, make in case.peers.items():
        try:
            row["peers"][name], _ = measure(make(), case.bound)
            print(f"    {name:<44} {row['peers'][name]:10.1f} us")
        except Exception as error:  # a peer of any release may fail in any way
            row["peers"][name] = f"{type(error).__name__}: {error}"[:300]
            print(f"    {name:<44} not measured: {row['peers'][name]}")
    return row


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    parser.add_argument("--json", type=Path, metavar="FILE")
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
    cases = (case for case in list_cases(Size(), "cuda") if args.only in case.name)
    rows = [report(case, rates) for case in cases]
    if args.json:
        args.json.write_text(json.dumps({**about, "cases": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
