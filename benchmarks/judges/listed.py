"""Lists of property checks, and mutants that remove a check from a list or a type of event.

A check is an object in lists: those of `judge.properties` by type of event, and that of safety.
Mutants change these lists in a process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.judges.mutants import Mutant, Source, get_stem

from blockstep.conformance.judge import answers, properties
from blockstep.conformance.judge.properties import PROPERTIES, Sentence

HOLDERS = (properties, answers)
"""Modules that have lists of checks."""


def get_sentences() -> dict[str, Sentence]:
    """Return all checks by property and name."""
    found = [sentence for entry in PROPERTIES for sentence in entry.checks]
    return {f"{one.property_id} {one.sentence}": one for one in found}


def get_lists() -> dict[str, Any]:
    """Return every list of checks in a module: a tuple, or tuples by type of event."""
    return {
        f"{holder.__name__.rpartition('.')[2]}.{name}": value
        for holder in HOLDERS
        for name, value in vars(holder).items()
        if not name.startswith("_") and _holds_sentences(value)
    }


def _holds_sentences(value: object) -> bool:
    if isinstance(value, Mapping):
        inner = [one for held in value.values() if isinstance(held, tuple) for one in held]
        return bool(inner) and all(isinstance(one, Sentence) for one in inner)
    if not isinstance(value, tuple) or not value:
        return False
    return all(isinstance(one, Sentence) for one in value)


def find_listed(sources: Mapping[str, Source]) -> Iterator[Mutant]:
    """Yield mutants with a check missing at one equivalence, or for one type of event.

    A check that is missing in the whole list of `exact` is the mutant that finds nothing.
    """
    lists = get_lists()
    for title, one in get_sentences().items():
        module = one.judge.__module__.removeprefix("blockstep.conformance.").replace(".", "/")
        code = one.judge.__code__
        body = sorted({line for *_, line in code.co_lines() if line})
        lines = (body[1], body[1]) if len(body) > 1 else (body[0], body[0])
        function, file = one.judge.__name__, f"{module}.py"
        if file not in sources:
            continue
        for name, held in lists.items():
            if name != "properties.CHECKS_OF" and _is_in(one, held):
                listed = (title, name)
                yield Mutant("sentence", f"{title} off in {name}", file, function, lines,
                             listed=listed)  # fmt: skip
        for kind in one.kinds if len(one.kinds) > 1 else ():
            name = f"{kind.__name__} of {get_stem(file)}.{one.sentence}"
            yield Mutant("kind", name, file, function, lines, listed=(title, kind.__name__))


def _is_in(one: Sentence, held: Any) -> bool:
    return any(one in part for part in held.values()) if isinstance(held, Mapping) else one in held


def take_off(mutant: Mutant) -> None:
    """Remove the check from its list, or a type of event from the check. It cannot be undone."""
    title, name = mutant.listed
    one, lists = get_sentences()[title], get_lists()
    if name in lists:
        _take_from(one, lists[name], None)
        return
    kind = next(kind for kind in one.kinds if kind.__name__ == name)
    for held in lists.values():
        if isinstance(held, Mapping):
            _take_from(one, held, kind)
    object.__setattr__(one, "kinds", tuple(other for other in one.kinds if other is not kind))


def _take_from(one: Sentence, held: Any, kind: type | None) -> None:
    """Remove it from the tuple of one type or from all; a tuple is replaced wherever it is
    named.
    """
    if isinstance(held, dict):
        for key, part in held.items():
            if kind in (None, key):
                held[key] = tuple(other for other in part if other is not one)
        return
    less = tuple(other for other in held if other is not one)
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is held:
                setattr(module, name, less)
