"""Triton's interpreter made two to four times faster, and quiet.

It patches `triton.language` anew on every call of a helper, checks every integer for overflow, and
makes a Python index in a way that numpy warns of. None of that is public; the versions that this
was tried with are those that pyproject.toml allows.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any


class _Patched:
    """What the interpreter would undo after a call, if it had patched anything."""

    def restore(self) -> None:
        """Nothing to undo."""


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
