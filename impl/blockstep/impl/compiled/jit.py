"""The compiler: numba where it is installed, plain Python where it is not."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

from blockstep.impl.compiled.state import make_state
from blockstep.spec.vocabulary import Config

F = TypeVar("F", bound=Callable[..., Any])


def _find_numba() -> Any:
    """numba, or None where it is not installed; one that is broken says so itself."""
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
    else "the compiled engine runs as plain Python here, a hundred times slower, because numba is "
    "not installed or NUMBA_DISABLE_JIT is set: pip install 'blockstep[compiled]', or take host"
)
"""One sentence for whoever uses or measures it so; empty where there is nothing to say."""


_ENTRIES: Final[list[tuple[Any, tuple[str, ...]]]] = []


def compiled(function: F) -> F:
    """A function that compiled functions call; it is compiled with them.

    It uses nothing but integers and arrays, so that it does the same in Python. It makes no array:
    numba counts no references then, which in functions this small costs more than all they do.
    """
    return _compile(function, _nrt=False, forceinline=True)  # no references, no calls


def making_arrays(function: F) -> F:
    """The same, and it may make arrays; best called once in a step."""
    return _compile(function)


def entry(*kinds: str) -> Callable[[F], F]:
    """A function that Python calls; it may make arrays.

    Args:
        kinds: of the arguments; "state", "int", "bool", or an element type and a number of
            dimensions as in "int32 1", of a contiguous array that is only read.
    """

    def decorate(function: F) -> F:
        made = _compile(function)
        _ENTRIES.append((made, kinds))
        return made

    return decorate


def _compile(function: F, **options: bool) -> F:
    if not IS_COMPILED:
        return function
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_find_cache())
    try:
        made: F = numba.njit(cache=True, error_model="numpy", **options)(function)
    finally:
        numba.config.CACHE_DIR = before
    return made


@cache
def warn_if_slow() -> None:
    """Once in a process."""
    if SLOW_BECAUSE:
        warnings.warn(SLOW_BECAUSE, RuntimeWarning, stacklevel=3)


def compile_entries() -> None:
    """Compile all of them, or find them in files, for those arguments and no others.

    At import, so that nobody waits for a compiler in the middle of a run.
    """
    if IS_COMPILED:
        for function, kinds in _ENTRIES:
            function.compile(tuple(map(_type_of, kinds)))
            function.disable_compile()


@cache
def _find_cache() -> Path:
    """Where machine code of exactly these sources is kept.

    numba itself looks only at the file of the function that is called, and would go on using old
    code of those that it calls.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(here.glob("*.py"))))
    beside = here / "__pycache__"
    if numba.config.CACHE_DIR:
        beside = Path(numba.config.CACHE_DIR)
    elif not os.access(beside if beside.exists() else here, os.W_OK):
        beside = Path.home() / ".cache" / "blockstep"
    return beside / f"numba-{digest.hexdigest()[:16]}"


def _type_of(kind: str) -> Any:
    if kind == "state":
        return numba.typeof(make_state(Config(num_blocks=2)))
    if kind in ("int", "bool"):
        return numba.types.int64 if kind == "int" else numba.types.boolean
    element, dimensions = kind.split()
    return numba.types.Array(getattr(numba.types, element), int(dimensions), "C", readonly=True)
