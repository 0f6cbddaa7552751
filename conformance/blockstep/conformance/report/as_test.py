"""Program as a test: a file that users keep with their own tests, run by the pytest plugin."""

from __future__ import annotations

import dataclasses
import re
from enum import Enum
from typing import Any

from blockstep.conformance.protocol.codec import get_changed
from blockstep.conformance.protocol.program import Program
from blockstep.conformance.protocol.program_file import write_program
from blockstep.spec import vocabulary as v

NAME_MAX = 60
TEST = '''\
"""{title}

{describe}
Runs on the engine that `--blockstep-engine` names, or `[tool.blockstep]` in pyproject.toml.
"""

from blockstep.conformance.protocol import program as p
from blockstep.spec import vocabulary as v

PROGRAM = p.Program(
    {config},
    (
{actions}
    ),
    token_seed={seed},
    vocabulary_size={size},
)


def test_{name}(blockstep):
    blockstep.run(PROGRAM)
'''


def write_test(program: Program, note: str = "") -> str:
    """Return a file with one pytest test that plays the program; `note` is its title and
    description.

    Raises:
        ValueError: a value in it has a wrong type, so that it has no exact source.
    """
    write_program(program)  # what JSON can hold, source can
    head, _, rest = note.partition(": ")
    return TEST.format(
        title=_quote(head or "A program that failed."),
        describe=f"{_quote(rest)}\n" if rest else "",
        config=to_source(program.config),
        actions="\n".join(f"        {to_source(action)}," for action in program.actions),
        seed=program.token_seed,
        size=program.vocabulary_size,
        name=re.sub(r"\W+", "_", head)[:NAME_MAX].strip("_").lower() or "program",
    )


def to_source(value: Any) -> str:
    """Return Python source of a value, with `v` for the vocabulary and `p` for the module of
    programs."""
    if dataclasses.is_dataclass(value):
        module = "v" if hasattr(v, type(value).__name__) else "p"
        parts = [f"{name}={to_source(part)}" for name, part in get_changed(value).items()]
        return f"{module}.{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, Enum):
        module = "v" if hasattr(v, type(value).__name__) else "p"
        return f"{module}.{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        parts = [to_source(part) for part in value]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    return repr(value)


def _quote(text: str) -> str:
    """Return the text for a docstring: in one line, without quotes that end it."""
    return " ".join(text.split()).replace("\\", "\\\\").replace('"', "'")
