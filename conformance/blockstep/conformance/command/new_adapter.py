"""Command: `blockstep new-adapter`."""

from __future__ import annotations

import importlib.util
import re
from enum import StrEnum
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

import blockstep.conformance.engines.adapters
from blockstep.conformance.command import console, options

TEMPLATES = Path(blockstep.conformance.engines.adapters.__file__).parent
"""The folder of the templates; they are modules, so that our own lints check them."""
SECTION = re.compile(
    r"^ *# --- only ([\w ,]+)\n(.*?)(?=^ *# --- (?:only [\w ,]+|always)\n)(?:^ *# --- always\n)?",
    re.MULTILINE | re.DOTALL,
)
"""Lines that are copied for some kinds of adapters only: up to another such line, or `always`."""


class Like(StrEnum):
    """The kind of scheduler that an adapter is written for."""

    PLAIN = "plain"
    ASYNC = "async"
    CACHING = "caching"


LikeOption = Annotated[
    Like | None,
    typer.Option(
        help="A longer file that makes plans of what five functions say: for a scheduler that "
        "takes one step after another, that plans ahead, or that caches prefixes."
    ),
]


def new_adapter_command(
    name: Annotated[str, typer.Argument(help="Name of the module to write, such as my_adapter.")],
    safety: Annotated[
        bool, typer.Option("--safety", help="For a scheduler that decides otherwise than vLLM's.")
    ] = False,
    like: LikeOption = None,
    json_path: options.Json = None,
) -> None:
    """Write an adapter to fill in, which can be checked at once and reports what is missing.

    Example: blockstep new-adapter my_adapter --like caching
    """
    path = _require_free(name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(write_adapter(name, safety, like))
    except OSError as error:
        console.usage(f"{path}: cannot write: {error.strerror}")
    command = f"blockstep check --engine {name}:make"
    console.print_text(f"{path} is written; to see what it lacks, run\n  {command}\n", json_path)
    console.write_json(json_path, {"path": str(path), "engine": f"{name}:make"})


def write_adapter(name: str, safety: bool = False, like: Like | None = None) -> str:
    """Return the text of a module of this name."""
    kinds = {"at safety"} if safety else set()
    kinds |= set() if like is None else {str(like)}
    file = TEMPLATES / ("template.py" if like is None else "template_like.py")
    text = file.read_text(encoding="utf-8")
    text = SECTION.sub(lambda it: it[2] if kinds & {*it[1].split(", ")} else "", text)
    text = _leave_out_unused(text, (*IMPORTED, "EngineTraits", "Safety"))
    return re.sub(r"\n{4,}", "\n\n\n", text).replace("NAME", name)


IMPORTED = ("Counter", "replace", "field")
"""Imports of the templates that only some kinds of adapters need."""


def _leave_out_unused(text: str, names: tuple[str, ...]) -> str:
    """Return the text without imports of names that it does not use."""
    for name in names:
        if len(re.findall(rf"\b{name}\b", text)) == 1:
            text = re.sub(rf"^from \S+ import {name}\n", "", text, flags=re.MULTILINE)
            text = re.sub(rf", {name}\b|\b{name}, ", "", text, count=1)
    return text


def _require_free(name: str) -> Path:
    """Return the file of a module that does not exist yet; bad input otherwise."""
    parts = name.split(".")
    if not all(part.isidentifier() and not iskeyword(part) for part in parts):
        console.usage(f"{name!r}: must be the name of a Python module, such as my_adapter")
    path = Path(*parts).with_suffix(".py")
    if path.exists():
        console.usage(f"{path}: the file exists; give another name, or move it away")
    if not path.parent.is_dir():
        console.usage(f"{path}: there is no folder {path.parent}; make it")
    if importlib.util.find_spec(parts[0]) is not None and len(parts) == 1:
        console.usage(f"{name!r}: a module of this name can be imported already; give another")
    return path
