"""Memory: the effects of loads, stores, atomics and barriers, in three variants.

A GPU runs the lanes of a program in warps, each at its own speed. Between two barriers the order in
which one thread sees the stores of another is undefined.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from blockstep.kernels.numpied.values import to, wrap

POISON: Final = 0x5A5A5A5A
"""Value of a lane that did not load, if `other` was not given."""


MOST_KNOWN: Final = 1_000
"""Most arguments whose flat arrays are kept."""
ATOMICS: Final = frozenset(
    f"atomic_{do}" for do in ("add", "and", "cas", "max", "min", "or", "xchg")
)


class Memory:
    """Every store is visible at once. An access out of bounds is an IndexError, here and below.

    Tensors are flat arrays, offsets count elements.
    """

    unread: int = 0
    """Value of a lane that did not load."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.findings: list[str] = []
        """Each finding once, with the lines of both accesses."""
        self._flat: dict[int, tuple[Any, Any]] = {}

    def flatten(self, argument: Any) -> Any:
        """Return an argument as kernels see it: tensors as flat arrays that share their memory."""
        known = self._flat.get(id(argument))
        if known is not None and known[0] is argument:
            return known[1]
        flat = argument
        if isinstance(argument, np.ndarray):
            flat = argument.reshape(-1)
            if not np.shares_memory(flat, argument) and argument.size:
                raise ValueError("a tensor must be contiguous; pass a copy")
        elif isinstance(argument, tuple) and any(isinstance(x, np.ndarray) for x in argument):
            fields = map(self.flatten, argument)
            flat = type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)
        if isinstance(argument, np.ndarray | tuple):
            if len(self._flat) > MOST_KNOWN:
                self._flat.clear()
            self._flat[id(argument)] = argument, flat
        return flat

    def start(self) -> None:
        """Begin a program."""

    def barrier(self) -> None:
        """Synchronise all threads of the program."""

    def load(self, array: Any, offset: Any = 0, mask: Any = None, other: Any = None) -> Any:
        """Do `tl.load(array + offset, mask, other)`."""
        if isinstance(offset, np.ndarray):
            if mask is None:
                return self._read(array, offset)
            other = self.unread if other is None else other
            if not isinstance(mask, np.ndarray):
                if mask:
                    return self._read(array, offset)
                return np.full(offset.shape, other, array.dtype)
            if mask.shape != offset.shape:
                mask = np.broadcast_to(mask, offset.shape)
            loaded = np.empty(offset.shape, array.dtype)
            loaded.fill(other)
            loaded[mask] = self._read(array, offset[mask])
            return loaded
        if mask is None or _is_true(mask, "tl.load"):
            return self._read_one(array, offset)
        other = self.unread if other is None else other
        return int(other) if array.dtype == np.int32 else array.dtype.type(other)

    def store(self, array: Any, offset: Any, value: Any, mask: Any = None) -> None:
        """Do `tl.store(array + offset, value, mask)`."""
        if not isinstance(offset, np.ndarray):
            if mask is None or _is_true(mask, "tl.store"):
                if not 0 <= offset < array.size:
                    raise _outside(array, offset)
                self._write_one(array, offset, to(value, array.dtype.type))
            return
        if isinstance(value, np.ndarray):
            if value.shape != offset.shape:
                value = np.broadcast_to(value, offset.shape)
        else:
            value = to(value, array.dtype.type)
        active = offset
        if mask is not None:
            if not isinstance(mask, np.ndarray) or mask.shape != offset.shape:
                mask = np.broadcast_to(mask, offset.shape)
            value = value[mask] if isinstance(value, np.ndarray) else value
            active = offset[mask]
        self._write(array, active, value, offset)

    def atomic(
        self, do: str, array: Any, offset: Any, *values: Any, mask: Any = None, **_: Any
    ) -> Any:
        """Do an atomic on each lane by itself; return the values before it."""
        if not isinstance(offset, np.ndarray):
            _is_true(mask, "an atomic")
            before = self.atomic(do, array, np.array([offset]), *values, mask=mask)[0]
            return before if array.dtype == np.int64 else int(before)
        mask = np.broadcast_to(True if mask is None else mask, offset.shape)
        lanes = [np.broadcast_to(value, offset.shape) for value in values]
        before = np.full(offset.shape, self.unread, array.dtype)
        inside = _inside(array, offset[mask])
        self.note_atomic(array, inside)
        for lane in self.order(np.argwhere(mask)):
            at = tuple(lane)
            place = int(offset[at])
            before[at] = array[place]
            array[place] = _changed(do, array[place], *(x[at] for x in lanes))
        return before

    def order(self, lanes: Any) -> Any:
        """Return the lanes in the order in which they run."""
        return lanes

    def note_atomic(self, array: Any, offset: Any) -> None:
        """Note that atomics access these places."""

    def _read(self, array: Any, offset: Any) -> Any:
        """Return the values at the places of active lanes."""
        try:
            return array[_index(array, offset)]
        except IndexError:
            _inside(array, offset)
            raise

    def _read_one(self, array: Any, offset: Any) -> Any:
        if not 0 <= offset < array.size:
            raise _outside(array, offset)
        return array.item(offset) if array.dtype == np.int32 else array[offset]

    def _write_one(self, array: Any, offset: Any, value: Any) -> None:
        array[offset] = value

    def _write(self, array: Any, offset: Any, value: Any, _vector: Any) -> None:
        try:
            array[_index(array, offset)] = value
        except IndexError:
            _inside(array, offset)
            raise


class HeldBack(Memory):
    """Stores are delayed until the next barrier, lanes run in a random order, unloaded lanes are
    poison.

    A kernel whose result differs from that with `Memory` lacks a barrier, or depends on timing.
    """

    unread = POISON

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.held: list[tuple[Any, Any, Any]] = []

    def start(self) -> None:
        """Make the stores of the program before visible."""
        self.barrier()

    def barrier(self) -> None:
        """Make all stores visible."""
        for array, offset, value in self.held:
            array[offset] = value
        self.held.clear()

    def order(self, lanes: Any) -> Any:
        """Return the lanes in a random order."""
        return self.random.permutation(lanes)

    def _write_one(self, array: Any, offset: Any, value: Any) -> None:
        self.held.append((array, offset, value))

    def _write(self, array: Any, offset: Any, value: Any, _vector: Any) -> None:
        offset = _inside(array, offset).reshape(-1)
        if isinstance(value, np.ndarray):
            order = self.random.permutation(offset.size)
            offset, value = offset[order], value.reshape(-1)[order]
        self.held.append((array, offset, value))


@dataclass(slots=True)
class Shadow:
    """The last accesses of each place of a tensor, by the number of the access."""

    array: Any
    writes: Any
    reads: Any


class Watched(Memory):
    """Two accesses of one place, one of them a store, must have a barrier between them.

    Stores through one vector of pointers are in order, since each lane is stored by one thread. A
    load and a store are not: if a vector has fewer lanes than the program has threads, many threads
    load a lane, and one of them may load after the store.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.shadows: dict[int, Shadow] = {}
        self.lines: list[str] = [""]
        """The source line of each access since the last barrier."""
        self.vectors: list[Any] = [None]
        """Bytes of each store's vector of pointers, to compare it with others; None for a scalar.
        """
        self.first = 1
        """Number of the first access since the last barrier."""

    def start(self) -> None:
        """Begin a program: it is ordered after the ones before."""
        self.barrier()

    def barrier(self) -> None:
        """Order all later accesses after all earlier ones."""
        self.first += len(self.lines)
        self.lines, self.vectors = [], []

    def note_atomic(self, array: Any, offset: Any) -> None:
        """Note atomics: they are ordered among themselves, and count as stores against other
        accesses."""
        self._note_write(array, offset.reshape(-1), "atomic", None)

    def _read(self, array: Any, offset: Any) -> Any:
        inside = _inside(array, offset)
        self._note_read(array, inside.reshape(-1))
        return array[inside]

    def _read_one(self, array: Any, offset: Any) -> Any:
        value = super()._read_one(array, offset)
        self._note_read(array, np.array([offset]))
        return value

    def _write_one(self, array: Any, offset: Any, value: Any) -> None:
        self._note_write(array, np.array([offset]), None, value)
        array[offset] = value

    def _write(self, array: Any, offset: Any, value: Any, _vector: Any) -> None:
        inside = _inside(array, offset).reshape(-1)
        value = value.reshape(-1) if isinstance(value, np.ndarray) else value
        self._note_write(array, inside, _vector.tobytes(), value)
        array[inside] = value
        if (array[inside] != value).any():
            self._find("STORED-TWICE", find_line())

    def _shadow(self, array: Any) -> Shadow:
        shadow = self.shadows.get(id(array))
        if shadow is None or shadow.array is not array:
            numbers = np.zeros(array.size, np.int64)
            shadow = self.shadows[id(array)] = Shadow(array, numbers, numbers.copy())
        return shadow

    def _access(self, vector: Any) -> int:
        self.lines.append(find_line())
        self.vectors.append(vector)
        return self.first + len(self.lines) - 1

    def _note_read(self, array: Any, offset: Any) -> None:
        shadow, now = self._shadow(array), self._access(None)
        self._compare("STORE-LOAD", shadow.writes[offset], now, None)
        shadow.reads[offset] = now

    def _note_write(self, array: Any, offset: Any, vector: Any, value: Any) -> None:
        shadow, now = self._shadow(array), self._access(vector)
        # Stores of one value may be in any order.
        writes = shadow.writes[offset]
        writes = writes if value is None else writes[array[offset] != value]
        self._compare("STORE-STORE", writes, now, (vector,))
        self._compare("LOAD-STORE", shadow.reads[offset], now, None)
        shadow.writes[offset] = now

    def _compare(self, kind: str, before: Any, now: int, same: tuple[Any] | None) -> None:
        """Check an access against those of the same places since the last barrier.

        `same`: the vector of pointers, accesses through which are ordered with this one.
        """
        if before.size == 0 or before.max() < self.first:
            return
        for number in np.unique(before[before >= self.first]).tolist():
            if same is None or self.vectors[number - self.first] != same[0]:
                lines = self.lines
                self._find(kind, lines[number - self.first], lines[now - self.first])

    def _find(self, kind: str, *lines: str) -> None:
        finding = f"{kind} {' -> '.join(lines)}"
        if finding not in self.findings:
            self.findings.append(finding)


def find_line() -> str:
    """Return the line of the kernel that is running, as `function:line`."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def _inside(array: Any, offset: Any) -> Any:
    """Return the places, after checking that each is within the tensor."""
    if offset.size and (offset.min() < 0 or offset.max() >= array.size):
        outside = offset[(offset < 0) | (offset >= array.size)]
        raise _outside(array, outside.flat[0])
    return offset


def _index(array: Any, offset: Any) -> Any:
    """Return the places so that numpy checks them: a negative one must not count from the end."""
    return offset.view(np.uint32) if offset.dtype == np.int32 else _inside(array, offset)


def _outside(array: Any, offset: Any) -> IndexError:
    return IndexError(
        f"OUT-OF-BOUNDS {find_line()}: element {int(offset)} of a tensor of {array.size}"
    )


def _is_true(mask: Any, what: str) -> bool:
    if isinstance(mask, np.ndarray):
        raise TypeError(f"{what} at {find_line()}: a mask of lanes needs an offset of lanes")
    return bool(mask)


def _changed(do: str, was: Any, value: Any, new: Any = None) -> Any:
    """Return the new value at a place, which wraps around."""
    match do:
        case "add":
            changed: Any = int(was) + int(value)
            return wrap(changed) if was.dtype == np.int32 else np.int64(changed)
        case "min":
            return min(was, value)
        case "max":
            return max(was, value)
        case "and":
            return was & value
        case "or":
            return was | value
        case "xchg":
            return value
        case "cas":
            return new if was == value else was
    raise AssertionError(do)
