"""What must be so before any test is imported, and after each.

Triton reads `TRITON_INTERPRET` when it is imported, for functions of its own, and transformers
imports it. Without a GPU all kernels are interpreted; what needs the compiler runs it in another
process.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # models are tiny: threads of several workers only wait for each other


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is the same on a slow machine, where it would stand among lines of progress."""
    console = sys.modules.get("blockstep.conformance.command.console")
    if console is not None:
        monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 1e6)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """An illegal address breaks all that this process asks of the GPU afterwards.

    So a worker of xdist ends there, and another one goes on with the next test.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)
