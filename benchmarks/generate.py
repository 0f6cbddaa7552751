"""Throughput of the model engine on a CPU and of transformers: same weights, one batch, one run.

    python benchmarks/generate.py [--rounds N] [--threads N] [--json FILE]

A random model is made (its figures are printed), 16 prompts of 16 to 128 tokens are continued by
64 tokens each, greedily, without an early end. Both sides take turns; medians of all rounds count,
and the ratio is the median of the rounds' ratios, so that a busy moment weighs on both sides
alike. The tokens of both are compared, and how many prompts agree is printed: weights of a random
model leave near ties, which two orders of summation may decide differently.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from blockstep.impl.engine import LLM, SamplingParams

NUM_PROMPTS = 16
NUM_NEW_TOKENS = 64
VOCAB_SIZE = 8192
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


@dataclass
class Figures:
    """Figures of a run."""

    shape: dict[str, Any]
    num_parameters: int
    num_prompts: int
    num_new_tokens: int
    threads: int
    rounds: int
    blockstep_tokens_per_second: float
    transformers_tokens_per_second: float
    ratio: float
    """Ours by theirs: the median of the rounds."""
    ratio_least: float
    """Least ratio of a round."""
    num_prompts_alike: int
    torch: str
    transformers: str
    python: str


def make_prompts() -> list[list[int]]:
    """16 prompts of 16 to 128 tokens."""
    draw = random.Random(0)  # noqa: S311  (the same prompts in every run)
    return [
        [draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randrange(16, 129))]
        for _ in range(NUM_PROMPTS)
    ]


def run_transformers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Run transformers' `generate` on one batch, left-padded, with its default cache and
    attention."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        made = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=NUM_NEW_TOKENS,
            min_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
        )
    rows: list[list[int]] = made[:, longest:].tolist()
    return rows


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Return the seconds of a run, and its result."""
    start = time.perf_counter()
    made = run()
    return time.perf_counter() - start, made


def measure(rounds: int, threads: int) -> Figures:
    """Return both sides by turns, after a round that does not count."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    config = LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    prompts = make_prompts()
    params = SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # Nothing is served from the cache: every round computes every token.
        llm = LLM(folder, device="cpu", kv_cache_bytes=1 << 28, enable_prefix_caching=False)
    sides: dict[str, Callable[[], list[list[int]]]] = {
        "blockstep": lambda: [list(one.token_ids) for one in llm.generate(prompts, params)],
        "transformers": lambda: run_transformers(model, prompts),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    made: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for name, run in sides.items():
            took, made[name] = timed(run)
            if number:
                seconds[name].append(took)
    num_tokens = NUM_PROMPTS * NUM_NEW_TOKENS
    ratios = [theirs / ours for ours, theirs in zip(*seconds.values(), strict=True)]
    ours, theirs = (num_tokens / statistics.median(seconds[name]) for name in sides)
    return Figures(
        shape=SHAPE,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        num_prompts=NUM_PROMPTS,
        num_new_tokens=NUM_NEW_TOKENS,
        threads=threads,
        rounds=rounds,
        blockstep_tokens_per_second=ours,
        transformers_tokens_per_second=theirs,
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        num_prompts_alike=sum(a == b for a, b in zip(*made.values(), strict=True)),
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = measure(args.rounds, args.threads)
    print(
        f"Llama of {figures.num_parameters / 1e6:.1f} M parameters, float32, "
        f"{figures.threads} thread, {figures.num_prompts} prompts, "
        f"{figures.num_new_tokens} tokens each, median of {figures.rounds} rounds\n"
        f"blockstep     {figures.blockstep_tokens_per_second:7.1f} tokens/s\n"
        f"transformers  {figures.transformers_tokens_per_second:7.1f} tokens/s "
        f"({figures.transformers})\n"
        f"ratio         {figures.ratio:7.2f} (least of a round {figures.ratio_least:.2f})\n"
        f"same tokens   {figures.num_prompts_alike:7} of {figures.num_prompts} prompts"
    )
    if args.json:
        args.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
