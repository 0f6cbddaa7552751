"""Values: the operations of `triton.language` on numpy arrays and Python numbers.

A vector is a numpy array of int32, int64 or bool; a scalar of 32 bits is a Python int, one of 64
bits is a `np.int64`, so that both promote as they do in Triton. Nothing is changed in place.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np

INT32_END: Final = 1 << 31


def wrap(value: Any) -> Any:
    """Return a scalar that grew beyond 32 bits, truncated as in a register."""
    return (int(value) + INT32_END) % (2 * INT32_END) - INT32_END


def narrow(value: Any) -> Any:
    """Return a constant; as an int64 if it needs 64 bits."""
    if type(value) is int and not -INT32_END <= value < INT32_END:
        return np.int64(value)
    return value


def to(value: Any, dtype: Any) -> Any:
    """Do `value.to(dtype)` or `tl.cast`."""
    if isinstance(value, np.ndarray):
        return value.astype(dtype)
    if dtype is np.int32:
        value = int(value)
        return value if -INT32_END <= value < INT32_END else wrap(value)
    return dtype(value)


def invert(value: Any) -> Any:
    """Do `~value`: a bool is one bit."""
    return not value if isinstance(value, bool) else ~value


def divide(a: Any, b: Any) -> Any:
    """Do `a // b`, rounded to zero as in C."""
    quotient = a // b
    if _is_positive(a) and _is_positive(b):
        return quotient
    return quotient + ((quotient < 0) & (quotient * b != a))


def modulo(a: Any, b: Any) -> Any:
    """Do `a % b`, with the sign of `a` as in C."""
    if _is_positive(a) and _is_positive(b):
        return a % b
    return a - divide(a, b) * b


def shift_right(a: Any, b: Any) -> Any:
    """Do `a >> b`, which keeps the sign."""
    return (wrap(a) if type(a) is int else a) >> b


def _is_positive(value: Any) -> bool:
    return bool(value.min(initial=0) >= 0 if isinstance(value, np.ndarray) else value >= 0)


@cache
def arange(start: int, end: int) -> Any:
    """Do `tl.arange`."""
    made = np.arange(start, end, dtype=np.int32)
    made.flags.writeable = False
    return made


def full(shape: Any, value: Any, dtype: Any) -> Any:
    """Do `tl.full`; the shape () makes a scalar."""
    return np.full(shape, value, dtype) if len(shape) else to(value, dtype)


def zeros(shape: Any, dtype: Any) -> Any:
    """Do `tl.zeros`."""
    return full(shape, 0, dtype)


def broadcast_to(value: Any, *shape: Any) -> Any:
    """Do `tl.broadcast_to`."""
    return np.broadcast_to(value, shape[0] if isinstance(shape[0], tuple) else shape)


def _is_wide(a: Any, b: Any) -> bool:
    return isinstance(a, np.int64) or isinstance(b, np.int64)


def _is_vector(a: Any, b: Any) -> bool:
    return isinstance(a, np.ndarray) or isinstance(b, np.ndarray)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Do `tl.where`."""
    if isinstance(condition, np.ndarray) or _is_vector(a, b):
        if type(a) is int and type(b) in (int, bool):
            a = np.int32(a)
        elif type(b) is int and isinstance(a, bool):
            b = np.int32(b)
        return np.where(condition, a, b)
    chosen = a if condition else b
    return np.int64(chosen) if _is_wide(a, b) else chosen


def minimum(a: Any, b: Any) -> Any:
    """Do `tl.minimum`."""
    if _is_vector(a, b):
        return np.minimum(a, b)
    return np.int64(min(a, b)) if _is_wide(a, b) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """Do `tl.maximum`."""
    if _is_vector(a, b):
        return np.maximum(a, b)
    return np.int64(max(a, b)) if _is_wide(a, b) else max(a, b)


def cdiv(a: Any, b: Any) -> Any:
    """Do `tl.cdiv`."""
    return divide(a + b - 1, b)


def _to_result(value: Any) -> Any:
    """Return the result of a reduction: a vector, or a scalar."""
    if isinstance(value, np.ndarray):
        return value
    return value if isinstance(value, np.int64) else int(value)


def _of(value: Any) -> Any:
    """Return the type that a vector is reduced in."""
    return np.int64 if value.dtype == np.int64 else np.int32


def reduce_sum(value: Any, axis: Any = None) -> Any:
    """Do `tl.sum`."""
    return _to_result(np.add.reduce(value, axis, _of(value)))


def reduce_max(value: Any, axis: Any = None) -> Any:
    """Do `tl.max`."""
    return _to_result(np.maximum.reduce(value, axis))


def reduce_min(value: Any, axis: Any = None) -> Any:
    """Do `tl.min`."""
    return _to_result(np.minimum.reduce(value, axis))


def argmax(value: Any, axis: Any) -> Any:
    """Do `tl.argmax`; the first of equals wins."""
    found = value.argmax(axis)
    return found.astype(np.int32) if isinstance(found, np.ndarray) else int(found)


def argmin(value: Any, axis: Any) -> Any:
    """Do `tl.argmin`; the first of equals wins."""
    found = value.argmin(axis)
    return found.astype(np.int32) if isinstance(found, np.ndarray) else int(found)


def cumsum(value: Any, axis: Any = 0) -> Any:
    """Do `tl.cumsum`."""
    return np.add.accumulate(value, axis, _of(value))


FUNCTIONS: Final[dict[str, Any]] = {
    "arange": arange, "argmax": argmax, "argmin": argmin, "broadcast_to": broadcast_to,
    "cast": to, "cdiv": cdiv, "cumsum": cumsum, "full": full, "max": reduce_max,
    "maximum": maximum, "min": reduce_min, "minimum": minimum, "sum": reduce_sum, "where": where,
    "zeros": zeros,
}  # fmt: skip
"""Operations by their names in `triton.language`."""
TYPES: Final = {"int1": np.bool_, "int32": np.int32, "int64": np.int64}
