"""Compilation of all launched kernels for an H100, on any machine.

The compiler runs in another process, since Triton interprets in this one. A spilled register or one
register too many is a failure. `KERNELS_EVERY=1` compiles the whole matrix of head sizes, groups
and rules (20 minutes the first time) instead of one of each kind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_support
import pytest
from kernel_support.compiled import Compiled

pytest.importorskip("triton")
EVERY = os.environ.get("KERNELS_EVERY") == "1"
REGISTERS_MAX = {
    # 64 let 1,024 threads live on a multiprocessor: enough to hide the latency of memory.
    "scatter_kernel": 64, "move_kernel": 64, "copy_in_sequence_kernel": 64,
    "prepare_kernel": 64, "merge_kernel": 64, "commit_kernel": 64, "finish_kernel": 64,
    "stage_kernel": 64, "keep_kernel": 64,
    "decide_kernel": 128,  # eight warps, two programs on a multiprocessor
    "plan_kernel": 128,  # once per step
    "attention_kernel": 255,  # all there are; the accumulator lives in registers
    "gate_kernel": 64, "norm_kernel": 128, "rotate_kernel": 128,
    "scan_kernel": 128, "choose_kernel": 128,
    "product_kernel": 168,  # three programs on a multiprocessor
    "vector_kernel": 120,  # four, and five unless its rows are long
    "rows_kernel": 64, "tokens_kernel": 64, "end_kernel": 64,
}  # fmt: skip
LAYERS = {
    "gate_kernel", "norm_kernel", "rotate_kernel", "scan_kernel", "choose_kernel",
    "product_kernel", "vector_kernel",
}  # fmt: skip
BURSTS = {"rows_kernel", "tokens_kernel", "end_kernel"}
SHARED_MAX = 227 * 1024


def compile_apart(which: str) -> Any:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    support = str(Path(kernel_support.__path__[0]).parent)
    paths = [support, *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-m", "kernel_support.compiled", which, *(["--every"] if EVERY else [])],
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize(
    ("which", "kernels"),
    [
        ("attention", {"attention_kernel", "plan_kernel"}),
        ("others", {*REGISTERS_MAX} - {"attention_kernel", "plan_kernel"} - LAYERS - BURSTS),
        ("layers", LAYERS),
        ("bursts", BURSTS),
    ],
)
def test_every_kernel_fits_an_h100(which: str, kernels: set[str]) -> None:
    found = [Compiled(**one) for one in compile_apart(which)]
    assert {compiled.kernel for compiled in found} == kernels
    spilled = [compiled for compiled in found if compiled.stack > 0]
    assert not spilled
    too_many = [c for c in found if c.registers > REGISTERS_MAX[c.kernel] or c.shared > SHARED_MAX]
    assert not too_many
    hasty = {c.kernel for c in found if not c.waits}
    assert hasty <= {"norm_kernel", "vector_kernel"}  # their weights were written long before


def test_a_step_of_another_size_needs_no_new_compilation() -> None:
    """A compilation takes a second or more, during which no request is served."""
    assert compile_apart("variants") == {
        "step_triton.prepare_kernel": 1,
        "step_triton.merge_kernel": 1,
        "step_triton.commit_kernel": 1,
        "step_triton.stage_kernel": 1,
        "step_triton.keep_kernel": 1,
        "attention_triton.plan_kernel": 1,
        "attention_triton.attention_kernel": 2,  # for few rows of queries, and for many
        "layers_triton.norm_kernel": 1,
        "layers_triton.gate_kernel": 1,
        "layers_triton.rotate_kernel": 1,
        "products_triton.product_kernel": 2,  # gated or not
        "products_triton.vector_kernel": 2,
        "sampling_triton.scan_kernel": 1,
        "sampling_triton.choose_kernel": 1,
        "bursts_triton.rows_kernel": 1,
        "bursts_triton.tokens_kernel": 1,
        "bursts_triton.end_kernel": 1,
    }
