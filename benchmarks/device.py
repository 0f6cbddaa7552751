"""A step of the device's scheduler on one GPU, replayed from a CUDA graph; or counted without one.

    python benchmarks/device.py [-n RUNNING ...] [--replays 512] [--json FILE]
    python benchmarks/device.py --count [-n RUNNING ...] [--json FILE]

Each step is one launch of `loop_kernel`: it commits a token of every running request, takes what
the host wrote, and plans the next step. All run, all decode; a sixteenth of them fills a block in
each step. Times are of the device, from one event behind a replay to the next, the whole graph
included. Beside it, in the same run, the compiled engine on this machine's CPU; vLLM's own step is
measured by `python benchmarks/scheduler.py`. `--count` runs the same steps by numpy, and counts
what a GPU would load and store: instructions, barriers, and sectors of 32 bytes. Without a GPU the
first says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from blockstep.impl.device import layout
from blockstep.impl.device.inbox import Inbox
from blockstep.impl.device.launch import OPTIONS, Numpied
from blockstep.impl.device.step import loop_kernel
from blockstep.kernels.numpied import Memory
from blockstep.spec.vocabulary import Config, Rejected, Request, Submit

RUNNING = (64, 256, 1_024, 4_096)
LANES = 256
SECTOR = 32
WARM = 20
VOCABULARY = 30_000


class Counting(Memory):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def barrier(self) -> None:
        """One more."""
        self.counts["barriers"] += 1
        super().barrier()

    def _count(self, kind: str, array: Any, offset: Any) -> None:
        sectors = np.unique(np.asarray(offset) * array.itemsize // SECTOR).size
        self.counts[f"{kind}s"] += 1
        self.counts[f"bytes {kind}d" if kind == "store" else "bytes loaded"] += sectors * SECTOR

    def _read(self, array: Any, offset: Any) -> Any:
        self._count("load", array, offset)
        return super()._read(array, offset)

    def _read_one(self, array: Any, offset: Any) -> Any:
        self._count("load", array, offset)
        return super()._read_one(array, offset)

    def _write(self, array: Any, offset: Any, value: Any, _vector: Any) -> None:
        self._count("store", array, offset)
        super()._write(array, offset, value, _vector)

    def _write_one(self, array: Any, offset: Any, value: Any) -> None:
        self._count("store", array, offset)
        super()._write_one(array, offset, value)


def make_config(running: int, steps: int) -> Config:
    """Room for so many requests to decode for so long."""
    return Config(
        num_blocks=running * (8 + steps // 16) + 1,
        max_num_seqs=running,
        max_num_batched_tokens=running * 80,
        max_model_len=256 + steps,
    )


def make_requests(running: int, steps: int) -> list[Request]:
    """Prompts of every length modulo a block, no two alike."""
    draw = random.Random(running)  # noqa: S311
    return [
        Request(
            f"{number}",
            tuple(draw.choices(range(VOCABULARY), k=draw.randint(20, 70))),
            max_tokens=steps + 100,
        )
        for number in range(running)
    ]


def start(running: int, steps: int, memory: Memory) -> Inbox:
    """All of them admitted, and their prompts run; by numpy."""
    config = make_config(running, steps)
    inbox = Inbox(config, Numpied(memory))
    nodes = running * (10 + steps // 16)
    inbox.dims = layout.make_dims(config, slots=running, lanes=LANES, nodes=nodes)
    inbox.state = layout.make_state(inbox.dims)
    s = inbox.state
    s.control[layout.BUDGET], s.control[layout.ADMITS] = config.max_num_batched_tokens, 1
    s.control[layout.PREVIOUS_ID] = layout.NONE
    s.answer_counts[:] = 1
    s.answer_tokens[:, 0] = 1 + np.arange(len(s.answer_tokens)) % (VOCABULARY - 1)
    for request in make_requests(running, steps):
        inbox.add(request)
    for _ in range(4):
        inbox.launch("loop_kernel")
    assert int(inbox.state.num_rows[0]) == running, "somebody does not run"
    return inbox


def count(running: int) -> dict[str, float]:
    """What a step loads and stores, on average of sixteen: each request fills one block."""
    memory = Counting()
    inbox = start(running, 64, memory)
    memory.counts.clear()
    for _ in range(16):
        inbox.launch("loop_kernel")
    return {name: memory.counts[name] / 16 for name in sorted(memory.counts)}


def replay(running: int, replays: int) -> list[float]:
    """Microseconds of each replay of a step, after some to warm up."""
    inbox = start(running, replays + 2 * WARM, Memory())
    state = layout.State(*(torch.from_numpy(field).cuda() for field in inbox.state))
    kernel: Any = loop_kernel
    kernel[(1,)](state, inbox.dims, **OPTIONS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[(1,)](state, inbox.dims, **OPTIONS)
    for _ in range(WARM):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    if int(state.num_rows[0]) != running:
        raise RuntimeError(f"{int(state.num_rows[0])} of {running} run at the end")
    return [1_000 * a.elapsed_time(b) for a, b in pairwise(marks)]


def step_compiled(running: int, steps: int) -> list[float]:
    """Microseconds of each plan and commit of the compiled engine, in arrays, on the CPU."""
    # Our folder "coverage" would hide the package of that name, which numba asks for.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    engine = import_module("blockstep.impl.compiled").CompiledEngine(
        make_config(running, steps + 2 * WARM)
    )
    for request in make_requests(running, steps + 2 * WARM):
        engine.apply(Submit(request))
    tokens = np.ones(running, np.int32)
    times = []
    for _ in range(steps + WARM):
        before = time.perf_counter()
        plan = engine.schedule_arrays()
        if isinstance(plan, Rejected):
            raise RuntimeError(plan)
        outputs = engine.commit_arrays(plan.frame_id, tokens)
        if isinstance(outputs, Rejected):
            raise RuntimeError(outputs)
        times.append(1e6 * (time.perf_counter() - before))
    return times[WARM:]


def tell(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {"p50_us": median(times), "p99_us": quantiles(times, n=100)[98]}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, action="append", help="running requests; repeatable")
    parser.add_argument("--replays", type=int, default=512)
    parser.add_argument("--count", action="store_true", help="count by numpy; needs no GPU")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    made: dict[str, Any] = {}
    if not options.count:
        if not torch.cuda.is_available():
            sys.stderr.write("benchmarks/device.py: no GPU here; --count needs none\n")
            return 2
        made["device"] = torch.cuda.get_device_name()
    for running in options.n or RUNNING:
        if options.count:
            made[f"{running}"] = count(running)
        else:
            made[f"{running}"] = {
                "device": tell(replay(running, options.replays)),
                "compiled": tell(step_compiled(running, options.replays)),
            }
        sys.stdout.write(f"{running:6,} running  {json.dumps(made[f'{running}'])}\n")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps(made, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
