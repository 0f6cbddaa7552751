"""The benchmark of the kernels without a GPU: it says so, and its cases are calls that run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.kernels import Size, list_cases

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"
SMALL = Size(
    num_seqs=2, context=20, num_heads=2, num_kv_heads=1, head_size=16, num_tokens=32, num_rows=4,
    vocab_size=16, num_copied=2, num_swapped=2,
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it measures")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no CUDA device is available" in done.stderr


def test_every_case_runs() -> None:
    names = []
    for case in list_cases(SMALL, "cpu"):
        case.run()
        for name, make in case.peers.items():
            if name != "flex_attention, paged":  # needs a compiler
                make()()
        assert (case.bound == "launch") == (case.num_bytes == 0)
        names.append(case.name)
    assert len(names) == len(set(names)) == 9
