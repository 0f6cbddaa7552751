"""Decode speed of the model engine on one GPU, by scheduler, with a bound and other engines.

    python -m benchmarks.engine [-n RUNNING ...] [--only WAY ...] [--seconds S] [--json FILE]
    python -m benchmarks.engine --warm      # load and run each way once: compiles every kernel
    python -m benchmarks.engine --tiny      # a model of two layers, on a CPU too

A random Llama of 1.1 billion parameters in bfloat16 is made on the device. For each way (scheduler
on the host or on the device, one frame in flight or two) and each number of running requests,
decode steps are timed from the host, and 16 more are profiled. Reported are:

- milliseconds per decode step (median of three runs of 32 steps) and tokens per second;
- busy: the time per step in which at least one kernel runs, and its share of the step;
- exposed: the time per step in which only kernels of the device's scheduler run;
- the bound: bytes of weights and of KV that a step reads, at the rate of a device-to-device copy
  measured in this run (read + write), and the percentage of it that is reached;
- time to load, and from there to the first token, compilation of the kernels included;
- how many requests get the same tokens as with `host`;
- transformers' `generate_batch` and vLLM on the same weights, or why they were not measured.

Exit status: 0, or 1 if one of our ways raised. Without a GPU and without `--tiny`: 2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from blockstep.impl.engine import LLM, SamplingParams

SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 2_048,
    "intermediate_size": 5_632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4_096,
}
TINY_SHAPE = {
    **SHAPE,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WAYS: dict[str, dict[str, Any]] = {
    "host": {"max_frames_in_flight": 1},
    "two frames": {"max_frames_in_flight": 2},
    "device": {"scheduler": "device", "steps_per_fence": 16, "max_frames_in_flight": 1},
    "device, two frames": {
        "scheduler": "device", "steps_per_fence": 16, "max_frames_in_flight": 2,
    },
}  # fmt: skip
NUM_PROMPT = 128
NUM_RUNS, NUM_STEPS, NUM_PROFILED, NUM_COMPARED = 3, 32, 16, 48
NUM_OUTPUTS = 400
"""More than are ever measured, so that no request ends meanwhile."""


class Span(NamedTuple):
    """A kernel or copy on the device; times in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Model:
    """The measured model; computes the bytes that one decode step has to read."""

    folder: Path
    shape: Mapping[str, int]
    dtype: str
    num_parameters: int
    weight_bytes: int
    """Bytes of all weights except the embedding table, of which a step reads one row per
    request."""
    kv_bytes: int
    """Bytes of KV of one token, in all layers."""

    def compute_bytes(self, running: int, context: int) -> int:
        """Return the bytes that a decode step reads for `running` requests at this length."""
        return self.weight_bytes + running * context * self.kv_bytes


@dataclass
class Row:
    """Figures of one way at one number of running requests; None: not measured."""

    ms_per_step: float
    ms_per_step_runs: list[float]
    tokens_per_second: float
    bound_ms: float
    percent_of_bound: float
    num_alike: int | None = None
    """Requests whose tokens equal those of `host`."""
    busy_ms: float | None = None
    busy_percent: float | None = None
    scheduler_ms: float | None = None
    exposed_ms: float | None = None
    exposed_percent: float | None = None
    """Share of the step in which only kernels of the device's scheduler run."""
    launches_per_step: float | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    """The longest: name, microseconds and launches per step."""
    gaps: list[dict[str, Any]] = field(default_factory=list)
    """The longest times without a kernel: the kernels before and behind, microseconds and number
    per step."""


def make_model(folder: Path, shape: dict[str, int], device: str) -> Model:
    """Save a random Llama of this shape in `folder`: bfloat16 on a GPU, float32 on a CPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, initializer_range=0.05, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    per_head = shape["hidden_size"] // shape["num_attention_heads"]
    heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    return Model(
        folder, shape, str(dtype), sum(weight.numel() for weight in model.parameters()),
        num_bytes - model.model.embed_tokens.weight.nbytes, 2 * heads * per_head * dtype.itemsize,
    )  # fmt: skip


def make_prompts(running: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`running` random prompts of `NUM_PROMPT` tokens."""
    draw = random.Random(seed)  # noqa: S311  (the same prompts in every run)
    return [draw.choices(range(3, vocab_size), k=NUM_PROMPT) for _ in range(running)]


def measure_copy(device: str) -> float:
    """Bytes per second of a copy within the device's memory, read + write."""
    if device != "cpu":
        from benchmarks.kernels import measure_rates  # noqa: PLC0415 - needs a GPU

        return float(measure_rates()["copy"])
    source = torch.zeros(1 << 24, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return float(2 * source.numel() / median(seconds))


def synchronize(device: str) -> None:
    """Wait until the device has done everything."""
    if device != "cpu":
        torch.cuda.synchronize()


def step_until(llm: LLM, num_tokens: int) -> int:
    """Step until at least `num_tokens` tokens were delivered; returns how many were.

    Raises:
        RuntimeError: all requests have ended before.
    """
    made = 0
    while made < num_tokens:
        if not llm.has_unfinished_requests:
            raise RuntimeError(f"all requests ended after {made} of {num_tokens} tokens")
        made += sum(len(chunk.token_ids) for chunk in llm.step())
    return made


def compute_union(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of the spans is under way."""
    total, covered = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, covered))
        covered = max(covered, span.end)
    return total


def summarize(spans: list[Span], steps: float, ms_per_step: float, own: set[str]) -> dict[str, Any]:
    """Fields of `Row` that follow from a profile of `steps` steps.

    `own` names the kernels of the device's scheduler. Shares are of `ms_per_step`, which was
    measured without the profiler.
    """
    busy = compute_union(spans)
    exposed = busy - compute_union(span for span in spans if span.name not in own)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[span.name].append(span.end - span.start)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:16]
    per_step = 1e3 * steps
    return {
        "busy_ms": busy / per_step,
        "busy_percent": 100 * busy / per_step / ms_per_step,
        "scheduler_ms": sum(sum(times[name]) for name in own) / per_step,
        "exposed_ms": exposed / per_step,
        "exposed_percent": 100 * exposed / per_step / ms_per_step,
        "launches_per_step": len(spans) / steps,
        "kernels": [
            {"name": name, "us": sum(one) / steps, "launches": len(one) / steps}
            for name, one in longest
        ],
        "gaps": list_gaps(spans, steps),
    }


def list_gaps(spans: Iterable[Span], steps: float) -> list[dict[str, Any]]:
    """Return the times in which no kernel runs, by the kernels around them, the longest first."""
    gaps: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    last: Span | None = None
    for span in sorted(spans, key=lambda span: span.start):
        if last is not None and span.start > last.end:
            gaps[last.name[:60], span.name[:60]].append(span.start - last.end)
        if last is None or span.end > last.end:
            last = span
    longest = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:12]
    return [
        {"before": before, "behind": behind, "us": sum(one) / steps, "number": len(one) / steps}
        for (before, behind), one in longest
    ]


def profile_steps(llm: LLM, running: int) -> tuple[list[Span], float]:
    """Kernels and copies of some decode steps, and how many steps those were."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - not on a CPU

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        made = step_until(llm, NUM_PROFILED * running)
        torch.cuda.synchronize()
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return spans, made / running


def get_scheduler_kernels() -> set[str]:
    """Names of the kernels that the device's scheduler launches."""
    step = import_module("blockstep.impl.device.step")
    return {name for name in dir(step) if name.endswith("_kernel")}


def measure_row(llm: LLM, model: Model, running: int, rate: float, device: str) -> Row:
    """Time decode steps of `running` requests, none of which arrives or ends meanwhile."""
    params = SamplingParams(max_tokens=NUM_OUTPUTS, ignore_eos=True)
    prompts = make_prompts(running, model.shape["vocab_size"], 1)
    names = [llm.add_request(prompt, params) for prompt in prompts]
    before = step_until(llm, 3 * running)  # the prompts are done
    runs, made = [], before
    for _ in range(NUM_RUNS):
        synchronize(device)
        began = time.perf_counter()
        num_tokens = step_until(llm, NUM_STEPS * running)
        synchronize(device)
        runs.append(1e3 * (time.perf_counter() - began) * running / num_tokens)
        made += num_tokens
    context = NUM_PROMPT + (before + made) // (2 * running)  # of a request, on average
    took, bound = median(runs), 1e3 * model.compute_bytes(running, context) / rate
    row = Row(took, runs, 1e3 * running / took, bound, 100 * bound / took)
    if device != "cpu":
        spans, steps = profile_steps(llm, running)
        for name, value in summarize(spans, steps, took, get_scheduler_kernels()).items():
            setattr(row, name, value)
    llm.abort(*names)
    for name in names:
        llm.pop_completion(name)
    return row


def count_compiled() -> int:
    """Kernels in Triton's cache: 0 before anything was compiled on this machine."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return sum(1 for _ in folder.glob("*")) if folder.is_dir() else 0


class Bench:
    """Measures ways one after the other, and keeps what was found so far in a file."""

    def __init__(self, model: Model, device: str, sizes: list[int], file: Path | None) -> None:
        self.model, self.device, self.sizes, self.file = model, device, sizes, file
        self.rate = measure_copy(device)
        self.tokens: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        self.found: dict[str, Any] = {
            "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "command": shlex.join(["python", "-m", "benchmarks.engine", *sys.argv[1:]]),
            "bytes_per_second": {"copy": self.rate},
            "model": {**asdict(model), "folder": "", "shape": dict(model.shape)},
            "ways": {},
            "best": {},
            "best_device": {},
            "peers": {},
        }

    def save(self) -> None:
        """Write everything found so far."""
        if self.file is not None:
            self.file.write_text(json.dumps(self.found, indent=2) + "\n")

    def load(self, way: str) -> LLM:
        """Return an engine that runs `way`; notes how long that took."""
        compiled, began, largest = count_compiled(), time.perf_counter(), max(self.sizes)
        llm = LLM(
            self.model.folder, device=self.device, num_blocks=largest * 36 + 64,
            max_num_seqs=largest, max_num_batched_tokens=8_192, max_model_len=1_024, **WAYS[way],
        )  # fmt: skip
        loaded = time.perf_counter()
        self.generate(llm, 1, 2, 1)
        first = time.perf_counter()
        self.found["ways"][way] = {
            "load_s": loaded - began, "first_token_s": first - loaded,
            "compiled_before": compiled, "compiled_after": count_compiled(),
        }  # fmt: skip
        print(f"{way}: loaded in {loaded - began:.1f} s, first token {first - loaded:.1f} s later")
        return llm

    def generate(self, llm: LLM, running: int, seed: int, count: int) -> list[tuple[int, ...]]:
        """`count` tokens of each of `running` prompts."""
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        prompts = make_prompts(running, self.model.shape["vocab_size"], seed)
        return [one.token_ids for one in llm.generate(prompts, params)]

    def run(self, way: str, only_warm: bool) -> None:
        """Load an engine and measure it at each size."""
        llm = self.load(way)
        for running in self.sizes:
            self.generate(llm, running, 2, 40)  # compiles and captures
            if only_warm:
                continue
            row = measure_row(llm, self.model, running, self.rate, self.device)
            made = self.tokens[way, running] = self.generate(llm, running, 1, NUM_COMPARED)
            host = self.tokens.get(("host", running))
            if host is not None:
                row.num_alike = sum(a == b for a, b in zip(made, host, strict=True))
            self.found["ways"][way][f"{running}"] = asdict(row)
            print_row(way, running, row)
            self.save()

    def compare(self) -> None:
        """Note the fastest way of each size, and the fastest with the device's scheduler."""
        for running in self.sizes:
            rows = {
                way: rows[f"{running}"]
                for way, rows in self.found["ways"].items()
                if f"{running}" in rows
            }
            on_device = {way: row for way, row in rows.items() if "scheduler" in WAYS[way]}
            for name, some in (("best", rows), ("best_device", on_device)):
                if some:
                    way = min(some, key=lambda way: rows[way]["ms_per_step"])
                    found = {"way": way, **rows[way], "kernels": [], "gaps": []}
                    self.found[name][f"{running}"] = found
            hosts = [row["ms_per_step"] for way, row in rows.items() if way not in on_device]
            if hosts and on_device:
                best = self.found["best_device"][f"{running}"]
                best["host_by_device"] = min(hosts) / best["ms_per_step"]

    def run_peers(self, deadline: float) -> None:
        """Measure the other engines; one that cannot run is listed with its reason."""
        for running in self.sizes:
            results: dict[str, Any] = {}
            self.found["peers"][f"{running}"] = results
            prompts = make_prompts(running, self.model.shape["vocab_size"], 1)
            for name, run in PEERS.items():
                if time.perf_counter() > deadline:
                    results[name] = "not measured: no time was left"
                    continue
                try:
                    results[name] = run(self.model, prompts, self.device)
                except Exception as error:  # another engine may fail in any way
                    results[name] = f"not measured: {type(error).__name__}: {error}"[:300]
                print(f"{running} running, {name}: {results[name]}")
                self.save()


def print_row(way: str, running: int, row: Row) -> None:
    """Print one line, and one for each of the longest kernels."""
    print(
        f"{running:5} running, {way:<18} {row.ms_per_step:7.3f} ms per step "
        f"{row.tokens_per_second:9,.0f} tokens/s {row.percent_of_bound:5.1f} % of the bound",
        end="",
    )
    if row.busy_ms is not None:
        print(
            f"; busy {row.busy_ms:.3f} ms ({row.busy_percent:.1f} %), only the scheduler "
            f"{row.exposed_ms:.4f} ms, {row.launches_per_step:.0f} launches",
            end="",
        )
    print(f"; tokens as host {row.num_alike}" if row.num_alike is not None else "", flush=True)
    for kernel in row.kernels[:12]:
        print(f"    {kernel['us']:8.1f} us  x{kernel['launches']:6.1f}  {kernel['name'][:84]}")
    for gap in row.gaps[:4]:
        around = f"{gap['before'][:36]} -> {gap['behind'][:36]}"
        print(f"    {gap['us']:8.1f} us  x{gap['number']:6.1f}  without a kernel: {around}")


def run_transformers(
    model: Model, prompts: list[list[int]], device: str, num_tokens: int = 32
) -> dict[str, float]:
    """transformers' continuous batching: tokens per second of a whole call that was warmed up.

    And milliseconds per step, from the times of the first request's tokens.
    """
    loaded = AutoModelForCausalLM.from_pretrained(
        model.folder, dtype="auto", attn_implementation="paged|sdpa"
    ).to(device)
    wanted = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    times: list[float] = []

    def generate(count: int) -> int:
        config = GenerationConfig(max_new_tokens=count, **wanted)
        made = loaded.generate_batch(
            inputs=prompts, generation_config=config, progress_bar=False, record_timestamps=True
        )
        times[:] = next(iter(made.values())).timestamps or []
        return sum(len(one.generated_tokens) for one in made.values())

    generate(2)
    began = time.perf_counter()
    made = generate(num_tokens)
    took = time.perf_counter() - began
    figures = {"tokens": made, "seconds": took, "tokens_per_second": made / took}
    if len(times) > 1:  # its call takes seconds to begin and to end, which no decode step does
        figures["ms_per_step"] = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
    return figures


def run_vllm(
    model: Model, prompts: list[list[int]], _device: str, num_tokens: int = 128
) -> dict[str, float]:
    """vLLM: tokens per second of a whole call that was warmed up."""
    vllm = import_module("vllm")
    llm = vllm.LLM(
        f"{model.folder}", skip_tokenizer_init=True, max_model_len=1_024,
        max_num_seqs=len(prompts), gpu_memory_utilization=0.5,
    )  # fmt: skip
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate(count: int) -> int:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        made = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in made)

    generate(8)
    began = time.perf_counter()
    made = generate(num_tokens)
    took = time.perf_counter() - began
    return {"tokens": made, "seconds": took, "tokens_per_second": made / took}


Peer = Callable[[Model, list[list[int]], str], dict[str, float]]
PEERS: dict[str, Peer] = {"vLLM": run_vllm, "transformers generate_batch": run_transformers}


def main() -> int:
    """Return the command."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-n", type=int, action="append", help="running requests; repeatable")
    parser.add_argument("--only", action="append", choices=WAYS, help="repeatable")
    parser.add_argument("--warm", action="store_true", help="measure load and first token only")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; on a CPU without a GPU")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--seconds", type=float, default=90, help="nothing is begun after them")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        print("benchmarks/engine.py: no CUDA device is available; see --tiny", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logging.disable_progress_bar()
    deadline, failed = began + options.seconds, False
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), TINY_SHAPE if options.tiny else SHAPE, device)
        sizes = options.n or ([4, 1] if options.tiny else [64, 1])
        bench = Bench(model, device, sizes, options.json)
        print(f"{bench.found['device']}, copy {bench.rate / 1e9:.0f} GB/s")
        for way in options.only or WAYS:
            if time.perf_counter() > deadline:
                print(f"{way}: not measured, no time was left")
                failed = True
                continue
            try:
                bench.run(way, options.warm)
            except Exception:  # so that the other ways are measured
                traceback.print_exc()
                failed = True
            if device != "cpu":
                torch.cuda.empty_cache()
        bench.compare()
        bench.save()
        if not (options.warm or options.no_peers):
            bench.run_peers(deadline)
        bench.save()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
