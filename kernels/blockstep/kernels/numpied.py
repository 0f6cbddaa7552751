"""Numpied: a Triton kernel's own source, run by numpy, thirty times faster than it is interpreted.

For kernels of one program that look at integers. A kernel and what it calls are read as text,
their decorators are dropped, and `tl` is a stand-in of a few functions, so that Triton is not
needed. What the stand-in does not know, and what Python runs otherwise than Triton compiles it, is
refused when the text is read.

Stores are seen at once, or, to find a barrier that lacks, only behind the next barrier: a GPU may
do either, so a right kernel leaves the same state both ways.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

Kernel = Callable[..., None]


class RefusedError(Exception):
    """A kernel that cannot be run so: where, why, and what to write instead."""


class At:
    """A pointer: a place in a tensor, or a place for each lane."""

    __slots__ = ("name", "place", "tensor")

    def __init__(self, name: str, tensor: Any, place: Any = 0) -> None:
        self.name, self.tensor, self.place = name, tensor, place

    def __add__(self, offset: Any) -> At:
        return At(self.name, self.tensor, self.place + offset)


class Memory:
    """Loads and stores, with bounds.

    Args:
        holds_back: whether a store is seen only behind the next barrier.
    """

    def __init__(self, *, holds_back: bool = False) -> None:
        self.holds_back = holds_back
        self._held: list[tuple[Any, Any, Any]] = []

    def load(self, at: At, mask: Any = None, other: Any = 0) -> Any:
        """`other` where the mask is not; numpy would count a negative place from the end."""
        place, tensor = at.place, at.tensor
        if not np.ndim(place):
            if mask is not None and not mask:
                return tensor.dtype.type(other)
            if not 0 <= place < tensor.size:
                _check(at, np.asarray(place))
            return tensor[place]
        if mask is None:
            _check(at, place)
            return tensor[place]
        mask = np.broadcast_to(mask, place.shape)
        found = np.full(place.shape, other, tensor.dtype)
        used = place[mask]
        _check(at, used)
        found[mask] = tensor[used]
        return found

    def store(self, at: At, value: Any, mask: Any = None) -> None:
        """Lanes must not disagree about what one place holds."""
        if not np.ndim(at.place):
            if mask is None or mask:
                self._store_one(at, value)
            return
        place = at.place
        mask = np.broadcast_to(True if mask is None else mask, place.shape)
        place, value = place[mask], np.broadcast_to(value, mask.shape)[mask]
        _check(at, place)
        if self.holds_back:
            _check_lanes(at, place, value)
            self._held.append((at.tensor, place, value))
        else:
            at.tensor[place] = value

    def _store_one(self, at: At, value: Any) -> None:
        if not 0 <= at.place < at.tensor.size:
            _check(at, np.asarray(at.place))
        if self.holds_back:
            self._held.append((at.tensor, at.place, value))
        else:
            at.tensor[at.place] = value

    def barrier(self) -> None:
        """From here on everything is seen."""
        for tensor, place, value in self._held:
            tensor[place] = value
        self._held.clear()


def _check(at: At, place: Any) -> None:
    if place.size and (place.min() < 0 or place.max() >= at.tensor.size):
        wrong = sorted({*place.ravel().tolist()} - {*range(at.tensor.size)})
        raise IndexError(f"OUT-OF-BOUNDS {at.name}[{wrong[0]}] of {at.tensor.size}")


def _check_lanes(at: At, place: Any, value: Any) -> None:
    order = np.argsort(place, kind="stable")
    place, value = place[order], value[order]
    differing = (place[1:] == place[:-1]) & (value[1:] != value[:-1])
    if differing.any():
        raise IndexError(f"TWO-LANES {at.name}[{place[1:][differing][0]}] gets different values")


def load_kernels(files: Sequence[Path], memory: Memory) -> dict[str, Kernel]:
    """The functions of these files, those that are called first; named as they are there.

    Raises:
        RefusedError: a file uses what this cannot run as Triton does.
    """
    space: dict[str, Any] = {"tl": _make_language(memory), "_to": _to}
    for file in files:
        tree = ast.parse(file.read_text())
        _refuse(tree, file)
        tree.body = [one for one in tree.body if not _is_known(one, space)]
        exec(compile(_Rewriting().visit(tree), str(file), "exec"), space)  # noqa: S102 - our files
    return space


def launch(kernel: Kernel, memory: Memory, tensors: Any, dims: Any) -> None:
    """Run a kernel of one program on a named tuple of numpy arrays, which it changes."""
    made = zip(tensors._fields, tensors, strict=True)
    kernel(type(tensors)(*[At(name, tensor.reshape(-1)) for name, tensor in made]), dims)
    memory.barrier()


def _to(value: Any, kind: Any) -> Any:
    return value.astype(kind) if isinstance(value, np.ndarray | np.generic) else kind(value)


def _where(condition: Any, here: Any, there: Any) -> Any:
    if any(map(np.ndim, (condition, here, there))):
        return np.where(condition, here, there)
    return here if condition else there


_LANGUAGE: Final[Mapping[str, Any]] = {
    "arange": lambda first, end: np.arange(first, end, dtype=np.int32),
    "cumsum": lambda lanes, axis: np.cumsum(lanes, axis, dtype=lanes.dtype),
    "sum": lambda lanes, axis: lanes.sum(axis, dtype=lanes.dtype),
    "max": lambda lanes, axis: lanes.max(axis),
    "min": lambda lanes, axis: lanes.min(axis),
    "where": _where,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "full": np.full,
    "cast": lambda value, kind: kind(value),
    "int32": np.int32,
    "int64": np.int64,
    "constexpr": lambda value: value,
}


def _make_language(memory: Memory) -> SimpleNamespace:
    own = {"load": memory.load, "store": memory.store, "debug_barrier": memory.barrier}
    return SimpleNamespace(**_LANGUAGE, **own)


def _is_known(statement: ast.stmt, space: Mapping[str, Any]) -> bool:
    """An import of Triton, or of what is there already."""
    if isinstance(statement, ast.Import):
        return all(name.name.startswith("triton") for name in statement.names)
    if isinstance(statement, ast.ImportFrom):
        return all(name.name in space for name in statement.names)
    return False


_REFUSED: Final = (
    (ast.For, "for: a while loop has one type for each variable"),
    (ast.Break, "break: put a flag into the condition of the loop"),
    (ast.Continue, "continue: put the rest of the loop under an if"),
    (ast.BoolOp, "and, or: both sides are evaluated when compiled; write & or |, or nest"),
    (ast.Not, "not: write == 0"),
)


def _refuse(tree: ast.AST, file: Path) -> None:
    """What Python would run otherwise than Triton compiles it."""
    for node in ast.walk(tree):
        for kind, reason in _REFUSED:
            if isinstance(node, kind):
                raise RefusedError(f"{file.name}:{getattr(node, 'lineno', '?')}: {reason}")
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            raise RefusedError(
                f"{file.name}:{node.lineno}: a chain of comparisons: write & between"
            )
        if isinstance(node, ast.While) and any(isinstance(x, ast.Return) for x in ast.walk(node)):
            raise RefusedError(f"{file.name}:{node.lineno}: return in a loop: use a flag")
        is_tl = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "tl"
        own = (*_LANGUAGE, "load", "store", "debug_barrier")
        if is_tl and isinstance(node, ast.Attribute) and node.attr not in own:
            raise RefusedError(f"{file.name}:{node.lineno}: tl.{node.attr} is not known here")


class _Rewriting(ast.NodeTransformer):
    """`x.to(kind)` is a method of Triton's tensors; annotations and decorators are Triton's."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            to = ast.copy_location(ast.Name("_to", ast.Load()), node)
            return ast.copy_location(ast.Call(to, [node.func.value, *node.args], []), node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
        return node
