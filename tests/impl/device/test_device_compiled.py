"""Compilation of the step's kernels for an H100: variants, registers, and early compilation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_support
import pytest
from kernel_support.compiled import Compiled
from kernel_support.device import CONFIGS, list_kinds, make_gpu_dims

from blockstep.impl.device import launch
from blockstep.impl.device.dims import Dims

pytest.importorskip("triton")
SHARED_MAX = 16 * 1024
MOST_VARIANTS = 12
STACK_OF_4096_ROWS = 4 * 222
"""Bytes: 222 registers were spilled in the kernel that takes 48 us a step on an H200."""
KERNELS = re.findall(r"^def (\w+_kernel)\(", (launch.FOLDER / "step.py").read_text(), re.MULTILINE)
"""All that are launched."""


def compile_apart(kernel: str, *names: str) -> list[Compiled]:
    """Compile in another process, since Triton may interpret in this one."""
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
    """Check that no kernel spills registers up to 1,024 rows."""
    assert made
    for one in made:
        most = STACK_OF_4096_ROWS if one.call == "4096 rows" else 0
        assert one.stack <= most, one
        assert one.shared <= SHARED_MAX, one
        assert one.registers < 255, one


def test_every_kind_of_config_uses_kernels_that_are_tested_here() -> None:
    """Configs change numbers only, so a kernel has at most a dozen variants."""
    compiled = {launch.get_constants(make_gpu_dims(config)) for config in CONFIGS.values()}
    assert len(compiled) <= MOST_VARIANTS
    for config in list_kinds():
        for lengths in ({}, {"slots": 5_000, "stops": 33, "nodes": 300_000}):
            assert launch.get_constants(make_gpu_dims(config, **lengths)) in compiled, config


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_of_1024_rows_fits_an_h100(kernel: str) -> None:
    assert_fits(compile_apart(kernel, "1024 rows"))


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize("kernel", launch.GPU_KERNELS)
def test_kernels_of_an_engine_fit_an_h100_at_64_and_4096_rows(kernel: str) -> None:
    """Left to the soak: 256 rows, and the kernels that only a host launches at 64 and 4,096."""
    assert_fits(compile_apart(kernel, "64 rows", "4096 rows"))


def test_a_plan_without_a_prefix_cache_compiles() -> None:
    assert_fits(compile_apart("plan_kernel", "no prefix cache"))


@pytest.mark.soak
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_fits_an_h100(kernel: str) -> None:
    assert_fits(compile_apart(kernel, *CONFIGS))


@pytest.fixture
def dims() -> Dims:
    return make_gpu_dims(CONFIGS["64 rows"])


def test_no_kernel_is_warmed_up_without_a_gpu(dims: Dims) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    seen: list[tuple[str, int, int]] = []
    launch.warm_up(dims, lambda *step: seen.append(step))
    assert seen == []


def test_kernels_are_warmed_up_once_and_reported(
    dims: Dims, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    made: list[str] = []
    seen: list[tuple[str, int, int]] = []

    def compile_kernel(kernel: str, _: Dims, target: Any = None) -> str:
        made.append(kernel)
        return kernel

    launch._get_compiled.cache_clear()
    monkeypatch.setattr(launch, "compile_kernel", compile_kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for nodes in (0, 300_000):
        config = CONFIGS["64 rows"]
        launch.warm_up(make_gpu_dims(config, nodes=nodes), lambda *step: seen.append(step))
    launch._get_compiled.cache_clear()
    assert made == [*launch.GPU_KERNELS]
    count = len(made)
    one = [(kernel, done, count) for done, kernel in enumerate((*launch.GPU_KERNELS, ""))]
    assert seen == 2 * one
