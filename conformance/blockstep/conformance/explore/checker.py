"""check.py: checks a package of vectors, and an engine against it, without Blockstep.

    python check.py                     are the files those of index.json?
    python check.py ./my-engine --flag  plays them on an engine that speaks lines of JSON

It needs only the standard library. Exit codes: 0 right, 1 the engine answers otherwise, 2 the
package or the engine cannot be used, 5 nothing could be tried.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

ANSWER_SECONDS = 60.0
HINTS = {"detail", "num_external_tokens"}
"""Fields that are not compared: wording, and a hint."""


def print_line(what: object, stream: TextIO = sys.stdout) -> None:
    """Write a line."""
    stream.write(f"{what}\n")


class UnusableError(Exception):
    """The package or the engine cannot be used."""


def read_index(folder: Path) -> dict[str, Any]:
    """Return index.json once every file is as it says. Raises UnusableError."""
    try:
        index: dict[str, Any] = json.loads((folder / "index.json").read_text("utf-8"))
        if (index["format"], index["version"]) != ("blockstep-vectors-package", 1):
            raise UnusableError("index.json: another format or version than 1")
        for file in index["files"]:
            digest = hashlib.sha256((folder / file["path"]).read_bytes()).hexdigest()
            if digest != file["sha256"]:
                raise UnusableError(f"{file['path']}: was changed")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UnusableError(f"{folder}: {type(error).__name__}: {error}") from None
    return index


class Engine:
    """A process that answers each line with a line."""

    def __init__(self, command: list[str]) -> None:
        """Start it and ask what it is. Raises UnusableError."""
        try:
            self.process = subprocess.Popen(  # noqa: S603 - the command is the user's own
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
            hello = self.ask({"type": "Hello", "format": "blockstep-engine", "version": 1})
            self.capabilities = set(hello["capabilities"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UnusableError(f"{command[0]}: {type(error).__name__}: {error}") from None
        if hello.get("equivalence", "exact") != "exact":
            raise UnusableError("the engine is not exact: use `blockstep vectors consume`")

    def ask(self, row: Any) -> Any:
        """Return the answer to a row. Raises ValueError if it is no JSON, OSError if it is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        guard = threading.Timer(ANSWER_SECONDS, self.process.kill)
        guard.start()
        try:
            self.process.stdin.write(json.dumps(row) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        finally:
            guard.cancel()


def differ(expected: Any, seen: Any, defaults: dict[str, Any], skipped: set[str]) -> str | None:
    """Return where an answer or a state differs, or None; what is left out has its default."""
    if isinstance(expected, dict) and isinstance(seen, dict):
        for name in {*expected, *seen} - skipped:
            left, right = (side.get(name, defaults.get(name)) for side in (expected, seen))
            where = differ(left, right, defaults, skipped)
            if where is not None:
                return f"{name} {where}"
        return None
    if isinstance(expected, list) and isinstance(seen, list) and len(expected) == len(seen):
        for at, (left, right) in enumerate(zip(expected, seen)):  # noqa: B905 - for Python 3.9
            where = differ(left, right, defaults, skipped)
            if where is not None:
                return f"{at} {where}"
        return None
    same = expected == seen and isinstance(expected, bool) == isinstance(seen, bool)
    return None if same else f"expected {json.dumps(expected)}, seen {json.dumps(seen)}"


def read_programs(path: Path) -> Iterator[tuple[int, Any, list[tuple[Any, Any]]]]:
    """Yield each program of a file: its number, the config, and pairs of a step and the state."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    config, at = lines[1]["config"], 2
    while at < len(lines):
        count = lines[at]["steps"]
        pairs = lines[at + 1 : at + 1 + 2 * count]
        steps = [(pairs[i], pairs[i + 1]["snapshot"]) for i in range(0, 2 * count, 2)]
        yield lines[at]["program"], config, steps
        at += 1 + 2 * count


def play(engine: Engine, path: Path, defaults: dict[str, Any]) -> tuple[int, str | None]:
    """Play the programs of a file. Return the number of events and the first difference."""
    skipped, count = set(HINTS), 0
    for capability, name in (
        *(("common prefix", "num_common_prefix_blocks"), ("statistics", "stats")),
        ("work", "has_work"),
    ):
        skipped |= set() if capability in engine.capabilities else {name}
    for number, config, steps in read_programs(path):
        engine.ask({"type": "Start", "config": config})
        for step, state in steps:
            wanted = step["observation"]
            if wanted["type"] == "Rejected" and "rejection" not in engine.capabilities:
                continue  # what must be rejected changes nothing
            count += 1
            seen = engine.ask(step["event"])
            where = differ(wanted, seen, defaults["answer"], skipped)
            if where is None and "snapshot" in engine.capabilities:
                shown = engine.ask({"type": "Snapshot"})["state"]
                where = differ(state, shown, defaults["state"], skipped)
            if where is not None:
                return count, f"program {number}, event {json.dumps(step['event'])}: {where}"
    return count, None


def main(folder: Path, command: list[str]) -> int:
    """Check the package, and the engine if there is one. Return the exit code."""
    try:
        index = read_index(folder)
        if not command:
            print_line(f"{len(index['files'])} files are as index.json says")
            return 0
        engine, total = Engine(command), 0
        for file in index["files"]:
            missing = sorted({*file["needs"]} - engine.capabilities)
            if missing:
                print_line(f"{file['path']}: not tried: needs {', '.join(missing)}")
                continue
            count, where = play(engine, folder / file["path"], index["defaults"])
            if where is not None:
                print_line(f"{file['path']}: DIFFERS: {where}")
                return 1
            total += count
            print_line(f"{file['path']}: conforms: {count} events")
    except UnusableError as error:
        print_line(error, sys.stderr)
        return 2
    except (OSError, KeyError, TypeError, ValueError) as error:
        print_line(f"the engine gave no answer: {type(error).__name__}: {error}")
        return 1
    return 0 if total else 5


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent, sys.argv[1:]))
