"""Argument checks of the public kernels: one clear error before anything is launched.

No check here reads the contents of a tensor on a device, since that would wait for the device. On
the CPU contents are checked too (`check_range`), because there it is cheap.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
FP8_CAPABILITY_MIN = (8, 9)
CACHES = (*FLOATS, FP8)
HEAD_SIZES = (16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Supported head sizes. Models have 64 and more; the smaller ones are for tests."""


class Arguments:
    """The tensors of one call: all on one device, with dimensions that agree by name."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, str]] = {}
        """The size of each named dimension, and the argument that set it."""
        self.first: tuple[str, torch.device] | None = None

    def check(
        self, name: str, tensor: Tensor, dims: str, *dtypes: torch.dtype, rows: bool = False
    ) -> None:
        """Check one tensor; `dims` is for example `"num_tokens num_kv_heads head_size"`.

        With `rows`, its last dimension must be contiguous. A dimension written as a number must
        have that size; `*` matches any; `n+1` is one more than the dimension `n`.

        Raises:
            TypeError: not a tensor, of another dtype, or of one that its GPU can't compute.
            ValueError: another shape, device or layout.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor, but is {type(tensor).__name__}")
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(
                f"{name}: must be {wanted}, but is {str(tensor.dtype).removeprefix('torch.')}; "
                f"convert it with {name}.to(...)"
            )
        self._check_device(name, tensor)
        if tensor.dtype == FP8 and tensor.is_cuda:
            check_fp8(name, tensor.device)
        self._check_shape(name, tensor, dims.split())
        if rows and tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: its last dimension must be contiguous, but has stride "
                f"{tensor.stride(-1)}; pass {name}.contiguous()"
            )

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if self.first is None:
            self.first = (name, tensor.device)
        elif tensor.device != self.first[1]:
            raise ValueError(
                f"{name}: must be on the device of {self.first[0]}, {self.first[1]}, but is on "
                f"{tensor.device}; move it with {name}.to({str(self.first[1])!r})"
            )

    def _check_shape(self, name: str, tensor: Tensor, dims: list[str]) -> None:
        shape = tuple(tensor.shape)
        text = "[" + ", ".join(dims) + "]"
        if len(shape) != len(dims):
            raise ValueError(
                f"{name}: must have {len(dims)} dimensions, {text}, but its shape is {shape}"
            )
        for index, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            if dim == "*":
                continue
            stem, plus, _ = dim.partition("+1")
            count = size - 1 if plus else size
            if stem.isdigit():
                known, giver = int(stem), "the layout"
            else:
                known, giver = self.sizes.setdefault(stem, (count, name))
            if count != known or count < 0:
                raise ValueError(
                    f"{name}: dimension {index} of {text} must be {known + bool(plus)} as in "
                    f"{giver}, but its shape is {shape}; pass tensors that agree on {stem}"
                )

    def __getitem__(self, dim: str) -> int:
        return self.sizes[dim][0]


def check_fp8(name: str, device: torch.device) -> None:
    """Refuse an fp8 tensor on a GPU without fp8 instructions; the compiler's error names no
    argument.

    Raises:
        TypeError: the GPU is older than compute capability 8.9.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY_MIN:
        raise TypeError(
            f"{name}: must not be float8_e4m3fn on {device}, whose compute capability is "
            f"{capability[0]}.{capability[1]}; fp8 needs 8.9 (Ada, Hopper or later), so take a "
            f"cache in the dtype of the model"
        )


def check_range(name: str, values: Tensor, low: int, high: int, of: str) -> None:
    """Refuse values outside `low <= value < high` on the CPU; on a GPU the caller must ensure it.

    Raises:
        ValueError: a value is outside.
    """
    if values.is_cuda or values.numel() == 0:
        return
    least, most = (int(bound) for bound in torch.aminmax(values))
    if least < low or most >= high:
        wrong = least if least < low else most
        raise ValueError(
            f"{name}: must hold {of} in {low} <= x < {high}, but holds {wrong}; "
            f"build it for the tensors of this call"
        )


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not positive and finite.

    Raises:
        ValueError: the number is not positive, or not finite.
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: must be positive and finite, but is {value}; pass another")


def check_offsets(name: str, offsets: Tensor, total: int, of: str) -> None:
    """Refuse offsets that do not ascend from 0 to `total`; only on the CPU.

    Raises:
        ValueError: the offsets do not ascend from 0 to `total`.
    """
    if offsets.is_cuda:
        return
    values = offsets.tolist()
    ascends = all(a <= b for a, b in pairwise(values))
    if values[0] != 0 or values[-1] != total or not ascends:
        raise ValueError(
            f"{name}: must ascend from 0 to {total}, {of}, but is {values[:8]}"
            f"{'...' if len(values) > 8 else ''}; pass the cumulative sum of the counts"
        )


def check_together(**tensors: Tensor | None) -> None:
    """Refuse arguments of which some are given and some are not.

    Raises:
        ValueError: one is missing.
    """
    missing = [name for name, tensor in tensors.items() if tensor is None]
    if missing and len(missing) < len(tensors):
        raise ValueError(f"{missing[0]}: is missing; give all of {', '.join(tensors)}, or none")
