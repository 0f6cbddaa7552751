"""Triton's interpreter made two to four times faster, and quiet.

Unchanged it patches `triton.language` on every call of a helper, checks integers for overflow, and
makes a Python index in a way that numpy warns of. None of that is public; the versions that this
was tried with are those that pyproject.toml allows.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any


class _Patched:
    """Stands in for the interpreter's scope of patches, which it undoes after a call."""

    def restore(self) -> None:
        """Undo nothing."""


def speed_up() -> None:
    """Patch once, for the whole process, which therefore cannot compile kernels any more."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    uses_language: Any = types.FunctionType((lambda: 0).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(uses_language)
    interpreter._patch_lang = lambda function: _Patched()
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
