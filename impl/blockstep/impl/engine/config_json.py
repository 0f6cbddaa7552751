"""Fields: the JSON files of a checkpoint, with errors that name the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockstep.impl.engine.errors import CheckpointError


class Fields:
    """The fields of one `config.json`, or of an object in it; errors name the file and the
    field."""

    def __init__(self, path: Path, data: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.data = data
        self.prefix = prefix
        """Path of the object in the file, put before field names in errors."""

    def error(self, name: str, rule: str) -> CheckpointError:
        """Return the error for one field that breaks `rule`."""
        shown = json.dumps(self.data.get(name))
        return CheckpointError(f"{self.path}: {self.prefix}{name} = {shown[:80]}: {rule}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or `default` if it is missing or null."""
        value = self.data.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a field that must be an int of at least `least`."""
        value = self.get(name, default)
        if type(value) is not int or value < least:
            raise self.error(name, f"must be an int of at least {least}")
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        """Return a field that must be a finite number above `above`."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not above < value < math.inf:
            raise self.error(name, f"must be a number above {above:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a field that must be true or false."""
        value = self.get(name, default)
        if type(value) is not bool:
            raise self.error(name, "must be true or false")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `CheckpointError` if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return data
