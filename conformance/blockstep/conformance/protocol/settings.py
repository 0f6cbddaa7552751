"""The table `[tool.blockstep]` of a pyproject.toml, which sets a project's engine and options.

::

    [tool.blockstep]
    engine = "mypkg.adapter:make"
    equivalence = "plan"
    preset = "small"
    budget = "60s"
    corpus = "tests/corpus"
    known = "tests/known"
    profile = "vllm-0.19.1"

The nearest pyproject.toml with such a table is read, from the working folder upwards. All of it is
about the engine that it names: with another `--engine`, none of it applies. Folders are relative to
the file. This module imports nothing of ours, because pytest reads the table at every start.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FILE = "pyproject.toml"
TABLE = "tool.blockstep"


class SettingsError(ValueError):
    """A pyproject.toml cannot be read, or its table has a wrong key or value."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The table with checked types. The meaning of the values is checked by `search.options`."""

    file: Path
    """The pyproject.toml that was read."""
    engine: str
    """The engine's name, followed by `@` and the equivalence if the table names one."""
    equivalence: str | None = None
    preset: str | None = None
    budget: str | None = None
    corpus: Path | None = None
    known: Path | None = None
    profile: str | None = None

    def is_about(self, engine: str) -> bool:
        """Whether `engine`, named elsewhere, is the engine of the table."""
        return engine in (self.engine, self.engine.partition("@")[0])

    @property
    def folder(self) -> Path:
        """The project's folder, in which its engine is searched, too."""
        return self.file.parent


KEYS = tuple(field.name for field in fields(Settings) if field.name != "file")
PATHS = ("corpus", "known")


def find_settings(start: Path) -> Settings | None:
    """Return the table of the nearest pyproject.toml that has one, from `start` upwards; None if
    none.

    Raises:
        SettingsError: naming the file, the key and the values it can have.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        file = folder / FILE
        if file.is_file() and (table := _read_table(file)) is not None:
            return _build(file, table)
    return None


def _read_table(file: Path) -> object | None:
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file}: cannot be read: {error}") from None
    return tool.get("blockstep") if isinstance(tool, Mapping) else None


def _build(file: Path, table: object) -> Settings:
    if not isinstance(table, Mapping):
        raise SettingsError(f"{file}: {TABLE}: must be a table [{TABLE}], not {table!r:.80}")
    unknown = [key for key in table if key not in KEYS]
    if unknown:
        raise SettingsError(f"{file}: {TABLE}.{unknown[0]}: no such key; one of {', '.join(KEYS)}")
    if "engine" not in table:
        raise SettingsError(f"{file}: {TABLE}: names no engine; add engine = 'module:attribute'")
    values: dict[str, Any] = {key: _read_value(file, key, table[key]) for key in table}
    if "equivalence" in values:
        values["engine"] += f"@{values['equivalence']}"
    return Settings(file, **values)


def _read_value(file: Path, key: str, value: object) -> str | Path:
    if key == "budget" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # a number of events
    if not isinstance(value, str) or not value:
        wanted = "a number of events or a time, such as '60s'" if key == "budget" else "a text"
        raise SettingsError(f"{file}: {TABLE}.{key}: must be {wanted}, not {value!r:.80}")
    return file.parent / value if key in PATHS else value
