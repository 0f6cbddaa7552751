"""Interpreted: the engine with kernels run by Triton's interpreter.

Triton reads `TRITON_INTERPRET` when it is imported, for the whole process; if it is not 1, this
module cannot be imported.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

from blockstep.impl.device.dims import Dims
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import launch_kernel
from blockstep.impl.device.layout import State
from blockstep.spec.vocabulary import Config

if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("set TRITON_INTERPRET=1 in the environment: Triton compiles otherwise")


class Interpreted:
    """Runs kernels by Triton's interpreter."""

    def __init__(self) -> None:
        self._torch: Any = import_module("torch")

    def __call__(self, kernel: str, state: State, dims: Dims) -> None:
        """Run one kernel, on tensors that share the memory of the arrays."""
        launch_kernel(kernel, State(*map(self._torch.from_numpy, state)), dims)


@cache
def get_interpreted() -> Interpreted:
    """Return the instance that engines share: it keeps nothing between launches."""
    return Interpreted()


def make_interpreted(config: Config) -> DeviceEngine:
    """Return a `DeviceEngine` whose kernels are interpreted.

    Raises:
        ConfigError: `list_config_problems` finds a problem in the config.
    """
    return DeviceEngine(config, get_interpreted())
