"""Transfer: what the host has made goes to the device, and the host does not wait for it.

A copy from ordinary memory waits for all that the device was given before: the forward pass of the
step, where the copy is of what is needed behind it. So each copy starts from pinned memory of its
own. Nobody writes there again: torch gives it to somebody else only after the copy has run.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(values: np.ndarray, device: str | torch.device) -> torch.Tensor:
    """The array on the device, in the order of the current stream; on the CPU the array itself."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
