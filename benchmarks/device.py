"""A step of the device's scheduler on one GPU, replayed from a CUDA graph; and those on a host.

    python benchmarks/device.py [-n RUNNING ...] [--replays 512] [--vllm PYTHON] [--json FILE]
    python benchmarks/device.py --count [-n RUNNING ...] [--json FILE]

Each step commits a token of every running request and plans the next step: all run, all decode; a
sixteenth of them fills a block in each. On the device it is one launch of `loop_kernel`, timed from
one event behind a replay to the next, the whole graph included; without a GPU that is left out, and
said. On the host it is a plan and a commit of the compiled engine, and, by a Python that can import
vLLM (`make vllm`), `schedule` and `update_from_output` of its scheduler: processor time on this
machine, bare of what builds and reads their arguments. `--count` runs the device's steps by numpy,
and counts what a GPU would load and store: instructions, barriers, and sectors of 32 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from blockstep.conformance.bench.measure import describe_machine, garbage_collection
from blockstep.conformance.bench.sides import open_side
from blockstep.impl.device import layout
from blockstep.impl.device.inbox import Inbox
from blockstep.impl.device.launch import OPTIONS, Numpied
from blockstep.kernels.numpied import Memory
from blockstep.spec.vocabulary import Config, Request

RUNNING = (64, 256, 1_024, 4_096)
LANES = 256
SECTOR = 32
WARM = 20
VOCABULARY = 30_000
HOSTS = ("compiled", "vllm")


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
    torch: Any = import_module("torch")
    kernel = import_module("blockstep.impl.device.step").loop_kernel
    inbox = start(running, replays + 2 * WARM, Memory())
    state = layout.State(*(torch.from_numpy(field).cuda() for field in inbox.state))
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


def step_host(name: str, running: int, steps: int) -> list[float]:
    """Microseconds of each plan and commit of an engine on the CPU, after some to warm up."""
    side = open_side(name, make_config(running, steps + 2 * WARM))
    for request in make_requests(running, steps + 2 * WARM):
        side.submit(request)

    def step() -> float:
        plan, planned = side.schedule()
        side.frames.append(plan)
        names = [row.request_id for row in side.read_plan(plan).rows]
        if len(names) != running:
            raise RuntimeError(f"{name}: {len(names)} of {running} run")
        _, committed = side.commit(side.prepare([(one, (1,)) for one in names]))
        return 1e6 * (planned + committed)

    for _ in range(WARM):
        step()
    with garbage_collection(on=False):
        return [step() for _ in range(steps)]


def step_apart(python: str, name: str, running: int, steps: int) -> dict[str, float]:
    """What `step_host` tells in another environment."""
    own = [python, __file__, "--side", name, "-n", f"{running}", "--replays", f"{steps}"]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0", **os.environ}
    done = subprocess.run(own, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def tell(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {"p50_us": median(times), "p99_us": quantiles(times, n=100)[98]}


def measure(running: int, options: argparse.Namespace, has_gpu: bool) -> dict[str, Any]:
    """One size, by everybody who is here."""
    if options.count:
        return count(running)
    made = {"device": tell(replay(running, options.replays))} if has_gpu else {}
    made["compiled"] = tell(step_host("compiled", running, options.replays))
    if options.vllm:
        made["vllm"] = step_apart(options.vllm, "vllm", running, options.replays)
    return made


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, action="append", help="running requests; repeatable")
    parser.add_argument("--replays", type=int, default=512)
    parser.add_argument("--count", action="store_true", help="count by numpy; needs no GPU")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure its vLLM, too")
    parser.add_argument("--side", choices=HOSTS, help="measure this one only; print JSON")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    # Our folder "coverage" would hide the package of that name, which numba asks for.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    if options.side:
        (running,) = options.n
        sys.stdout.write(json.dumps(tell(step_host(options.side, running, options.replays))) + "\n")
        return 0
    torch: Any = import_module("torch")
    has_gpu = not options.count and torch.cuda.is_available()
    made: dict[str, Any] = {}
    if not options.count:
        made["device"] = torch.cuda.get_device_name() if has_gpu else "not run: no GPU here"
        made["host"] = describe_machine()
        sys.stderr.write(f"device: {made['device']}\n")
    for running in options.n or RUNNING:
        made[f"{running}"] = measure(running, options, has_gpu)
        sys.stdout.write(f"{running:6,} running  {json.dumps(made[f'{running}'])}\n")
        sys.stdout.flush()
        if options.json is not None:
            options.json.write_text(json.dumps(made, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
