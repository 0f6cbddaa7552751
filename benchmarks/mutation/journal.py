"""Journal: what has been played is kept line by line, so that a campaign can go on where it ended.

A line is found again by the text of the mutated module and by the stages, so what was changed
since is played again. What else was changed is not looked at: after a change to the tools, or to
the other side, begin a new journal.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

Result: TypeAlias = dict[str, Any] | signal.Signals | None
"""What the process of a mutant said, or the signal that ended it."""


class Journal:
    """Results by key, in a file of JSON lines; without a file in memory."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.seconds = 0.0
        """Of all lines that were asked for, when they were played."""
        self._lines: dict[str, tuple[Result, float]] = {}
        self._since = time.perf_counter()
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                key, result, seconds = json.loads(line)
                self._lines[key] = _from_json(result), seconds

    def split(self, keys: Sequence[str]) -> tuple[list[tuple[int, Result]], list[int]]:
        """(index, result) of what is known, and the indices of what is not."""
        known = [(index, self._get(key)) for index, key in enumerate(keys) if key in self._lines]
        self._since = time.perf_counter()
        return known, [index for index, key in enumerate(keys) if key not in self._lines]

    def note(self, key: str, result: Result) -> None:
        """Keep a result; what has passed since the one before is its time."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.seconds += seconds
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([key, _to_json(result), round(seconds, 3)]) + "\n")

    def _get(self, key: str) -> Result:
        result, seconds = self._lines[key]
        self.seconds += seconds
        return result


def make_key(text: str, *parts: object) -> str:
    """One word for a source text and what is done with it."""
    return hashlib.sha256(json.dumps([text, *parts]).encode()).hexdigest()[:32]


def _to_json(result: Result) -> Any:
    return result.name if isinstance(result, signal.Signals) else result


def _from_json(value: Any) -> Result:
    return signal.Signals[value] if isinstance(value, str) else value
