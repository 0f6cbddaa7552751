"""Findings: what is wrong, in words that a reader can act on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from traceback import extract_tb
from typing import TypeAlias, TypeVar

ERROR_CHARS_MAX = 500
"""Most characters of an engine's exception in a report."""
SUBJECTS_MAX = 3
"""Requests or blocks that a finding names as its subjects where lists of them differ, at most."""
FRAMES_MAX = 5
"""Most calls of an engine's exception in a report, counted from the innermost."""
_HARNESS = re.compile(r"blockstep[/\\]conformance[/\\](lockstep|recorded|search|explore)[/\\]")
_PROCESS = (str(Path("engines", "process.py")), str(Path("protocol", "link.py")))

T = TypeVar("T")


class FindingKind(StrEnum):
    """The kind of a finding, from which the exit code follows."""

    PROPERTY = "property"
    """A property of `properties.md` does not hold; this needs no reference."""
    DIVERGENCE = "divergence"
    """Spec and engine returned different observations or states after the same event."""
    FAULT = "fault"
    """The engine raised an exception."""
    LIVENESS = "liveness"
    """Requests are unfinished but make no progress, and no outside event is awaited."""
    SPEC = "spec"
    """The spec raised, as by one of its own assertions: the spec is wrong."""
    HARNESS = "harness"
    """A check of Blockstep raised: the finding is about Blockstep, not about the engine."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two sides differ, or an expected and a seen value."""

    field: str
    expected: str
    """The spec's value, or what the property demands."""
    seen: str
    """The engine's value."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Subjects:
    """The requests and the blocks that a finding is about, as far as its judge knows them."""

    requests: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()


About: TypeAlias = Subjects | str
"""Subjects, or the id of the only request among them."""
NO_SUBJECTS = Subjects()
"""The subjects of a finding about the pool, a queue or the engine as a whole."""


def of_request(request_id: str) -> Subjects:
    """Return the subjects of a finding about one request."""
    return Subjects((request_id,))


def of_block(block: int) -> Subjects:
    """Return the subjects of a finding about one block."""
    return Subjects((), (block,))


def requests_apart(expected: Iterable[object], seen: Iterable[object]) -> Subjects:
    """Return as subjects the requests in which two lists differ, at most three.

    The lists are of ids, or of records that have one (`request_id`).
    """
    apart = _list_apart(tuple(expected), tuple(seen))
    names = dict.fromkeys(str(getattr(it, "request_id", it)) for it in apart)
    return Subjects(tuple(names)[:SUBJECTS_MAX])


def blocks_apart(expected: Iterable[int], seen: Iterable[int]) -> Subjects:
    """Return as subjects the blocks in which two lists of them differ, at most three."""
    return Subjects((), tuple(_list_apart(tuple(expected), tuple(seen)))[:SUBJECTS_MAX])


def _list_apart(one: tuple[T, ...], other: tuple[T, ...]) -> list[T]:
    """Return what only one of the lists has; of lists with the same items what differs first."""
    alone = [it for it in one if it not in other] + [it for it in other if it not in one]
    if not alone:
        alone = [it for pair in zip(one, other, strict=False) if pair[0] != pair[1] for it in pair]
    return list(dict.fromkeys(alone))


@dataclass(frozen=True, slots=True)
class Finding:
    """One violated property, divergence or fault, at one step."""

    kind: FindingKind
    property_id: str
    """"P1" and so on; "" for a divergence that no property covers."""
    sentence: str
    """The name of the check: `freed_tail_is_evicted_first`."""
    message: str
    """The observed defect, in one line."""
    differences: tuple[Difference, ...] = ()
    subjects: Subjects = NO_SUBJECTS
    frames: tuple[str, ...] = field(default=(), compare=False)
    """The calls in which an engine raised, the innermost last: `function (file.py:12): source`."""
    diverged: tuple[Difference, ...] = field(default=(), compare=False)
    """Fields in which spec and engine differ in the same step; filled if a property is violated."""


def list_frames(error: BaseException) -> tuple[str, ...]:
    """Return the calls in which `error` was raised, at most five, the innermost last.

    Calls of the harness are left out, unless the error is in the harness.
    """
    frames = extract_tb(error.__traceback__)
    if frames and frames[-1].filename.endswith(_PROCESS):  # where it raised is in no Python of ours
        return ()
    first = next((i for i, one in enumerate(frames) if not _HARNESS.search(one.filename)), 0)
    lines = []
    for one in frames[first:][-FRAMES_MAX:]:
        where = f"{one.name} ({Path(one.filename).name}:{one.lineno})"
        lines.append(f"{where}: {shown(one.line)}" if one.line else where)
    return tuple(lines)


def shown(value: object, length: int = 120) -> str:
    """Return a value as text, cut to one line."""
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."


def shown_apart(one: str, other: str, length: int = 120) -> tuple[str, str]:
    """Return two different strings, each cut to one line that shows the first difference."""
    if max(len(one), len(other)) <= length:
        return one, other
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    first = min(len(one), len(other)) if at is None else at
    start = max(first - length // 3, 0)
    if first < length - 3:
        return shown(one, length), shown(other, length)
    return tuple(shown(f"...{text[start:]}", length) for text in (one, other))  # type: ignore[return-value]


def cut_repr(value: object, length: int = 60) -> str:
    """Return the repr of any value, cut to a part of a line."""
    try:
        text = repr(value)
    except Exception:  # a class of foreign code
        text = f"<{type(value).__name__}>"
    return text if len(text) <= length else text[: length - 3] + "..."


def describe_error(error: BaseException) -> str:
    """Return type and text of an exception, in one line of limited length; its `__str__` may
    raise.
    """
    try:
        text = " ".join(str(error).split())
    except Exception as another:
        text = f"no text, since __str__ raised {type(another).__name__}"
    if len(text) > ERROR_CHARS_MAX:
        text = f"{text[:ERROR_CHARS_MAX]}... ({len(text):,} characters)"
    if not text and isinstance(error, AssertionError):  # its condition says what was wrong
        text = "".join(shown(one.line or "") for one in extract_tb(error.__traceback__)[-1:])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def blame_check(error: Exception, what: str) -> Finding:
    """Return the finding about a check that raised; `what` names it: "the check NAME"."""
    return Finding(
        FindingKind.HARNESS,
        "",
        "checks_raise_nothing",
        f"{what} raised {describe_error(error)}; this says nothing about the engine: please "
        "report it to Blockstep, with this program",
        frames=list_frames(error),
    )


def leave_out_raised(findings: list[Finding]) -> list[Finding]:
    """Return the findings about one step without those about checks that raised, if others are
    left.

    A step that is wrong may contradict itself so much that a check of it has no meaning. If nothing
    else is wrong, the check is.
    """
    return [it for it in findings if it.kind is not FindingKind.HARNESS] or findings


MUST_WAIT = "is admitted, and must wait"
"""The end of the message about a request that was admitted before it was ready."""
CACHED_TOO_EARLY = "counts more cached blocks than it has filled"
"""The end of the message about a request whose blocks are published before they are full."""
EVICTED_TOO_EARLY = "is evicted from the cache, and no request takes it"
"""The end of the message about a block that lost its key in a commit."""


def violated(
    property_id: str,
    sentence: str,
    message: str,
    *differences: Difference,
    subjects: About = NO_SUBJECTS,
) -> Finding:
    """Return a finding for a property that does not hold."""
    if isinstance(subjects, str):
        subjects = of_request(subjects)
    return Finding(FindingKind.PROPERTY, property_id, sentence, message, differences, subjects)
