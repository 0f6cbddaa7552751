"""Set up the environment before any test is imported, and check the GPU after each test.

Triton reads `TRITON_INTERPRET` when it is imported, for functions of its own, and transformers
imports it. Without a GPU all kernels are interpreted; tests that need the compiler run it in
another process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)  # models are tiny: threads of several workers only wait for each other


@pytest.fixture(autouse=True)
def _no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off progress lines, which a slow machine would print into reports."""
    console = sys.modules.get("blockstep.conformance.command.console")
    if console is not None:
        monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 1e6)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """End this process after an illegal memory access.

    The error breaks all later calls to the GPU from this process; xdist starts another worker,
    which runs the next test.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


# Long tables of cases: each commit runs a sample, `--whole` all of them.

SLOW = Path(__file__).with_name("slow.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--whole` and `--quick`."""
    text = "run every case of the tests marked `sampled`, not the sample of this commit"
    parser.addoption("--whole", action="store_true", help=text)
    text = "leave out the tests of tests/slow.txt (made by .ci/slow.py)"
    parser.addoption("--quick", action="store_true", help=text)


@cache
def get_commit() -> str:
    """Return the id of the commit that is tested; "none" outside of a repository."""
    command = ("git", "rev-parse", "--short=12", "HEAD")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return done.stdout.strip()


def pytest_report_header(config: pytest.Config) -> str:
    """Return the line that says which cases a run leaves out."""
    if config.getoption("--quick"):
        return "quick: without the tests of tests/slow.txt and those marked `sampled`"
    if config.getoption("--whole"):
        return "sampled: every case (--whole)"
    return f"sampled: the cases of commit {get_commit()}; all of them: --whole"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of tests marked `sampled(one_in=N)` that are not in the commit's sample.

    A case that is named on the command line is always run. `--quick` leaves out all of them, and
    the tests that are known to be slow.
    """
    named = [one.partition("::")[2] for one in config.args if "::" in one]
    is_quick = config.getoption("--quick")
    if config.getoption("--whole"):
        return
    slow = set(SLOW.read_text().split()) if is_quick else set()
    left_out = []
    for item in items:
        mark = item.get_closest_marker("sampled")
        if any(item.nodeid.endswith(name) for name in named):
            continue
        if item.nodeid.partition("[")[0] in slow or (is_quick and mark is not None):
            left_out.append(item)
        elif mark is not None:
            number = int(sha256(f"{get_commit()} {item.nodeid}".encode()).hexdigest()[:8], 16)
            if number % mark.kwargs["one_in"]:
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in dropped]
