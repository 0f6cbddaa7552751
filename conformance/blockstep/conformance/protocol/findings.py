"""Finding: one thing that is wrong, said so that a reader can act on it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from traceback import extract_tb

ERROR_CHARS_MAX = 500
"""Characters of an engine's exception that a report shows, at most."""
FRAMES_MAX = 5
"""Innermost calls of an engine's exception that a report shows, at most."""
_HARNESS = re.compile(r"blockstep[/\\]conformance[/\\](lockstep|recorded|search|explore)[/\\]")


class FindingKind(StrEnum):
    """What sort of check spoke; the exit code follows from it (architecture section 5)."""

    PROPERTY = "property"
    """A property of `properties.md` does not hold; no reference is needed to say so."""
    DIVERGENCE = "divergence"
    """Spec and engine answered the same event differently."""
    FAULT = "fault"
    """The engine raised."""
    LIVENESS = "liveness"
    """No progress although requests are unfinished and nothing is due from outside."""
    SPEC = "spec"
    """The spec failed an assertion of its own: the spec is wrong."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two sides differ, or what was expected and what was seen."""

    field: str
    expected: str
    """The spec's side, or what the property demands."""
    seen: str
    """The engine's side."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violated property, divergence or fault, at one step."""

    kind: FindingKind
    property_id: str
    """"P1" ... ; "" for a divergence that no property names."""
    sentence: str
    """What should hold, as a name: `freed_tail_is_evicted_first`."""
    message: str
    """What was seen instead, in one line."""
    differences: tuple[Difference, ...] = ()
    frames: tuple[str, ...] = field(default=(), compare=False)
    """Where an engine raised, the innermost call last: `function (file.py:12): source`."""


def list_frames(error: BaseException) -> tuple[str, ...]:
    """The last calls in which `error` was raised, at most five, the innermost last.

    Those of the harness that called the engine are left out, unless the error is of the harness.
    """
    frames = extract_tb(error.__traceback__)
    first = next((i for i, one in enumerate(frames) if not _HARNESS.search(one.filename)), 0)
    told = []
    for one in frames[first:][-FRAMES_MAX:]:
        where = f"{one.name} ({Path(one.filename).name}:{one.lineno})"
        told.append(f"{where}: {shown(one.line)}" if one.line else where)
    return tuple(told)


def shown(value: object, length: int = 120) -> str:
    """A value in a line."""
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def shown_apart(one: str, other: str, length: int = 120) -> tuple[str, str]:
    """Two different texts in a line each, cut so that the first character that differs is shown."""
    if max(len(one), len(other)) <= length:
        return one, other
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    first = min(len(one), len(other)) if at is None else at
    start = max(first - length // 3, 0)
    if first < length - 3:
        return shown(one, length), shown(other, length)
    return tuple(shown(f"...{text[start:]}", length) for text in (one, other))  # type: ignore[return-value]


def say(value: object, length: int = 60) -> str:
    """A value on part of a line, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a class of somebody else's
        text = f"<{type(value).__name__}>"
    return text if len(text) <= length else text[: length - 3] + "..."


def tell_error(error: BaseException) -> str:
    """Type and text of what was raised, in a line of bounded length; its text may raise, too."""
    try:
        text = " ".join(str(error).split())
    except Exception as another:
        text = f"its text cannot be had: {type(another).__name__}"
    if len(text) > ERROR_CHARS_MAX:
        text = f"{text[:ERROR_CHARS_MAX]}... ({len(text):,} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def violated(property_id: str, sentence: str, message: str, *differences: Difference) -> Finding:
    """A property that does not hold."""
    return Finding(FindingKind.PROPERTY, property_id, sentence, message, differences)
