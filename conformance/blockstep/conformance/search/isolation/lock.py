"""Lock: a lock between all processes of this machine, which ends with its holder."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a lock between all processes of this machine, named by a path, which ends with this
    process.

    Yields whether the lock is held; with `wait` it always is.
    """
    with path.open("ab") as file:
        while not (is_held := _lock(file.fileno())) and wait:
            time.sleep(0.1)
        yield is_held


def _lock(file: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
