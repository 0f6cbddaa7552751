"""The kernels on one GPU: time, percent of a bound measured in the same run, and peers.

    python benchmarks/kernels.py [--only WORD] [--json FILE or folder]

Bounds: what a device-to-device copy of 1 GiB reaches (read + write), what a pinned copy reaches
over the link, or nothing for what is bound by its launch. Calls are replayed from CUDA graphs, so
that no time of the host counts, with the L2 cache as it is: a product takes turns at copies of its
weight that exceed it. Given are the median and the 99th percentile of ten means. Copies over the
link are timed call by call. A peer that cannot run is listed with its reason. In a folder the file
name consists of date and device. Without a GPU this says so and exits with 2. Attention has its own
benchmark, `benchmarks/attention.py`.
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
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from blockstep.kernels import (
    add_rms_norm,
    copy_blocks,
    gather_blocks,
    multiply_in_parts,
    multiply_silu_and_mul,
    prepare_step,
    rejection_sample,
    reshape_and_cache,
    rotate_and_cache,
    sample_tokens,
    silu_and_mul,
)

Run = Callable[[], object]


@dataclass
class Case:
    """A kernel call to time, with its bound and its peers."""

    name: str
    run: Run
    bound: str
    """`copy`, `link` or `launch`."""
    good: str
    """Aim on an H100, for the reader of the table."""
    num_bytes: int = 0
    """Bytes that must be moved at least: reads and writes for `copy`, one way for `link`."""
    peers: dict[str, Callable[[], Run]] = field(default_factory=dict)
    """Each makes its own inputs; so one that does not exist here harms no other."""
    num_calls: int = 1
    """Calls that one run makes, and a peer's as well; times are those of one."""


@dataclass
class Size:
    """Sizes of the cases; the small ones are for a test of this file."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    num_tokens: int = 32768
    num_rows: int = 1024
    vocab_size: int = 131_072
    num_copied: int = 1024
    num_swapped: int = 256
    bytes_in_turn: int = 256 << 20
    """Bytes of a product's weights that calls take turns at: five times an L2 cache."""
    dtype: torch.dtype = torch.bfloat16


BLOCK_SIZE = 16


def list_cases(size: Size, device: str) -> Iterator[Case]:
    """Yield every case, made when it is reached: all together exceed the memory of a device."""
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
    for num_tokens in (64, 1):
        yield from list_layers(size, num_tokens, device)
        yield from list_products(size, num_tokens, device)
    yield make_rejection(size, device)
    for num_rows in (64, 256):
        yield from list_sampling(size, num_rows, device)


def list_layers(size: Size, num_tokens: int, device: str) -> Iterator[Case]:
    """Yield the small kernels of a decoder layer, in a decode of `num_tokens` requests."""
    hidden_size, inner_size = size.num_heads * 64, size.num_heads * 176
    num_kv_heads, head_size = size.num_kv_heads // 2 or 1, 64

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=size.dtype, device=device)

    hidden, residual, weight = (
        randn(num_tokens, hidden_size), randn(num_tokens, hidden_size), randn(hidden_size)
    )  # fmt: skip
    gate_up = randn(num_tokens, 2 * inner_size)
    gate, up = gate_up.chunk(2, dim=-1)
    qkv = randn(num_tokens, hidden_size + 2 * num_kv_heads * head_size)
    caches = [randn(num_tokens, BLOCK_SIZE, num_kv_heads, head_size) for _ in "kv"]
    places = torch.arange(num_tokens, device=device)
    table = randn(num_tokens, head_size)
    yield Case(
        f"add_rms_norm {num_tokens} x {hidden_size}",
        lambda: add_rms_norm(hidden, residual, weight, 1e-6),
        "launch", "3 us",
        peers={
            "add, then rms_norm of torch": lambda: lambda: rms_norm(
                residual.add_(hidden), (hidden_size,), weight, 1e-6
            ),
        },
    )  # fmt: skip
    yield Case(
        f"silu_and_mul {num_tokens} x {inner_size}",
        lambda: silu_and_mul(gate_up),
        "launch", "3 us",
        peers={"silu, then mul_ of torch": lambda: lambda: silu(gate).mul_(up)},
    )  # fmt: skip
    yield Case(
        f"rotate_and_cache {num_tokens} x {size.num_heads} heads",
        lambda: rotate_and_cache(qkv, caches[0], caches[1], places, places, table),
        "launch", "3 us",
    )  # fmt: skip


def list_products(size: Size, num_tokens: int, device: str) -> Iterator[Case]:
    """Yield the products of a decoder layer, in a decode of `num_tokens` requests."""
    hidden_size, inner_size = size.num_heads * 64, size.num_heads * 176
    for name, out_size, in_size in (
        ("qkv", hidden_size + 8 * 64, hidden_size), ("o", hidden_size, hidden_size),
        ("down", hidden_size, inner_size), ("gate_up", 2 * inner_size, hidden_size),
    ):  # fmt: skip
        hidden = torch.randn(num_tokens, in_size, dtype=size.dtype, device=device)
        weight = torch.randn(out_size, in_size, dtype=size.dtype, device=device)
        weights = [weight, *(weight.clone() for _ in range(size.bytes_in_turn // weight.nbytes))]
        multiply = multiply_silu_and_mul if name == "gate_up" else multiply_in_parts
        yield Case(
            f"{name}: {num_tokens} x {in_size} by {out_size}",
            partial(multiply_each, multiply, hidden, weights), "copy", "90 % of copy",
            weight.nbytes,
            {"linear of torch": partial(partial, multiply_each, linear, hidden, weights)},
            len(weights),
        )  # fmt: skip


def multiply_each(
    multiply: Callable[[torch.Tensor, torch.Tensor], object],
    hidden: torch.Tensor,
    weights: list[torch.Tensor],
) -> None:
    """Multiply by each weight in turn."""
    for weight in weights:
        multiply(hidden, weight)


def make_rejection(size: Size, device: str) -> Case:
    """64 greedy requests with four drafts each, all of them wrong: every row is read anyway."""
    num_drafts = 4
    logits = torch.randn(64 * (num_drafts + 1), size.vocab_size, dtype=size.dtype, device=device)
    starts = torch.arange(0, 64 * num_drafts + 1, num_drafts, dtype=torch.int32, device=device)
    seeds = torch.arange(64, device=device)
    greedy = {"temperature": torch.zeros(64, device=device), "seeds": seeds, "positions": seeds}
    drafts = torch.zeros(64 * num_drafts, dtype=torch.int64, device=device)
    return Case(
        f"rejection_sample greedy 64 x {num_drafts}",
        lambda: rejection_sample(logits, drafts, starts, max_num_drafts=num_drafts, **greedy),
        "copy", "1.2 times argmax", logits.nbytes,
        {"argmax": lambda: partial(logits.argmax, -1)},
    )  # fmt: skip


def list_sampling(size: Size, num_rows: int, device: str) -> Iterator[Case]:
    """Drawn tokens without and with cuts; the peer sorts the vocabulary, as is usual."""
    logits = 2 * torch.randn(num_rows, size.vocab_size, dtype=size.dtype, device=device)
    places = torch.arange(num_rows, device=device)
    ones = torch.ones(num_rows, device=device)
    for name, top_k, top_p in (
        ("greedy", 0, 1.0), ("temperature", 0, 1.0), ("top_k 50", 50, 1.0), ("top_p 0.9", 0, 0.9),
        ("top_k 50, top_p 0.9", 50, 0.9),
    ):  # fmt: skip
        columns = {
            "temperature": ones * (name != "greedy"), "top_p": ones * top_p, "min_p": 0 * ones,
            "top_k": torch.full((num_rows,), top_k, dtype=torch.int32, device=device),
            "seeds": places, "indices": places,
        }  # fmt: skip
        yield Case(
            f"sample_tokens {num_rows}, {name}", partial(sample_tokens, logits, **columns),
            "copy", "a few reads", logits.nbytes,
            {"sort and cumsum": partial(make_sorted_sampling, logits, 50, 0.9)} if top_k else {},
        )  # fmt: skip


def make_sorted_sampling(logits: torch.Tensor, top_k: int, top_p: float) -> Run:
    """top_k and top_p by a sort of the vocabulary, and a draw from the cumulated probabilities."""
    uniform = torch.rand(len(logits), 1, device=logits.device)
    last = min(top_k, logits.shape[1]) - 1

    def run() -> torch.Tensor:
        ordered, order = logits.float().sort(dim=-1, descending=True)
        probs = ordered.masked_fill(ordered < ordered[:, last : last + 1], -torch.inf).softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0)
        mass = probs.cumsum(-1)
        return order.gather(1, torch.searchsorted(mass, uniform * mass[:, -1:], right=True))

    return run


def list_copies(size: Size, device: str) -> Iterator[Case]:
    """Yield the cases that only move bytes."""
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


def measure(run: Run, *, in_graph: bool) -> tuple[float, float]:
    """Median and 99th percentile, microseconds."""
    from triton.testing import do_bench, do_bench_cudagraph  # noqa: PLC0415 - not on a CPU

    if in_graph:
        median, tail = do_bench_cudagraph(run, rep=20, quantiles=[0.5, 0.99])
    else:
        median, tail = do_bench(run, rep=200, quantiles=[0.5, 0.99])
    return 1e3 * median, 1e3 * tail


def measure_rates() -> dict[str, float]:
    """Bytes per second of a device copy (read + write) and of a pinned copy to the host."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target, host = torch.empty_like(source), torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    copied, _ = measure(lambda: target.copy_(source), in_graph=False)  # in a graph it is slower
    sent, _ = measure(lambda: host.copy_(source[: host.numel()], non_blocking=True), in_graph=False)
    return {"copy": 2 * source.numel() / copied * 1e6, "link": host.numel() / sent * 1e6}


def report(case: Case, rates: dict[str, float]) -> dict[str, Any]:
    """Time a case and its peers, and print a line for each."""
    in_graph = case.bound != "link"
    median, tail = (us / case.num_calls for us in measure(case.run, in_graph=in_graph))
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
            row["peers"][name] = measure(make(), in_graph=in_graph)[0] / case.num_calls
            print(f"    {name:<44} {row['peers'][name]:10.1f} us")
        except Exception as error:  # a peer of any release may fail in any way
            row["peers"][name] = f"{type(error).__name__}: {error}"[:300]
            print(f"    {name:<44} not measured: {row['peers'][name]}")
    return row


def choose_file(path: Path, day: str, device: str) -> Path:
    """Return the file for results: the one that was named, or a new one in the named folder."""
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
    parser.add_argument(
        "--only", default="", metavar="WORD", help="run cases with WORD in their name"
    )
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
        "triton": version("triton"),
        "command": shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]]),
        "bytes_per_second": rates, "size": {**asdict(Size()), "dtype": str(Size().dtype)},
    }  # fmt: skip
    print(f"{about['device']}, torch {about['torch']}, triton {about['triton']}")
    print(", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in rates.items()))
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
