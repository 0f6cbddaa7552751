"""Transfer: copies of numbers to the device and back, for which neither side waits.

A copy between the device and pageable memory waits for everything that the device was given before
it, including the forward pass of the step. So every copy starts from, or ends in, pinned memory of
its own. That memory is not written again: torch reuses it only after the copy has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

ALIGNMENT = 8
"""Each array of a `Layout` begins at a multiple of this many bytes."""


def to_device(values: np.ndarray, device: str | torch.device) -> torch.Tensor:
    """Return the array on the device, in the order of the current stream; on a CPU without a
    copy."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_over(tensor: torch.Tensor, values: np.ndarray) -> None:
    """Copy the array over a tensor of the same shape, in the order of the current stream."""
    given = torch.from_numpy(values)
    tensor.copy_(given.pin_memory() if tensor.is_cuda else given, non_blocking=True)


class Part(NamedTuple):
    """One array in a piece of memory that holds several."""

    first: int
    """Byte at which it begins."""
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the array as a view of `flat` [num_bytes] uint8."""
        return flat[self.first : self.end].view(self.dtype).view(self.shape)


class Layout:
    """Places of several arrays in one piece of memory, one after the other."""

    def __init__(self, arrays: Iterable[tuple[tuple[int, ...], torch.dtype]] = ()) -> None:
        self.parts: list[Part] = []
        self.num_bytes = 0
        for shape, dtype in arrays:
            self.add(shape, dtype)

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> Layout:
        """Return the layout of arrays in their order, as `send` writes them."""
        return cls((array.shape, torch.from_numpy(array).dtype) for array in arrays)

    def add(self, shape: tuple[int, ...], dtype: torch.dtype) -> Part:
        """Append one more array; return its place."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        part = Part(self.num_bytes, self.num_bytes + size, shape, dtype)
        self.parts.append(part)
        self.num_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return part


def send(
    arrays: Sequence[np.ndarray], device: torch.device, into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the arrays on the device, after one copy; on a CPU the arrays themselves.

    `into` [num_bytes] uint8: device memory to receive them, from its beginning, laid out as by
    `Layout`; it must be large enough. None: new memory.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(array) for array in arrays]
    layout = Layout.of(arrays)
    staged = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True)
    host = staged.numpy()
    for array, part in zip(arrays, layout.parts, strict=True):
        host[part.first : part.end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if into is None:
        flat = staged.to(device, non_blocking=True)
    else:
        flat = into[: layout.num_bytes]
        flat.copy_(staged, non_blocking=True)
    return [part.view(flat) for part in layout.parts]


class Incoming:
    """A tensor of the device that is being copied to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Start the copy after all work that the current stream was given so far."""
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.clone()
        else:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> np.ndarray:
        """Wait for the copy, and return the values."""
        if self._event is not None:
            self._event.synchronize()
        values: np.ndarray = self._host.numpy()
        return values
