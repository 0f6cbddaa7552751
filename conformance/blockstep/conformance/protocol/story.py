"""Story: what a run gave to an engine up to its first finding, for a script of the engine alone.

An adapter that can write such scripts has a function in its traits
(`EngineTraits.write_script`). It gets a story, and returns Python source that calls the engine's
own API, imports nothing of Blockstep, and ends with status 1 if the defect shows and 0 if not.
"""

from __future__ import annotations

import pprint
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from blockstep.conformance.protocol.findings import Finding, FindingKind
from blockstep.spec import vocabulary as v

WIDTH = 96
"""Columns of a script."""
MARGIN = 20
"""Columns left for the text before a call."""
STALL_STEPS = 100
"""Steps of the loop in which a script waits for requests that never finish."""


class UnwritableError(Exception):
    """A story that no script of the engine alone can tell, with the reason."""


@dataclass(frozen=True, slots=True)
class Story:
    """A run up to its first finding."""

    title: str
    """The headline of the finding."""
    version: str
    """Version of the engine."""
    finding: Finding
    config: v.Config
    events: tuple[v.Event, ...]
    """The events that the engine was given."""
    seen: v.Observation | None
    """The engine's answer to the last event; None if it raised."""
    state: v.Snapshot | None
    """The engine's state after the last event; None if it shows none, or raised."""
    unfinished: tuple[v.RequestId, ...]
    """The requests that a client waits for, sorted."""
    expected: v.Observation | None
    """The specification's answer to the last event; None if it was not compared with it."""
    expected_state: v.Snapshot | None
    """The specification's state after the last event; None if states were not compared."""

    @property
    def raises(self) -> str:
        """Name of the exception that the engine raised at the last event, or ""."""
        return self.finding.differences[0].seen if self.finding.kind is FindingKind.FAULT else ""

    @property
    def is_stall(self) -> bool:
        """Whether a request never finishes: it stalled, or it was accepted and never fits."""
        return self.finding.kind is FindingKind.LIVENESS or isinstance(self.expected, v.Rejected)


@dataclass(frozen=True, slots=True)
class Script:
    """Python source that shows a defect, and what it prints in the end."""

    source: str
    evidence: str
    """Text that its output contains if it shows what the run showed."""


@dataclass(frozen=True, slots=True)
class Check:
    """Value of the engine that is wrong, as an expression in the engine's words."""

    what: str
    source: str
    expected: Any
    seen: Any


def find_check(
    table: Iterable[tuple[str, str, Callable[[Any], Any]]], expected: Any, seen: Any
) -> Check | None:
    """Return the first entry of a table in which two answers or states differ.

    Each entry has a value in words, its source, and a function that reads it from our answer.
    """
    if expected is None or seen is None or type(expected) is not type(seen):
        return None
    for what, source, read in table:
        wanted, found = read(expected), read(seen)
        if wanted != found:
            return Check(what, source, wanted, found)
    return None


def show_call(called: str, *values: str, **keywords: Any) -> str:
    """Return a call; all values are source already, and keywords that are None are left out."""
    given = [f"{key}={value}" for key, value in keywords.items() if value is not None]
    arguments = ", ".join([*values, *given])
    line = f"{called}({arguments})"
    if len(line) <= WIDTH - MARGIN:
        return line
    inner = textwrap.wrap(arguments, WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return "\n".join([f"{called}(", *(f"    {part}" for part in inner), ")"])


def show_docstring(story: Story, engine: str) -> str:
    """Return the docstring of a script: the defect, the engine, and what the status means."""
    head, message = (" ".join(text.split()) for text in (story.title, story.finding.message))
    paragraphs = [
        head,
        f"{engine} {story.version}, on a CPU and without a model. Exits 1 if this is so.",
    ]
    if story.finding.kind is FindingKind.PROPERTY and message not in head:
        paragraphs.insert(1, message)
    text = "\n\n".join("\n".join(textwrap.wrap(one, WIDTH)) for one in paragraphs)
    return '"""' + text.replace("\\", "\\\\").replace('"', "'") + '\n"""'


def show_ending(check: Check) -> str:
    """Return the last lines of a script: the value, the expected one, and the status."""
    return "\n".join(
        [
            f"seen = {check.source}",
            f"expected = {pprint.pformat(check.expected, width=WIDTH - 11)}",
            f'print(f"{check.what}: {{seen!r}}, expected {{expected!r}}")',
            "sys.exit(seen != expected)",
        ]
    )


def show_raising(line: str) -> str:
    """Return the last lines of a script whose last call raises: status 1 if it does."""
    indented = line.replace("\n", "\n    ")
    return (
        f"try:\n    {indented}\nexcept Exception:\n    traceback.print_exc()\n    sys.exit(1)\n"
        "sys.exit(0)"
    )
