"""Corpus: a folder of programs that once failed, played before any is drawn."""

from __future__ import annotations

from pathlib import Path

from blockstep.conformance.protocol.lines import TraceError
from blockstep.conformance.protocol.program_file import SUFFIX


def find_programs(folder: Path) -> list[Path]:
    """Return the program files of a folder and its subfolders, sorted by name.

    Raises:
        TraceError: there is no such folder, or no program in it.
    """
    found = sorted(folder.rglob(f"*{SUFFIX}"))
    if not found:
        what = "no program in it" if folder.is_dir() else "there is no such folder"
        rule = f"a corpus is a folder of programs, files that end in {SUFFIX}"
        raise TraceError(folder, 0, what, rule, "put files of check --save there")
    return found
