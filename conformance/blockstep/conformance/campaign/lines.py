"""Lines: which lines of an engine's own modules an episode runs.

Lines are counted by `sys.monitoring`, which Python has since 3.12. Only functions of the chosen
modules are instrumented, and each line is reported once per episode, so that an episode costs
little more than without. A line is named `package.module:number`.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from blockstep.conformance.protocol.registry import EngineNotFoundError

TOOL = "blockstep"
_monitoring: Any = getattr(sys, "monitoring", None)
_free_tools = (4, 3)
"""Tool ids of `sys.monitoring` without a purpose of their own."""


class LineWatch:
    """Records the lines of some modules while episodes run in this process."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Find the files of the modules; a package stands for all its modules.

        Raises:
            EngineNotFoundError: there is no such module, or this Python cannot record lines.
        """
        if modules and _monitoring is None:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise EngineNotFoundError(
                f"lines: Python {version} cannot record lines, 3.12 can; take `lines` out of the"
                f" plan, or name another `python`"
            )
        self._names = {file: name for module in modules for file, name in _find_files(module)}
        self._codes: set[CodeType] = set()
        self._num_modules = 0

    @contextmanager
    def watch(self) -> Iterator[set[str]]:
        """Yield a set, to which the lines that run until the end are added."""
        lines: set[str] = set()
        if not self._names:
            yield lines
            return
        tool = next(it for it in _free_tools if _monitoring.get_tool(it) is None)
        _monitoring.use_tool_id(tool, TOOL)

        def add(code: CodeType, number: int) -> Any:
            lines.add(f"{self._names[code.co_filename]}:{number}")
            return _monitoring.DISABLE

        event = _monitoring.events.LINE
        try:
            _monitoring.register_callback(tool, event, add)
            self._find_codes()
            for code in self._codes:
                _monitoring.set_local_events(tool, code, event)
            _monitoring.restart_events()
            yield lines
        finally:
            for code in self._codes:
                _monitoring.set_local_events(tool, code, 0)
            _monitoring.register_callback(tool, event, None)
            _monitoring.free_tool_id(tool)

    def _find_codes(self) -> None:
        """Look for functions of the modules again if modules were imported since."""
        if self._num_modules != len(sys.modules):
            self._num_modules = len(sys.modules)
            is_frozen = gc.get_freeze_count() > 0
            gc.unfreeze()  # frozen objects are not listed
            functions = [it for it in gc.get_objects() if type(it) is FunctionType]
            if is_frozen:
                gc.freeze()
            codes = [it.__code__ for it in functions if it.__code__.co_filename in self._names]
            self._codes.update(inner for code in codes for inner in _list_inner(code))


def _find_files(name: str) -> Iterator[tuple[str, str]]:
    """Yield the source file and the name of a module, or of all modules of a package."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise EngineNotFoundError(f"lines: there is no module {name!r}")
    if spec.submodule_search_locations is None:
        yield spec.origin or "", name
    for folder in spec.submodule_search_locations or ():
        for file in Path(folder).rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            yield str(file), ".".join((name, *(it for it in parts if it != "__init__")))


def _list_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions that are defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _list_inner(value)
