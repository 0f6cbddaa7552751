"""Patching: replaces a running function by its mutant, and records which lines run.

Nothing is imported again: the code object of the function is exchanged. If this is not possible
(for values computed at import), there is no mutant.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from benchmarks.judges.listed import take_off
from benchmarks.judges.mutants import Mutant, Source, make_text


class CannotPatchError(Exception):
    """The function of a mutant cannot be exchanged."""


def plant(mutant: Mutant, source: Source) -> None:
    """Make the change in this process.

    It cannot be undone.

    Raises:
        CannotPatchError: no running function has this code.
        SyntaxError: the changed source is not valid Python.
    """
    if mutant.edit is None:
        take_off(mutant)
        return
    file = str(source.file)
    text = make_text(source.text, mutant.edit)
    codes = {code.co_qualname: code for code in find_functions(compile(text, file, "exec"))}
    gc.unfreeze()  # `run_forked` hides objects of the parent from the collector
    found = [one for one in gc.get_objects() if _is_of(one, file, mutant.function)]
    if not found:
        raise CannotPatchError(f"nothing runs the code of {mutant.function} in {mutant.module}")
    for function in found:
        code = codes[mutant.function]
        if code.co_freevars != function.__code__.co_freevars:
            raise CannotPatchError(f"{mutant.function} closes over other names")
        function.__code__ = code


def _is_of(one: object, file: str, name: str) -> bool:
    return (
        type(one) is FunctionType  # `isinstance` asks some objects of torch, and they warn
        and one.__code__.co_filename == file
        and one.__code__.co_qualname == name
    )


def find_functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of functions and methods, outermost ones only."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 2:  # CO_NEWLOCALS: a function; a class body has none
                yield inner
            else:
                yield from find_functions(inner)


class Reach:
    """Records which lines of some files run: `lines` by file. At most one at a time."""

    def __init__(self, files: Collection[Path]) -> None:
        self._files = {str(file) for file in files}
        self._left: dict[CodeType, set[int] | None] = {}
        """Lines of a code object that were not seen yet; None for another file."""
        self.lines: dict[str, set[int]] = {}

    def __enter__(self) -> Reach:
        self.lines = {}
        self._left = {}
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        left = self._left.get(code, self._left)
        if left is self._left:
            left = None
            if code.co_filename in self._files:
                left = {line for *_, line in code.co_lines() if line}
            self._left[code] = left
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            code = frame.f_code
            left = self._left[code]
            if left and frame.f_lineno in left:
                left.discard(frame.f_lineno)
                self.lines.setdefault(code.co_filename, set()).add(frame.f_lineno)
        return self._line
