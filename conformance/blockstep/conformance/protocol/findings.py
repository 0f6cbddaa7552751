"""Finding: one thing that is wrong, said so that a reader can act on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ERROR_CHARS_MAX = 500
"""Of the text of what an engine raised, so much is shown."""


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


def shown(value: object, length: int = 120) -> str:
    """A value in a line."""
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."


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
