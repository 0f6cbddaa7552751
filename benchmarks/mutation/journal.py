"""The journal keeps each result in a line, so that a campaign can continue after an interruption.

The key of a line is the text of the mutated module and the stages, so a changed module is played
again. Other changes are not noticed: after a change of the tools, or of the other side, begin a new
journal.
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
"""The result of a mutant's process, or the signal that ended it."""


class Journal:
    """Results by key, in a file of JSON lines; without a file in memory."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.seconds = 0.0
        """The time that all requested lines took when they were played."""
        self._lines: dict[str, tuple[Result, float]] = {}
        self._since = time.perf_counter()
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                key, result, seconds = json.loads(line)
                self._lines[key] = _from_json(result), seconds

    def split(self, keys: Sequence[str]) -> tuple[list[tuple[int, Result]], list[int]]:
        """Return (index, result) of known keys, and the indices of the others."""
        known = [(index, self._get(key)) for index, key in enumerate(keys) if key in self._lines]
        self._since = time.perf_counter()
        return known, [index for index, key in enumerate(keys) if key not in self._lines]

    def note(self, key: str, result: Result) -> None:
        """Keep a result; its time is the time since the previous one."""
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
    """Return a short key for a source text and the parameters of a run."""
    return hashlib.sha256(json.dumps([text, *parts]).encode()).hexdigest()[:32]


def _to_json(result: Result) -> Any:
    return result.name if isinstance(result, signal.Signals) else result


def _from_json(value: Any) -> Result:
    return signal.Signals[value] if isinstance(value, str) else value
