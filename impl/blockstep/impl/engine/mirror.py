"""Mirror: the scheduler's state in the memory of a device, kept from burst to burst.

Between two bursts only rows that the host wrote are copied: new requests, and commands. The whole
state is copied to the device after the host has run a kernel of the scheduler itself, and to the
host when the host reads the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blockstep.impl.device import layout
from blockstep.impl.device.inbox import Inbox
from blockstep.impl.engine.host_to_device import copy_over, to_device


class Mirror:
    """The state of `inbox` as tensors on `device`; on a CPU they share the memory of the arrays."""

    def __init__(self, inbox: Inbox, device: torch.device) -> None:
        self.inbox, self.device = inbox, device
        self.num_bytes_sent = 0
        """Bytes copied to the device."""
        self.num_bytes_read = 0
        """Bytes copied to the host."""
        self.state: Any = None
        """The tensors; None before the first burst."""
        self.num_makes = 0
        """Number of times the tensors were allocated; a graph captured with older ones is invalid.
        """

    @property
    def is_shared(self) -> bool:
        """Whether arrays and tensors are the same memory."""
        return str(self.device) == "cpu"

    @property
    def is_current(self) -> bool:
        """Whether the tensors lack only the rows that the host wrote."""
        return self.state is not None and not self.inbox.is_ahead

    @property
    def arrays(self) -> layout.State:
        """The tensors as numpy arrays; only if they are in the host's memory."""
        return layout.State(*(tensor.numpy() for tensor in self.state))

    def send_all(self) -> None:
        """Copy the host's arrays, which must not be behind, to the tensors."""
        inbox = self.inbox
        own = [torch.from_numpy(array) for array in inbox.state]
        if self.state is None or self._is_longer(own):
            if not self.is_shared:
                own = [array.to(self.device, copy=True) for array in own]
            self.state = layout.State(*own)
            self.num_makes += 1
        elif not self.is_shared:
            for kept, array in zip(self.state, own, strict=True):
                kept.copy_(array)
        if not self.is_shared:
            self.num_bytes_sent += sum(array.nbytes for array in inbox.arrays)
        inbox.is_ahead = False
        inbox.written.clear()

    def _is_longer(self, own: Sequence[torch.Tensor]) -> bool:
        """Whether the host's arrays were reallocated, so that new tensors are needed."""
        if self.is_shared:
            return any(a.data_ptr() != b.data_ptr() for a, b in zip(self.state, own, strict=True))
        return any(a.shape != b.shape for a, b in zip(self.state, own, strict=True))

    def send_written(self) -> None:
        """Copy the rows that the host wrote since the tensors were last brought up to date."""
        if not self.is_shared:
            by_name: dict[str, set[int]] = {}
            for name, row in self.inbox.written:
                by_name.setdefault(name, set()).add(row)
            for name, rows in by_name.items():
                index = np.array(sorted(rows), np.int64)
                self.send(name, index, getattr(self.inbox.arrays, name)[index])
        self.inbox.written.clear()

    def send(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Copy `values` into some rows of a tensor."""
        index, new = to_device(rows, self.device), to_device(values, self.device)
        getattr(self.state, name).index_copy_(0, index, new)
        self.num_bytes_sent += rows.nbytes + values.nbytes

    def send_row(self, name: str, values: np.ndarray) -> None:
        """Copy `values` over a whole tensor of one dimension."""
        copy_over(getattr(self.state, name), values)
        if not self.is_shared:
            self.num_bytes_sent += values.nbytes

    def read_all(self) -> None:
        """Copy the tensors to the host's arrays."""
        self.send_written()
        if self.is_shared:
            return
        for array, tensor in zip(self.inbox.arrays, self.state, strict=True):
            torch.from_numpy(array).copy_(tensor)
            self.num_bytes_read += array.nbytes
