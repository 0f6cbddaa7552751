"""A step of the device's scheduler on one GPU, replayed from a CUDA graph; and those on a host.

    python benchmarks/device.py [-n RUNNING ...] [--replays 512] [--no-host] [--vllm PYTHON]
                                [--json FILE]
    python benchmarks/device.py --count [-n RUNNING ...] [--json FILE]

Each step commits a token of every running request and plans the next step: all run, all decode; a
sixteenth of them fills a block in each. On the device it is one launch of `loop_kernel`; graphs of
sixteen are timed from one event behind a replay to the next, so that no host is waited for. Without
a GPU that is left out, and said. On the host it is a plan and a commit of the host engine, and,
by a Python that can import vLLM (`make vllm`), `schedule` and `update_from_output` of its
scheduler: processor time on this machine, bare of what builds and reads their arguments. `--count`
runs the device's steps by numpy, and counts what a GPU would load and store: instructions,
barriers, and sectors of 32 bytes. It also counts reductions and scans, and the longest chains: how
many loads wait for each other, through values, branches and what was stored before, and how many
reductions and scans do.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from blockstep.conformance.bench.measure import describe_machine, garbage_collection
from blockstep.conformance.bench.timed_engines import open_side
from blockstep.impl.device import layout
from blockstep.impl.device.dims import count_gpu_lanes, make_dims
from blockstep.impl.device.inbox import Inbox
from blockstep.impl.device.launch import Numpied, launch_kernel
from blockstep.kernels.numpied import Memory
from blockstep.spec.vocabulary import Config, Request

RUNNING = (64, 256, 1_024, 4_096)
SECTOR = 32
WARM = 20
IN_GRAPH = 16
"""Steps of a graph: as many as a block has tokens, so each replay fills a block of each request."""
VOCABULARY = 30_000
WAKE_S = 0.5
HOSTS = ("host", "vllm")


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


class Traced:
    """A value of a kernel, and the lengths of the longest chains that it waits for.

    `chain` has the number of loads, and the number of reductions and scans.
    """

    def __init__(self, value: Any, chain: tuple[int, int], chains: Chains) -> None:
        self.value, self.chain, self.chains = value, chain, chains

    def __bool__(self) -> bool:
        if self.chains.follows_branches:
            self.chains.floor = _longest(self.chains.floor, self.chain)
        return bool(self.value)

    def __getitem__(self, index: Any) -> Traced:
        return Traced(self.value[index], self.chain, self.chains)


def _longest(*chains: tuple[int, int]) -> tuple[int, int]:
    return max(loads for loads, _ in chains), max(scans for _, scans in chains)


def _operate(name: str, swaps: bool) -> Callable[[Traced, Any], Traced]:
    do = getattr(operator, name)

    def run(self: Traced, other: Any) -> Traced:
        made: Traced = (
            self.chains.run(do, other, self) if swaps else self.chains.run(do, self, other)
        )
        return made

    return run


for _name in ("add", "sub", "mul", "and_", "or_", "xor", "lshift"):
    _bare = _name.rstrip("_")
    setattr(Traced, f"__{_bare}__", _operate(_name, swaps=False))
    setattr(Traced, f"__r{_bare}__", _operate(_name, swaps=True))
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Traced, f"__{_name}__", _operate(_name, swaps=False))


class Chains:
    """Traces the values of one launch through a kernel's source, as numpy runs it.

    Args:
        numpied: runs the source; it is traced from now on.
        follows_branches: whether a branch waits for its condition, and all that is behind it for
            the branch, as on a GPU. Otherwise only values and what is stored make chains.
    """

    SCANS = ("sum", "max", "min", "cumsum", "argmax", "argmin")

    def __init__(self, numpied: Numpied, *, follows_branches: bool = True) -> None:
        self.follows_branches = follows_branches
        self.floor = self.longest = (0, 0)
        self.num_scans = 0
        self.stored: dict[int, Any] = {}
        """[elements, 2] of each tensor: the chains of what was stored."""
        space = numpied._kernels
        for name, function in list(space.items()):
            if name.startswith("_tl_") or name in (
                "_divide",
                "_modulo",
                "_shift_right",
                "_invert",
                "_to",
            ):
                space[name] = self._wrap(function, name.removeprefix("_tl_") in self.SCANS)
        space["_load"] = self._wrap_load(space["_load"])
        space["_store"] = self._wrap_store(space["_store"])

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a function of values; what it returns waits for what all of them wait for."""
        chain = _longest(
            (0, 0), *(x.chain for x in (*args, *named.values()) if isinstance(x, Traced))
        )
        bare = {name: _bare_of(x) for name, x in named.items()}
        return Traced(function(*map(_bare_of, args), **bare), chain, self)

    def _note(self, made: Traced, loads: int, scans: int) -> Traced:
        chain = _longest(made.chain, self.floor)
        made.chain = chain[0] + loads, chain[1] + scans
        self.longest = _longest(self.longest, made.chain)
        return made

    def _wrap(self, function: Callable[..., Any], is_scan: bool) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            made = self.run(function, *args, **named)
            if is_scan:
                self.num_scans += 1
                self._note(made, 0, 1)
            return made

        return run

    def _of(self, array: Any) -> Any:
        return self.stored.setdefault(id(array), np.zeros((array.size, 2), np.int64))

    def _wrap_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def run(array: Any, offset: Any = 0, mask: Any = None, other: Any = None) -> Traced:
            made: Traced = self.run(load, array, offset, mask, other)
            before = self._of(array)[_active(offset, mask)].reshape(-1, 2)
            if before.size:
                loads, scans = before.max(0).tolist()
                made.chain = _longest(made.chain, (loads, scans))
            return self._note(made, 1, 0)

        return run

    def _wrap_store(self, store: Callable[..., Any]) -> Callable[..., Any]:
        def run(array: Any, offset: Any, value: Any, mask: Any = None) -> None:
            made: Traced = self.run(store, array, offset, value, mask)
            self._of(array)[_active(offset, mask)] = _longest(made.chain, self.floor)

        return run


def _bare_of(value: Any) -> Any:
    return value.value if isinstance(value, Traced) else value


def _active(offset: Any, mask: Any) -> Any:
    """Return the offsets that are accessed."""
    offset, mask = np.asarray(_bare_of(offset)), _bare_of(mask)
    return offset if mask is None else offset[np.broadcast_to(mask, offset.shape)]


def count_chains(running: int) -> dict[str, int]:
    """Return the longest chains of a step in which a sixteenth of the requests fill a block."""
    made: dict[str, int] = {}
    for name, follows_branches in (("chain", True), ("chain by data alone", False)):
        memory = Memory()
        inbox = start(running, 64, memory)
        traced = Numpied(memory)
        chains = Chains(traced, follows_branches=follows_branches)
        traced("loop_kernel", inbox.state, inbox.dims)
        made["scans"] = chains.num_scans
        made[f"{name}, loads"], made[f"{name}, scans"] = chains.longest
    return made


def make_config(running: int, steps: int) -> Config:
    """Return a config in which `running` requests can decode for `steps` steps."""
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
    """Return all of them admitted, and their prompts run; by numpy."""
    config = make_config(running, steps)
    inbox = Inbox(config, Numpied(memory))
    nodes = running * (10 + steps // 16)
    lanes = count_gpu_lanes(config)
    inbox.dims = make_dims(config, slots=running, lanes=lanes, nodes=nodes)
    inbox.arrays = layout.make_state(inbox.dims)
    s = inbox.state
    s.control[layout.BUDGET], s.control[layout.ADMITS] = config.max_num_batched_tokens, 1
    s.control[layout.PREVIOUS_ID] = layout.NONE
    s.answer_counts[:] = 1
    s.answer_tokens[..., 0] = 1 + np.arange(s.answer_tokens.shape[1]) % (VOCABULARY - 1)
    for request in make_requests(running, steps):
        inbox.add(request)
    for _ in range(4):
        inbox.launch("loop_kernel")
    assert int(inbox.state.num_rows[0]) == running, "a request does not run"
    return inbox


def count(running: int) -> dict[str, float]:
    """Return the loads and stores of a step, averaged over sixteen: each request fills one
    block."""
    memory = Counting()
    inbox = start(running, 64, memory)
    memory.counts.clear()
    for _ in range(16):
        inbox.launch("loop_kernel")
    return {name: memory.counts[name] / 16 for name in sorted(memory.counts)}


def wake(torch: Any) -> None:
    """Keep the GPU busy for `WAKE_S` seconds.

    While the host prepares a size, the GPU idles and lowers its clock. All timed replays of a size
    last some ten milliseconds, which is too short to raise it again.
    """
    matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    end = time.monotonic() + WAKE_S
    while time.monotonic() < end:
        matrix @ matrix
        torch.cuda.synchronize()


def replay(running: int, steps: int) -> list[float]:
    """Return microseconds per step: for each replay of a graph of `IN_GRAPH` steps, their mean.

    A host needs longer to launch a graph of one step than the step takes, and an event behind each
    step would measure the host.
    """
    torch: Any = import_module("torch")
    num_replays = max(steps // IN_GRAPH, 2)
    inbox = start(running, (num_replays + 2) * IN_GRAPH + WARM, Memory())
    state = layout.State(*(torch.from_numpy(field).cuda() for field in inbox.state))
    launch_kernel("loop_kernel", state, inbox.dims)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            launch_kernel("loop_kernel", state, inbox.dims)
    graph.replay()
    wake(torch)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    if int(state.num_rows[0]) != running:
        raise RuntimeError(f"{int(state.num_rows[0])} of {running} run at the end")
    return [1_000 * a.elapsed_time(b) / IN_GRAPH for a, b in pairwise(marks)]


def step_host(name: str, running: int, steps: int) -> list[float]:
    """Return microseconds of each plan and commit of an engine on the CPU, after some untimed
    steps."""
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
    """Return the result of `step_host` in another environment."""
    own = [python, __file__, "--side", name, "-n", f"{running}", "--replays", f"{steps}"]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0", **os.environ}
    done = subprocess.run(own, check=True, stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def summarize(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {"p50_us": median(times), "p99_us": quantiles(times, n=100)[98]}


def measure(running: int, options: argparse.Namespace, has_gpu: bool) -> dict[str, Any]:
    """Measure one size with every available engine."""
    if options.count:
        return {**count(running), **count_chains(running)}
    made = {"device": summarize(replay(running, options.replays))} if has_gpu else {}
    if options.no_host:
        return made
    made["host"] = summarize(step_host("host", running, options.replays))
    if options.vllm:
        made["vllm"] = step_apart(options.vllm, "vllm", running, options.replays)
    return made


def main() -> int:
    """Return the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, action="append", help="running requests; repeatable")
    parser.add_argument("--replays", type=int, default=512)
    parser.add_argument("--count", action="store_true", help="count by numpy; needs no GPU")
    parser.add_argument("--no-host", action="store_true", help="measure the device only")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure its vLLM, too")
    parser.add_argument("--side", choices=HOSTS, help="measure this one only; print JSON")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    # Our folder "coverage" would hide the package of that name, which numba asks for.
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    if options.side:
        (running,) = options.n
        sys.stdout.write(
            json.dumps(summarize(step_host(options.side, running, options.replays))) + "\n"
        )
        return 0
    torch: Any = import_module("torch")
    has_gpu = not options.count and torch.cuda.is_available()
    if options.no_host and not options.count and not has_gpu:
        sys.stderr.write("benchmarks/device.py: no CUDA device is available; nothing is measured\n")
        return 2
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
