"""Command: `blockstep new-adapter`."""

from __future__ import annotations

import importlib.util
import re
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

import blockstep.conformance.engines.adapters
from blockstep.conformance.command import console, options

TEMPLATE = Path(blockstep.conformance.engines.adapters.__file__).with_name("template.py")
"""The file that is copied; a module like any other, so that what checks our code checks it."""
SAFETY_LINES = re.compile(
    r"^ *# --- only at safety\n(.*?)^ *# --- always\n", re.MULTILINE | re.DOTALL
)


def new_adapter_command(
    name: Annotated[str, typer.Argument(help="Name of the module to write, such as my_adapter.")],
    safety: Annotated[
        bool,
        typer.Option("--safety", help="For a scheduler that decides otherwise than vLLM's."),
    ] = False,
    json_path: options.Json = None,
) -> None:
    """Write an adapter to fill in, which can be checked at once and says what is missing.

    Example: blockstep new-adapter my_adapter --safety
    """
    path = _require_free(name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(write_adapter(name, safety))
    except OSError as error:
        console.usage(f"{path}: cannot write: {error.strerror}")
    command = f"blockstep check --engine {name}:make"
    console.say(f"{path} is written; what it lacks is told by\n  {command}\n", json_path)
    console.write_json(json_path, {"path": str(path), "engine": f"{name}:make"})


def write_adapter(name: str, safety: bool) -> str:
    """The text of a module of this name."""
    text = SAFETY_LINES.sub(r"\1" if safety else "", TEMPLATE.read_text(encoding="utf-8"))
    if not safety:
        text = text.replace(", EngineTraits, Safety\n", "\n")
    return re.sub(r"\n{4,}", "\n\n\n", text).replace("NAME", name)


def _require_free(name: str) -> Path:
    """The file of a module that there is not; bad input otherwise."""
    parts = name.split(".")
    if not all(part.isidentifier() and not iskeyword(part) for part in parts):
        console.usage(f"{name!r}: must be the name of a Python module, such as my_adapter")
    path = Path(*parts).with_suffix(".py")
    if path.exists():
        console.usage(f"{path}: there is such a file; give another name, or move it away")
    if not path.parent.is_dir():
        console.usage(f"{path}: there is no folder {path.parent}; make it")
    if importlib.util.find_spec(parts[0]) is not None and len(parts) == 1:
        console.usage(f"{name!r}: a module of this name can be imported already; give another")
    return path
