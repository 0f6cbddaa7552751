"""Sanitizers of interpreted kernels: addresses out of bounds, and missing synchronization.

The interpreter runs programs one after the other and each on one thread, and reads whatever memory
an address points to. Here every load and store of interpreted kernels is looked at.

Programs are ordered by atomics alone: what a program did before a barrier and an atomic operation
that releases is seen by a program whose own operation on that address acquires it. Atomics are not
checked against plain loads and stores of their address. `atomic_cas` is refused: kernels that spin
cannot be interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np


@dataclass(frozen=True)
class Access:
    """The last access of an address, and its line in the source."""

    program: tuple[int, int, int]
    since: int
    """Number of barriers before it, over all programs."""
    pointers: int | None
    """Identifies a vector of pointers; None for a scalar."""
    line: str


@dataclass
class Order:
    """The order between programs that atomics establish during a launch."""

    known: dict[tuple[int, int, int], dict[tuple[int, int, int], int]] = field(default_factory=dict)
    """Per program, the number of barriers before the last known release of each other program."""
    released: dict[int, dict[tuple[int, int, int], int]] = field(default_factory=dict)
    """The same for each address of an atomic."""

    def pass_on(self, now: Access, address: int) -> None:
        """An atomic operation that acquires and releases."""
        known = self.known.setdefault(now.program, {})
        released = self.released.setdefault(address, {})
        known[now.program] = now.since
        for program in {*known, *released}:
            last = max(known.get(program, -1), released.get(program, -1))
            known[program] = released[program] = last

    def holds(self, before: Access, now: Access) -> bool:
        """Whether an access of one program is seen by a later access of another."""
        if before.program == now.program:
            return False
        return self.known.get(now.program, {}).get(before.program, -1) > before.since


@dataclass
class Sanitizer:
    """Logs the addresses of each load and store of a launch, and finds errors in them."""

    findings: list[str] = field(default_factory=list)
    """Findings, each once: `KIND line before -> line after`."""
    tensors: list[Any] = field(default_factory=list)
    """Arguments of the launch."""
    allowed: list[Any] = field(default_factory=list)
    """The addresses of each, in order; made at the first access."""
    program: tuple[int, int, int] = (0, 0, 0)
    barriers: int = 0
    log: list[tuple[Access, str, Any]] = field(default_factory=list)
    """Accesses of the launch: the access, its kind (`load`, `store`, `atomic` or
    `relaxed`), and its addresses."""

    def start_program(self, *index: int) -> None:
        """A barrier orders one program only, and so does its start."""
        self.program = index  # type: ignore[assignment]
        self.barriers += 1

    def find(self, kind: str, before: str, after: str) -> None:
        """Note a finding."""
        finding = f"{kind} {before} -> {after}" if before else f"{kind} {after}"
        if finding not in self.findings:
            self.findings.append(finding)

    def access(self, pointers: Any, mask: Any, kind: str) -> Any:
        """One access of a vector of pointers, or of a scalar; the mask of what may happen.

        What is out of bounds does not happen: it would be the memory of this process, or the
        lengths by which a loop ends, where they lie behind what is written.
        """
        if not self.allowed:
            self.allowed = [np.unique(list_addresses(tensor)) for tensor in self.tensors]
        line = find_line()
        active = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        inside = active & self.is_in_one_tensor(pointers.data, active)
        if (active & ~inside).any():
            self.find("OUT-OF-BOUNDS", "", line)
        vector = hash(pointers.data.tobytes()) if pointers.data.size > 1 else None
        now = Access(self.program, self.barriers, vector, line)
        self.log.append((now, kind, pointers.data[inside]))
        return type(mask)(inside, mask.dtype)

    def is_in_one_tensor(self, addresses: Any, active: Any) -> Any:
        """Which addresses are in the tensor that the first active one is in."""
        inside = np.zeros(addresses.shape, bool)
        if not active.any():
            return inside
        first = addresses[active][:1]
        for of_tensor in self.allowed:  # several, where one tensor is a part of another
            if is_in(first, of_tensor).all():
                found = is_in(addresses, of_tensor)
                inside = max(inside, found, key=np.count_nonzero)
        return inside

    def finish_launch(self) -> None:
        """Judge what was logged. Launches are ordered: nothing is carried over."""
        stores = [addresses for _, kind, addresses in self.log if kind == "store"]
        written = np.unique(np.concatenate([np.zeros(0, np.uint64), *stores]))
        reads: dict[int, Access] = {}
        writes: dict[int, Access] = {}
        order = Order()
        for now, kind, addresses in self.log:
            is_store = kind == "store"
            if kind in ("atomic", "relaxed"):
                for address in addresses.tolist() if kind == "atomic" else ():
                    order.pass_on(now, address)
                continue
            if is_store and len(np.unique(addresses)) < addresses.size:
                self.find("WRITTEN-TWICE", "", now.line)
            for address in addresses[is_in(addresses, written)].tolist():
                before, read = writes.get(address), reads.get(address)
                if before is not None and not order.holds(before, now):
                    self.compare("WRITE-WRITE" if is_store else "WRITE-READ", before, now)
                if is_store and read is not None and not order.holds(read, now):
                    self.compare("READ-WRITE", read, now)
                (writes if is_store else reads)[address] = now
        self.tensors, self.log, self.allowed = [], [], []

    def compare(self, kind: str, before: Access, now: Access) -> None:
        """Two accesses of one address, of which one is a write."""
        if before.program != now.program:
            self.find(f"BETWEEN-PROGRAMS {kind}", before.line, now.line)
        elif before.since == now.since:
            # Scalars are written by one thread, in order. What is read and then written through the
            # same vector of pointers was needed for what is written.
            one_thread = kind == "WRITE-WRITE" and now.pointers is None is before.pointers
            in_place = kind == "READ-WRITE" and now.pointers is not None
            if not one_thread and not (in_place and now.pointers == before.pointers):
                self.find(f"NO-BARRIER {kind}", before.line, now.line)


def find_line() -> str:
    """The line of a kernel that is being interpreted."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if "triton/" not in name and name != __file__:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


def list_addresses(tensor: Any) -> Any:
    """The addresses of the elements of a tensor, exactly: a slice has gaps."""
    offsets: Any = np.zeros(1, np.uint64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.uint64) * np.uint64(stride)).ravel()
    return np.uint64(tensor.data_ptr()) + offsets * np.uint64(tensor.element_size())


def is_in(addresses: Any, ordered: Any) -> Any:
    """Which addresses are among these."""
    if ordered.size == 0:
        return np.zeros(addresses.shape, bool)
    return ordered[np.searchsorted(ordered, addresses).clip(max=ordered.size - 1)] == addresses


@contextmanager
def sanitize() -> Iterator[Sanitizer]:
    """Look at every access of the kernels interpreted inside the `with`."""
    from triton.runtime import interpreter

    sanitizer = Sanitizer()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    barrier, start, convert = (
        builder.create_barrier,
        builder.set_grid_idx,
        interpreter._implicit_cvt,
    )
    call, atomic = executor.__call__, builder.create_atomic_rmw

    def sanitized_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        mask = sanitizer.access(pointers, mask, "load")
        return load(self, pointers, mask, *others)

    def sanitized_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        mask = sanitizer.access(pointers, mask, "store")
        return store(self, pointers, value, mask, *others)

    def counted_barrier(self: Any) -> Any:
        sanitizer.barriers += 1
        return barrier(self)

    def started(self: Any, *index: int) -> Any:
        sanitizer.start_program(*index)
        return start(self, *index)

    def converted(value: Any) -> Any:
        if hasattr(value, "data_ptr"):
            sanitizer.tensors.append(value)
        return convert(value)

    def called(self: Any, *args: Any, **named: Any) -> Any:
        done = call(self, *args, **named)
        sanitizer.finish_launch()
        return done

    def sanitized_atomic(
        self: Any, operation: Any, pointers: Any, value: Any, mask: Any, order: Any, scope: Any
    ) -> Any:
        # One that is relaxed orders nothing.
        kind = "atomic" if "ACQUIRE_RELEASE" in str(order) else "relaxed"
        mask = sanitizer.access(pointers, mask, kind)
        return atomic(self, operation, pointers, value, mask, order, scope)

    def refused(self: Any, *args: Any) -> Any:
        raise NotImplementedError(
            "the sanitizer does not model atomic_cas: use atomic_add or atomic_xchg, acq_rel"
        )

    with (
        patch.multiple(
            builder, create_masked_load=sanitized_load, create_masked_store=sanitized_store,
            create_barrier=counted_barrier, set_grid_idx=started, create_atomic_cas=refused,
            create_atomic_rmw=sanitized_atomic,
        ),
        patch.object(interpreter, "_implicit_cvt", converted),
        patch.object(executor, "__call__", called),
    ):  # fmt: skip
        yield sanitizer
