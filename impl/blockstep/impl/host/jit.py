"""The compiler: numba if it is installed, else plain Python."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np

from blockstep.impl.host.state import State, make_state
from blockstep.spec.vocabulary import Config

F = TypeVar("F", bound=Callable[..., Any])
SECONDS_BETWEEN_LINES: Final = 5.0
"""Between two lines that say how much is compiled."""


def _find_numba() -> Any:
    """Return numba, or None if it is not installed; a broken installation raises its own error."""
    try:
        return import_module("numba")
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        return None


numba: Any = _find_numba()
IS_COMPILED: Final = numba is not None and not numba.config.DISABLE_JIT
SLOW_BECAUSE: Final = (
    ""
    if IS_COMPILED
    else "the host engine runs as plain Python here, a hundred times slower, because numba is "
    "not installed or NUMBA_DISABLE_JIT is set: pip install 'blockstep[compiled]'"
)
"""A warning about the engine that is not compiled; empty if it is compiled."""


_INNER: Final = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that no Python calls: a wrapper would take longer to compile than most of
them. Their machine code is kept in that of the entries."""
_COMPILING: Final = threading.Lock()
_ENTRIES: Final[list[Entry]] = []


def compiled(function: F) -> F:
    """Mark a function that only compiled functions call; it is compiled with them.

    It uses only integers and arrays, so that it does the same in Python. It makes no array: numba
    does not count references then, which in functions this small would cost more than all they do.
    """
    return _compile(function, _nrt=False, forceinline=True, **_INNER)  # no counts, no calls


def rarely(function: F) -> F:
    """Mark a function like `compiled` that few rows need: it is called, and not inlined."""
    return _compile(function, _nrt=False, **_INNER)


def making_arrays(function: F) -> F:
    """Mark a function like `compiled` that may make arrays; best called once in a step."""
    return _compile(function, _nrt=True, **_INNER)


class Entry:
    """A function of a state that Python calls, and compiled functions, too.

    If it makes no array, these inline it and count no references. Python calls a second function,
    which finds the arrays of the state by their addresses. Once that is compiled, Python calls it
    without a look at the types of the arguments, which are those declared.
    """

    def __init__(self, function: Callable[..., Any], kinds: tuple[str, ...], makes_arrays: bool):
        self.kinds = kinds
        self.inner: Any = compiled(function)
        if makes_arrays:  # large: a part of the second function, so that it is compiled once
            self.inner = _compile(function, inline="always", _nrt=True, **_INNER)
        code = function.__code__
        state, *rest = code.co_varnames[: code.co_argcount]
        names = ", ".join(rest)
        source = f"def {code.co_name}({state}, {names}): return inner(view({state}), {names})"
        made: dict[str, Any] = {"inner": self.inner, "view": _make_view()}
        made["__name__"] = function.__module__
        exec(compile(source, code.co_filename, "exec"), made)  # noqa: S102 - no text of others
        self.outer: Any = _compile(made[code.co_name], cache=True, no_cfunc_wrapper=True)
        self._call: Callable[..., Any] = self.outer

    def __call__(self, state: State, *arguments: Any) -> Any:
        """Call it from Python."""
        return self._call(state.places, *arguments)

    def compile(self) -> None:
        """Compile it for its declared types, or load it from a file."""
        types = tuple(map(_type_of, self.kinds))
        if not self.outer.signatures:  # else a call that was interrupted has compiled it
            self.outer.compile(types)
            self.outer.disable_compile()
        self._call = self.outer.overloads[types].entry_point

    @property
    def _numba_type_(self) -> Any:
        return numba.types.Dispatcher(self.inner)


def entry(*kinds: str, makes_arrays: bool = False) -> Callable[[F], F]:
    """Mark a function that Python calls; compiled functions may call it, too.

    Args:
        kinds: kinds of the arguments: "state", "int", "bool", or an element type and a number of
            dimensions as in "int32 1", for a contiguous array that is only read; "out int32 1" for
            one that is written.
        makes_arrays: whether it makes arrays; then it is not inlined.
    """

    def decorate(function: F) -> F:
        if not IS_COMPILED:
            return function
        made = Entry(function, kinds, makes_arrays)
        _ENTRIES.append(made)
        return cast("F", made)

    return decorate


@cache
def _make_view() -> Any:
    """Return a compiled function that makes a state from its places."""

    def get_pointer(_context: object, _address: object) -> Any:
        def convert(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

        return numba.types.voidptr(numba.types.int64), convert

    made: dict[str, Any] = {"State": State, "np": np, "carray": numba.carray}
    made["pointer"] = numba.extending.intrinsic(get_pointer)
    at, arrays = 0, []
    for array in make_state(Config(num_blocks=2)):
        shape = "".join(f"p[{place}], " for place in range(at + 1, at + 1 + array.ndim))
        arrays.append(f"carray(pointer(p[{at}]), ({shape}), np.{array.dtype})")
        at += 1 + array.ndim
    exec(f"def view(p): return State({', '.join(arrays)})", made)  # noqa: S102 - no text of others
    return _compile(made["view"], forceinline=True, **_INNER)


def _compile(function: F, **options: bool | str) -> F:
    if not IS_COMPILED:
        return function
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_find_cache())
    try:
        made: F = numba.njit(error_model="numpy", **options)(function)
    finally:
        numba.config.CACHE_DIR = before
    return made


@cache
def warn_if_slow() -> None:
    """Warn once per process if the engine is not compiled."""
    if SLOW_BECAUSE:
        warnings.warn(SLOW_BECAUSE, RuntimeWarning, stacklevel=3)


@cache
def compile_entries() -> None:
    """Compile all entries, or load them from files, for their declared argument types only.

    The first engine of a process does this, so that no step waits for a compiler. Without files it
    takes most of a minute, and lines on standard error say how far it is.
    """
    if not IS_COMPILED:
        return
    shown = start = time.monotonic()
    is_new = sum(1 for _ in _find_cache().rglob("*.nbi")) < len(_ENTRIES)
    if is_new:
        _print("compiling the engine for this machine, once: about a minute of processor time")
    for number, function in enumerate(_ENTRIES):
        with _COMPILING:
            function.compile()
        if is_new and time.monotonic() - shown > SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            _print(f"{number + 1} of {len(_ENTRIES)} functions compiled, {shown - start:.0f} s")


def _print(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"blockstep: {text}\n")
        sys.stderr.flush()


@cache
def _find_cache() -> Path:
    """Return the folder for machine code of exactly these sources.

    numba itself checks only the file of the function that is called, and would keep using old code
    of the functions that it calls. Modules without compiled functions do not count, but for the
    layout of the state.
    """
    here = Path(__file__).parent
    sources = [(file.stem, file.read_bytes()) for file in sorted(here.glob("*.py"))]
    marks = (b"\n@compiled", b"\n@rarely", b"\n@entry(", b"\n@making_arrays")
    counted = [
        source
        for name, source in sources
        if name in ("state", "jit") or any(mark in source for mark in marks)
    ]
    digest = hashlib.sha256(b"".join(counted))
    beside = here / "__pycache__"
    if numba.config.CACHE_DIR:
        beside = Path(numba.config.CACHE_DIR)
    elif not os.access(beside if beside.exists() else here, os.W_OK):
        beside = Path.home() / ".cache" / "blockstep"
    return beside / f"numba-{digest.hexdigest()[:16]}"


def _type_of(kind: str) -> Any:
    if kind in ("int", "bool"):
        return numba.types.int64 if kind == "int" else numba.types.boolean
    kind = "int64 1" if kind == "state" else kind
    element, dimensions = kind.removeprefix("out ").split()
    is_read = not kind.startswith("out ")
    return numba.types.Array(getattr(numba.types, element), int(dimensions), "C", readonly=is_read)
