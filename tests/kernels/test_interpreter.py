"""The unpatched interpreter agrees with the patched one, which is faster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kernel_support
import pytest
import torch

pytest.importorskip("triton")

PROGRAM = """
import torch
from kernel_support.oracle import Batch, attention
from blockstep.kernels import paged_attention, prepare_step, rejection_sample, use_backend

ints = torch.tensor([3, 1, 4], dtype=torch.int32)
drafts, ends = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2, 3], dtype=torch.int32)
law = {"temperature": torch.tensor([1.0, 0.0, 0.7]), "seeds": torch.tensor([5, -6, 2**62]),
       "positions": torch.arange(3)}
logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(0))
done = []
for backend in ("torch", "triton"):
    with use_backend(backend):
        step = prepare_step(torch.arange(12).int().view(3, 4), ints, ints, 4)
        done.append([*step, *rejection_sample(logits, drafts, ends, **law)])
assert all(torch.equal(a, b) for a, b in zip(*done, strict=True)), done
arguments, rules = Batch((1, 5), (40, 9)).make()
with use_backend("triton"):
    out = paged_attention(*arguments, **rules)
torch.testing.assert_close(out.double(), attention(*arguments, **rules), atol=2e-5, rtol=2e-5)
print("equal")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted there")
def test_the_unpatched_interpreter_agrees() -> None:
    support = str(Path(kernel_support.__path__[0]).parent)
    paths = os.pathsep.join([support, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr
