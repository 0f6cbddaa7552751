"""Values: the operations of `triton.language` on what stands for tensors here.

A vector is a numpy array of int32, int64 or bool; a scalar of 32 bits is a Python int, one of 64
bits is a `np.int64`, so that both promote as they do in Triton. Nothing is changed in place.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np

INT32_END: Final = 1 << 31


def wrap(value: Any) -> Any:
    """A scalar that grew beyond 32 bits, cut as a register cuts it."""
    return (int(value) + INT32_END) % (2 * INT32_END) - INT32_END


def narrow(value: Any) -> Any:
    """A constant that needs 64 bits has them."""
    if type(value) is int and not -INT32_END <= value < INT32_END:
        return np.int64(value)
    return value


def to(value: Any, dtype: Any) -> Any:
    """`value.to(dtype)`, `tl.cast`."""
    if isinstance(value, np.ndarray):
        return value.astype(dtype)
    if dtype is np.int32:
        value = int(value)
        return value if -INT32_END <= value < INT32_END else wrap(value)
    return dtype(value)


def invert(value: Any) -> Any:
    """`~value`: a bool is one bit."""
    return not value if isinstance(value, bool) else ~value


def divide(a: Any, b: Any) -> Any:
    """`a // b`, rounded to zero like C."""
    quotient = a // b
    if _is_positive(a) and _is_positive(b):
        return quotient
    return quotient + ((quotient < 0) & (quotient * b != a))


def modulo(a: Any, b: Any) -> Any:
    """`a % b`, with the sign of `a` like C."""
    if _is_positive(a) and _is_positive(b):
        return a % b
    return a - divide(a, b) * b


def shift_right(a: Any, b: Any) -> Any:
    """`a >> b`; the sign stays."""
    return (wrap(a) if type(a) is int else a) >> b


def _is_positive(value: Any) -> bool:
    return bool(value.min(initial=0) >= 0 if isinstance(value, np.ndarray) else value >= 0)


@cache
def arange(start: int, end: int) -> Any:
    """`tl.arange`."""
    made = np.arange(start, end, dtype=np.int32)
    made.flags.writeable = False
    return made


def full(shape: Any, value: Any, dtype: Any) -> Any:
    """`tl.full`; of the shape (), a scalar."""
    return np.full(shape, value, dtype) if len(shape) else to(value, dtype)


def zeros(shape: Any, dtype: Any) -> Any:
    """`tl.zeros`."""
    return full(shape, 0, dtype)


def broadcast_to(value: Any, *shape: Any) -> Any:
    """`tl.broadcast_to`."""
    return np.broadcast_to(value, shape[0] if isinstance(shape[0], tuple) else shape)


def _is_wide(a: Any, b: Any) -> bool:
    return isinstance(a, np.int64) or isinstance(b, np.int64)


def _is_vector(a: Any, b: Any) -> bool:
    return isinstance(a, np.ndarray) or isinstance(b, np.ndarray)


def where(condition: Any, a: Any, b: Any) -> Any:
    """`tl.where`."""
    if isinstance(condition, np.ndarray) or _is_vector(a, b):
        if type(a) is int and type(b) in (int, bool):
            a = np.int32(a)
        elif type(b) is int and isinstance(a, bool):
            b = np.int32(b)
        return np.where(condition, a, b)
    chosen = a if condition else b
    return np.int64(chosen) if _is_wide(a, b) else chosen


def minimum(a: Any, b: Any) -> Any:
    """`tl.minimum`."""
    if _is_vector(a, b):
        return np.minimum(a, b)
    return np.int64(min(a, b)) if _is_wide(a, b) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """`tl.maximum`."""
    if _is_vector(a, b):
        return np.maximum(a, b)
    return np.int64(max(a, b)) if _is_wide(a, b) else max(a, b)


def cdiv(a: Any, b: Any) -> Any:
    """`tl.cdiv`."""
    return divide(a + b - 1, b)


def _told(value: Any) -> Any:
    """What a reduction leaves: a vector, or a scalar."""
    if isinstance(value, np.ndarray):
        return value
    return value if isinstance(value, np.int64) else int(value)


def _of(value: Any) -> Any:
    """The type that a vector is reduced in."""
    return np.int64 if value.dtype == np.int64 else np.int32


def reduce_sum(value: Any, axis: Any = None) -> Any:
    """`tl.sum`."""
    return _told(np.add.reduce(value, axis, _of(value)))


def reduce_max(value: Any, axis: Any = None) -> Any:
    """`tl.max`."""
    return _told(np.maximum.reduce(value, axis))


def reduce_min(value: Any, axis: Any = None) -> Any:
    """`tl.min`."""
    return _told(np.minimum.reduce(value, axis))


def argmax(value: Any, axis: Any) -> Any:
    """`tl.argmax`; the first of equals."""
    found = value.argmax(axis)
    return found.astype(np.int32) if isinstance(found, np.ndarray) else int(found)


def argmin(value: Any, axis: Any) -> Any:
    """`tl.argmin`; the first of equals."""
    found = value.argmin(axis)
    return found.astype(np.int32) if isinstance(found, np.ndarray) else int(found)


def cumsum(value: Any, axis: Any = 0) -> Any:
    """`tl.cumsum`."""
    return np.add.accumulate(value, axis, _of(value))


FUNCTIONS: Final[dict[str, Any]] = {
    "arange": arange, "argmax": argmax, "argmin": argmin, "broadcast_to": broadcast_to,
    "cast": to, "cdiv": cdiv, "cumsum": cumsum, "full": full, "max": reduce_max,
    "maximum": maximum, "min": reduce_min, "minimum": minimum, "sum": reduce_sum, "where": where,
    "zeros": zeros,
}  # fmt: skip
"""By their names in `triton.language`."""
TYPES: Final = {"int1": np.bool_, "int32": np.int32, "int64": np.int64}
