"""Choice between the two implementations: the torch reference or the Triton kernel.

Triton is imported when a kernel is first needed, so that a CPU can serve without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from types import ModuleType
from typing import Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

Backend: TypeAlias = Literal["torch", "triton"]
P = ParamSpec("P")
R = TypeVar("R")
_chosen: ContextVar[Backend | None] = ContextVar("blockstep_kernels_backend", default=None)


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Inside the `with`, run this implementation whatever the device of the tensors.

    `"torch"` runs the reference, on CUDA tensors too. `"triton"` on CPU tensors needs Triton's
    interpreter: `TRITON_INTERPRET=1` in the environment before the first kernel is imported.

    Raises:
        ValueError: `backend` is neither.
    """
    if backend not in ("torch", "triton"):
        raise ValueError(f"backend: must be 'torch' or 'triton', but is {backend!r}; name one")
    token = _chosen.set(backend)
    try:
        yield
    finally:
        _chosen.reset(token)


def find_kernels(concept: str, tensor: Tensor) -> ModuleType | None:
    """Return the module of a concept's Triton kernels if this tensor needs them, else None.

    Raises:
        ModuleNotFoundError: they are needed, and Triton is not installed.
    """
    if (_chosen.get() or ("triton" if tensor.is_cuda else "torch")) == "torch":
        return None
    try:
        return importlib.import_module(f"blockstep.kernels.{concept}_triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ModuleNotFoundError(
            "tensors on a GPU need Triton, which is not installed; install 'blockstep[gpu]'",
            name="triton",
        ) from error


def on_device_of_first(launch: Callable[P, R]) -> Callable[P, R]:
    """Return a launch that makes the device of its first tensor the current one while it runs.

    Triton launches on the current device, whatever device the pointers belong to.
    """

    @wraps(launch)
    def guarded(*args: P.args, **named: P.kwargs) -> R:
        with torch.cuda.device_of(args[0]):
            return launch(*args, **named)

    return guarded


@cache
def is_dependent_launch(device: torch.device) -> bool:
    """Return whether kernels on a device may begin before the kernels in front of them have ended.

    Programmatic dependent launch needs compute capability 9.0. Such a kernel waits by itself, with
    `tl.extra.cuda.gdc_wait()`, before it reads what an earlier kernel wrote, or overwrites what an
    earlier kernel reads. The weights of norms and products are read before: the launch in front of
    such a kernel must not write them.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def list_launch_options(device: torch.device) -> dict[str, bool]:
    """Return the arguments of a launch that let it begin before earlier kernels have ended."""
    if is_dependent_launch(device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@cache
def count_processors(device: torch.device) -> int:
    """Return the multiprocessors of the device; one if programs are interpreted one by one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
