"""Host time of a decode step of the model engine, with the model and the sampler stubbed.

    python -P benchmarks/engine_host.py [--running N ...] [--steps N] [--frames N ...] [--json FILE]

(`-P`: numba asks for a package `coverage`, and a folder here has that name.)

Everything but the arithmetic is real: scheduling, batch state, inputs, commit, delivery. The
forward pass returns a constant tensor and the sampler constant tokens. N requests are prefilled,
then `--steps` decode steps are timed one by one; a step is one call of `LLM.step`. Medians of wall
and process time count, in milliseconds. `--profile` prints where the time of the steps went.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from blockstep.impl.engine import LLM, SamplingParams
from blockstep.impl.engine.model import Inputs, Model

VOCAB_SIZE = 1024
NUM_PROMPT = 100
NUM_WARM_UP = 20
"""Decode steps before the first that counts."""
TOKEN = 7
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


@dataclass
class Figures:
    """Figures for one number of running requests; times in milliseconds."""

    running: int
    steps: int
    frames: int
    scheduler: str
    wall_ms: float
    """Median of the steps."""
    process_ms: float
    """Median of the steps: CPU time of all threads."""
    wall_p90_ms: float
    read_ms: float
    """Median time of a step in which every chunk is read; measured over half as many steps."""


def make_model(folder: Path) -> None:
    """A model whose numbers do not matter."""
    torch.manual_seed(0)
    logging.disable_progress_bar()
    config = LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)


def forward(model: Model, inputs: Inputs) -> torch.Tensor:  # noqa: ARG001
    """Stands in for `Model.forward`: hidden states of all tokens, all zero."""
    return HIDDEN[: len(inputs.token_ids)]


def compute_logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Stands in for `Model.compute_logits`."""
    return LOGITS[: len(hidden)]


def sample_tokens(logits: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Stands in for the kernel `sample_tokens`: the same token for each row."""
    return TOKENS[: len(logits)]


HIDDEN = torch.zeros(4096, int(SHAPE["hidden_size"]))
LOGITS = torch.zeros(4096, 1)
TOKENS = torch.full((4096,), TOKEN)


def measure(
    folder: Path, running: int, steps: int, frames: int, scheduler: str, profile: bool
) -> Figures:
    """Prefill `running` requests, then time `steps` decode steps."""
    draw = random.Random(0)  # noqa: S311  (the same prompts in every run)
    num_tokens = NUM_WARM_UP + steps + steps // 2 + 50
    llm = LLM(
        folder, device="cpu", max_num_seqs=max(running, 2), max_num_batched_tokens=4096,
        max_frames_in_flight=frames, scheduler=scheduler,
        num_blocks=running * -(-(NUM_PROMPT + num_tokens) // 16) + 20,
    )  # fmt: skip
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for _ in range(running):
        llm.add_request([draw.randrange(2, VOCAB_SIZE) for _ in range(NUM_PROMPT)], params)
    while len(llm.step()) < running:
        pass  # prompts are prefilled
    for _ in range(NUM_WARM_UP):
        llm.step()
    wall, process = [], []
    profiler = cProfile.Profile() if profile else None
    for _ in range(steps):
        if profiler is not None:
            profiler.enable()
        started = time.perf_counter(), time.process_time()
        chunks = llm.step()
        wall.append(time.perf_counter() - started[0])
        process.append(time.process_time() - started[1])
        if profiler is not None:
            profiler.disable()
        assert len(chunks) == running, "a step that is no decode of all requests"
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    read = []
    for _ in range(steps // 2):
        start = time.perf_counter()
        assert len([*llm.step()]) == running
        read.append(time.perf_counter() - start)
    return Figures(
        running, steps, frames, scheduler, 1e3 * statistics.median(wall),
        1e3 * statistics.median(process), 1e3 * statistics.quantiles(wall, n=10)[-1],
        1e3 * statistics.median(read),
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--scheduler", default="host")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Figures] = []
    stubs: dict[str, Any] = {
        "blockstep.impl.engine.model.Model.forward": forward,
        "blockstep.impl.engine.model.Model.compute_logits": compute_logits,
        "blockstep.impl.engine.runner.sample_tokens": sample_tokens,
    }
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        for target, stub in stubs.items():
            patch(target, stub).start()
        for frames, running in product(args.frames, args.running):
            figures = measure(Path(name), running, args.steps, frames, args.scheduler, args.profile)
            found.append(figures)
            print(
                f"{frames} in flight, {running:4} running: wall {figures.wall_ms:.3f} ms a step "
                f"(90 % below {figures.wall_p90_ms:.3f}), process {figures.process_ms:.3f} ms; "
                f"read {figures.read_ms:.3f} ms"
            )
    if args.json:
        record = {
            "figures": [asdict(one) for one in found],
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
