"""Fixtures: every test of a kernel runs on both implementations, on the available device.

Without a GPU the Triton kernels are interpreted on CPU tensors; with one they are compiled. Triton
reads `TRITON_INTERPRET` when a kernel is decorated, so it is set before any kernel is imported.
Tests that need the compiler (`test_compiled.py`) run it in another process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from kernel_support.interpreter import speed_up
from kernel_support.sanitizers import sanitize

from blockstep.kernels import use_backend

HAS_TRITON = find_spec("triton") is not None
"""It has no wheels but for Linux; elsewhere the reference is all that can be tested."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if HAS_TRITON and DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    speed_up()


@pytest.fixture
def device() -> str:
    """Return the device of the tensors of a test."""
    return DEVICE


@pytest.fixture(params=["torch", "triton"] if HAS_TRITON else ["torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the implementation under test; an interpreted kernel runs under the sanitizer."""
    with use_backend(request.param):
        if request.param == "torch" or DEVICE == "cuda":
            yield request.param
            return
        with sanitize() as sanitizer:
            yield request.param
        assert sanitizer.findings == []
