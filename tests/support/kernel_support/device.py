"""The kernels of the device's scheduler, compiled for an H100 on a machine without one.

    python -m kernel_support.device commit_kernel "1024 rows" "4096 rows"

TRITON_INTERPRET must be unset. Prints a JSON list of `Compiled`, one for each config.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from typing import Any, Final

from blockstep.impl.device.dims import GPU_LANES, Dims, count_gpu_lanes, make_dims
from blockstep.impl.device.launch import compile_kernel
from blockstep.spec.vocabulary import Config, Policy, SpecMethod
from kernel_support.compiled import Compiled, read_resources

NUM_BLOCKS: Final = 65_536
CONFIGS: Final = {
    **{f"{rows} rows": Config(num_blocks=NUM_BLOCKS, max_num_seqs=rows) for rows in GPU_LANES},
    # Triton could not compile this plan while it was known that nothing is cached: its coalescing
    # fails at a loop that never runs.
    "no prefix cache": Config(
        num_blocks=40, block_size=4, max_num_seqs=8, max_model_len=48, enable_prefix_caching=False
    ),
}
"""Kernels that are compiled, by name."""
CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "max_num_seqs": (1, 64, 100, 256, 1_000, 4_096),
    "block_size": (1, 16, 48, 256),
    "policy": (Policy.FCFS, Policy.PRIORITY),
    "enable_prefix_caching": (True, False),
    "enable_chunked_prefill": (True, False),
    "scheduler_reserve_full_isl": (True, False),
}
DRAFTS: Final[tuple[Mapping[str, Any], ...]] = (
    {},
    {"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 3},
    {"spec_method": SpecMethod.EAGLE, "num_speculative_tokens": 4},
)
FRAMES: Final[tuple[Mapping[str, Any], ...]] = (
    {},
    {"async_scheduling": True, "max_frames_in_flight": 2},
)


def list_kinds() -> list[Config]:
    """Return a config for each combination of the values that kernels depend on."""
    fields = [dict(zip(CHOICES, values, strict=True)) for values in product(*CHOICES.values())]
    return [
        Config(
            num_blocks=NUM_BLOCKS, max_num_batched_tokens=8_192, max_model_len=8_192,
            **one, **drafts, **frames,
        )
        for one, drafts, frames in product(fields, DRAFTS, FRAMES)
    ]  # fmt: skip


def make_gpu_dims(config: Config, **lengths: int) -> Dims:
    """The dims of a config on a GPU."""
    return make_dims(config, lanes=count_gpu_lanes(config), **lengths)


def compile_for(name: str, kernel: str) -> Compiled:
    """One kernel of `step` for a config of `CONFIGS`, as a launch would compile it."""
    from triton.backends.compiler import GPUTarget

    start = time.process_time()
    made = compile_kernel(kernel, make_gpu_dims(CONFIGS[name]), GPUTarget("cuda", 90, 32))
    seconds = round(time.process_time() - start, 2)
    registers, stack = read_resources(made.asm["cubin"])
    return Compiled(
        name, kernel, registers, stack, made.metadata.shared, seconds=seconds, waits=True
    )


if __name__ == "__main__":
    made = [asdict(compile_for(name, sys.argv[1])) for name in sys.argv[2:]]
    sys.stdout.write(json.dumps(made) + "\n")
