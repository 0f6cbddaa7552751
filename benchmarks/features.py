"""Measures what features cost a decode step of the host engine.

    python -m benchmarks.features [-n 8 -n 64 -n 1024] [--steps 200]

All requests decode, and one in sixteen fills a block in each step; no request uses the feature, but
for groups, events and adapters, which all do. Processor time of a plan and a commit in arrays,
median; all sides take turns in one run, in random order. The last line is `apply`, with one group.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from statistics import median
from time import thread_time
from typing import Any, Final

import numpy as np

from blockstep.conformance.bench.measure import garbage_collection
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import (
    Ack,
    Commit,
    Config,
    GroupKind,
    KVGroup,
    MambaCacheMode,
    Outputs,
    Plan,
    Policy,
    Rejected,
    Request,
    RowTokens,
    Schedule,
    Submit,
)

FULL: Final = KVGroup(GroupKind.FULL, 16)
WINDOW: Final = KVGroup(GroupKind.SLIDING_WINDOW, 16, sliding_window=64)
STATES: Final = KVGroup(GroupKind.RECURRENT, 256, mamba_cache_mode=MambaCacheMode.ALIGN)
NUM_WARM: Final = 80
"""Steps before the clock runs: by then windows have left their first blocks."""
FEATURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "one group": {},
    "full and window": {"groups": (FULL, WINDOW)},
    "full and recurrent": {"groups": (FULL, STATES)},
    "KV events": {"enable_kv_cache_events": True},
    "adapters": {"max_loras": 4},
    "encoder": {"encoder_cache_size": 64, "encoder_compute_budget": 64},
    "masks": {"reasoning_end_token_id": 7},
    "forks": {"enable_forks": True},
    "a store": {"kv_connector": True},
    "pins": {"policy": Policy.CONTINUUM},
    "tiers": {"admission_high_blocks": 8},
}


class Side:
    """An engine whose requests all decode."""

    def __init__(self, engine: HostEngine, num_running: int, num_steps: int, through: str) -> None:
        self.engine = engine
        self.through = through
        for number in range(num_running):
            prompt = tuple((number * 7919 + at * 31) % 32_000 for at in range(64 + number % 16))
            adapter = f"lora {number % 4}" if engine.config.max_loras else None
            request = Request(f"r{number:05}", prompt, max_tokens=num_steps, adapter=adapter)
            assert engine.apply(Submit(request)) == Ack()

    def step(self) -> float:
        """Return the microseconds of a plan and a commit."""
        engine = self.engine
        if self.through == "arrays":
            begin = thread_time()
            plan = engine.schedule_arrays()
            planned = thread_time() - begin
            assert not isinstance(plan, Rejected)
            tokens = np.ones(len(plan), np.int32)
            begin = thread_time()
            engine.commit_arrays(plan.frame_id, tokens)
            committed = thread_time() - begin
            engine.take_events()
            return 1e6 * (planned + committed)
        begin = thread_time()
        answer = engine.apply(Schedule())
        planned = thread_time() - begin
        assert isinstance(answer, Plan)
        names = [row.request_id for row in answer.cached] + [row.request_id for row in answer.new]
        event = Commit(answer.frame_id, tuple([RowTokens(name, (1,)) for name in names]))
        begin = thread_time()
        outputs = engine.apply(event)
        committed = thread_time() - begin
        assert isinstance(outputs, Outputs)
        return 1e6 * (planned + committed)


def make_sides(num_running: int, num_steps: int) -> dict[str, Side]:
    """Return all sides by name; the first is the yardstick."""
    sizes: dict[str, Any] = {
        "num_blocks": 3 * num_running * (8 + num_steps // 16) + 1,
        "max_num_seqs": num_running,
        "max_num_batched_tokens": max(num_running * 80, 2_048),
        "max_model_len": 256 + num_steps,
    }
    sides = {
        name: Side(HostEngine(Config(**sizes, **fields)), num_running, num_steps, "arrays")
        for name, fields in FEATURES.items()
    }
    engine = HostEngine(Config(**sizes))
    sides["one group through apply"] = Side(engine, num_running, num_steps, "apply")
    return sides


def measure(num_running: int, num_steps: int) -> dict[str, float]:
    """Return the median microseconds of each side."""
    sides = make_sides(num_running, num_steps + NUM_WARM + 10)
    found: dict[str, list[float]] = {name: [] for name in sides}
    draw = random.Random(1)  # noqa: S311
    with garbage_collection(on=False):
        for turn in range(num_steps + NUM_WARM):
            for name in draw.sample(list(sides), len(sides)):
                took = sides[name].step()  # in any order, as each leaves its own caches behind
                if turn >= NUM_WARM:
                    found[name].append(took)
    return {name: median(times) for name, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each number of running requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, action="append", help="running requests")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    for num_running in options.n or (8, 64, 1_024):
        found = measure(num_running, options.steps)
        base = next(iter(found.values()))
        print(f"| {num_running:,} running | us a step | by the first |\n|---|---|---|")
        for name, value in found.items():
            print(f"| {name} | {value:,.1f} | {value / base:.2f} |", flush=True)


if __name__ == "__main__":
    main()
