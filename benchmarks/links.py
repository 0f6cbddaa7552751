"""Links: how quickly blocks move between memories of this machine, and what that makes of swapping.

    python benchmarks/links.py [--block-kib N ...] [--blocks N] [--rounds N] [--folder PATH]
        [--tokens-per-second N ...] [--json FILE]

Blocks are scattered over a cache, as they are after a while. Out is `gather_blocks` into a staging
buffer, back is `scatter_blocks`: in host memory by the torch reference, and where there is a CUDA
device from it to pinned memory, with the kernels. A file is written from the staging buffer through
a memory map and synchronised, and read into it through another one, with the page cache dropped
before (`posix_fadvise`) and as the write left it. Wall clock, one thread; all sides take turns, and
the quickest round counts, for what else the machine does makes it slower only.

Each is timed with one block and with many: what the first costs beyond its share is the time of a
copy (`ns_per_copy`), the rest are bytes per second. These give, for a rate of prefill in tokens per
second, the length from which on a swap is cheaper than to compute again (`blockstep.impl.tiers`),
for a block of 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from blockstep.impl.tiers import Costs, KVShape, Link, Prefill
from blockstep.kernels import gather_blocks, scatter_blocks

Run = Callable[[int], object]
"""Function that moves `count` blocks, and returns when they have arrived."""
BLOCK_TOKENS: Final = 16
WAYS_BACK: Final = {
    "host out": "host back",
    "file out": "file back, cold",
    "device out": "device back",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One direction between two memories."""

    name: str
    block_bytes: int
    num_blocks: int
    us_of_one: float
    """Microseconds for a copy of one block, in the quickest round."""
    us_of_all: float
    us_median: float
    """Microseconds for a copy of all blocks, in the median round."""

    @property
    def link(self) -> Link:
        """Return the link for `Costs`: a line through both times, with a latency of at least 0."""
        per_block = max((self.us_of_all - self.us_of_one) / (self.num_blocks - 1), 1e-6)
        setup = max(self.us_of_one - per_block, 0.0)
        return Link(round(self.block_bytes / per_block * 1e6), round(1e3 * setup))


def measure(runs: dict[str, Run], block_bytes: int, num_blocks: int, rounds: int) -> list[Measured]:
    """Return the times of all runs, measured in turn after an untimed round."""
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):
        for count in (1, num_blocks):
            for name, run in runs.items():
                start = time.perf_counter()
                run(count)
                taken = 1e6 * (time.perf_counter() - start)
                if number:
                    times.setdefault((name, count), []).append(taken)
    return [
        Measured(
            name,
            block_bytes,
            num_blocks,
            min(times[name, 1]),
            min(times[name, num_blocks]),
            statistics.median(times[name, num_blocks]),
        )
        for name in runs
    ]


class Memory:
    """A cache of blocks on a device, and a staging buffer in host memory."""

    def __init__(self, device: str, block_bytes: int, num_blocks: int) -> None:
        self.device = device
        self.cache = torch.zeros(2 * num_blocks, block_bytes // 2, dtype=torch.float16)
        self.cache = self.cache.random_(0, 100).to(device)
        self.staging = torch.zeros(num_blocks, block_bytes // 2, dtype=torch.float16)
        if device != "cpu":
            self.staging = self.staging.pin_memory()
        self.ids = torch.randperm(2 * num_blocks, generator=torch.Generator().manual_seed(0))

    def out(self, count: int) -> None:
        """Gather blocks from the cache."""
        gather_blocks(self.cache, self.ids[:count], self.staging[:count])
        self._wait()

    def back(self, count: int) -> None:
        """Scatter blocks into the cache."""
        scatter_blocks(self.staging[:count], self.ids[:count], self.cache)
        self._wait()

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


class BlockFile:
    """A file that holds what the staging buffer holds."""

    def __init__(self, folder: Path, staging: torch.Tensor) -> None:
        self.bytes = memoryview(staging.view(torch.uint8).numpy()).cast("B")
        self.block_bytes = staging[0].nbytes
        self.descriptor = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self.descriptor, len(self.bytes))

    def out(self, count: int) -> None:
        """Write, and wait until the disk has it."""
        size = count * self.block_bytes
        with mmap.mmap(self.descriptor, size) as view:
            view[:] = self.bytes[:size]
            view.flush()
        os.fsync(self.descriptor)

    def drop(self) -> None:
        """Drop the file from the page cache, as far as the system does so on request."""
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def back(self, count: int) -> None:
        """Read."""
        size = count * self.block_bytes
        with mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ) as view:
            view.madvise(mmap.MADV_SEQUENTIAL)
            with memoryview(view) as source:
                self.bytes[:size] = source

    def back_cold(self, count: int) -> None:
        """Read what is not in memory."""
        self.drop()
        self.back(count)


@contextmanager
def list_runs(folder: Path | None, block_bytes: int, num_blocks: int) -> Iterator[dict[str, Run]]:
    """Yield what is measured, by name."""
    host = Memory("cpu", block_bytes, num_blocks)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file = BlockFile(Path(place), host.staging)
        runs: dict[str, Run] = {
            "host out": host.out,
            "host back": host.back,
            "file out": file.out,
            "file back, warm": file.back,
            "file back, cold": file.back_cold,
        }
        if torch.cuda.is_available():
            device = Memory("cuda", block_bytes, num_blocks)
            runs |= {"device out": device.out, "device back": device.back}
        try:
            yield runs
        finally:
            os.close(file.descriptor)


def list_break_evens(
    measured: list[Measured], tokens_per_second: int
) -> Iterator[tuple[str, int | None]]:
    """Yield for each lower memory the least number of tokens for which a swap is cheaper, or
    None."""
    links = {each.name: each.link for each in measured}
    head_size = measured[0].block_bytes // (4 * BLOCK_TOKENS)  # one layer, one head, two bytes
    shape = KVShape(1, 1, head_size, BLOCK_TOKENS, 2)
    for out, back in WAYS_BACK.items():
        if out in links:
            costs = Costs(shape, links[out], links[back], Prefill(tokens_per_second))
            yield out.partition(" ")[0], costs.get_break_even()


def report(each: Measured) -> str:
    """Return a line."""
    link = each.link
    return (
        f"{each.name:<16} {each.block_bytes // 1024:>6} KiB x {each.num_blocks:<5} "
        f"{link.bytes_per_second / 1e9:8.2f} GB/s {link.ns_per_copy / 1e3:10.1f} us a copy   "
        f"all {each.us_of_all / 1e3:8.2f} ms (median {each.us_median / 1e3:.2f})"
    )


def describe_device() -> dict[str, Any]:
    """Return a description of the machine; `load` is that at the beginning."""
    has_cuda = torch.cuda.is_available()
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "device": torch.cuda.get_device_name() if has_cuda else None,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="of the file; a temporary one otherwise")
    parser.add_argument("--tokens-per-second", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = describe_device()
    found: list[dict[str, Any]] = []
    for kib in args.block_kib:
        with list_runs(args.folder, kib << 10, args.blocks) as runs:
            measured = measure(runs, kib << 10, args.blocks, args.rounds)
        print(*map(report, measured), sep="\n")
        for rate in args.tokens_per_second:
            for name, length in list_break_evens(measured, rate):
                text = "never" if length is None else f"from {length:,} tokens on"
                print(f"    swap to {name} rather than compute {rate:,} tokens/s: {text}")
        found += [{**asdict(each), "link": asdict(each.link)} for each in measured]
    if args.json:
        command = shlex.join(["python", "benchmarks/links.py", *sys.argv[1:]])
        record |= {"command": command, "measured": found}
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
