"""Fields: the JSON files of a checkpoint, read with complaints that name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockstep.impl.engine.errors import CheckpointError


class Fields:
    """The fields of one `config.json`, with complaints that name it."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path = path
        self.data = data

    def error(self, name: str, rule: str) -> CheckpointError:
        """A complaint about one field."""
        shown = json.dumps(self.data.get(name))
        return CheckpointError(f"{self.path}: {name} = {shown[:80]}: {rule}")

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or `default` where it is missing or null."""
        value = self.data.get(name)
        return default if value is None else value

    def count(self, name: str, default: int = 0) -> int:
        """A field that is an int of 1 at least."""
        value = self.get(name, default)
        if type(value) is not int or value < 1:
            raise self.error(name, "must be an int of at least 1")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `CheckpointError` if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return data
