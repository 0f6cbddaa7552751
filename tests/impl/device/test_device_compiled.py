"""The kernels of a step, compiled for an H100 on any machine: no register is spilled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import kernel_support
import pytest
from kernel_support.compiled import Compiled
from kernel_support.device import CONFIGS

from blockstep.impl.device.launch import FOLDER

pytest.importorskip("triton")
SHARED_MAX = 16 * 1024
KERNELS = re.findall(r"^def (\w+_kernel)\(", (FOLDER / "step.py").read_text(), re.MULTILINE)
"""All that are launched."""


def compile_apart(kernel: str, *names: str) -> list[Compiled]:
    """Triton may interpret in this process, so the compiler runs in its own."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    support = str(Path(kernel_support.__path__[0]).parent)
    done = subprocess.run(
        [sys.executable, "-m", "kernel_support.device", kernel, *names],
        env={**environment, "PYTHONPATH": os.pathsep.join([support, *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Compiled(**one) for one in json.loads(done.stdout)]


def assert_fits(made: list[Compiled]) -> None:
    assert made
    assert [one for one in made if one.stack or one.shared > SHARED_MAX] == []
    assert max(one.registers for one in made) < 255


def test_a_commit_of_1024_rows_fits_an_h100() -> None:
    assert_fits(compile_apart("commit_kernel", "plain 1024"))


@pytest.mark.soak
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_fits_an_h100(kernel: str) -> None:
    assert_fits(compile_apart(kernel, *CONFIGS))
