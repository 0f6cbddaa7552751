"""Load: reads kernels from files, and runs one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from blockstep.kernels.numpied.memory import Memory
from blockstep.kernels.numpied.rewrite import make_space, rewrite
from blockstep.kernels.numpied.values import TYPES

Kernel: TypeAlias = Callable[..., None]
_TL: Final = SimpleNamespace(**TYPES, constexpr=lambda value: value)


def load_kernels(
    files: Sequence[Path], memory: Memory, changed: Mapping[Path, str] | None = None
) -> dict[str, Kernel]:
    """Return the functions of these files by name; a file may call those of earlier ones.

    Args:
        files: the sources.
        memory: what their loads and stores do.
        changed: a text that replaces a file's own.

    Raises:
        RefusedError: a file uses something that cannot be run as Triton runs it.
    """
    space: dict[str, Any] = {**make_space(memory), "tl": _TL}
    for file in files:
        text = (changed or {}).get(file) or file.read_text()
        tree = rewrite(ast.parse(text), file.name, space.keys())
        tree.body = [one for one in tree.body if not _is_known(one, space)]
        exec(compile(tree, str(file), "exec"), space)  # noqa: S102 - our files
    return space


def launch(kernel: Kernel, memory: Memory, *args: Any) -> None:
    """Run a kernel of one program on numpy arrays, or named tuples of them, which it changes."""
    memory.start()
    kernel(*[memory.flatten(argument) for argument in args])
    memory.barrier()


def _is_known(statement: ast.stmt, space: Mapping[str, Any]) -> bool:
    """Whether it is an import of Triton, or of something that is defined already."""
    if isinstance(statement, ast.Import):
        return all(name.name.startswith("triton") for name in statement.names)
    if isinstance(statement, ast.ImportFrom):
        return all(name.name in space for name in statement.names)
    return False
