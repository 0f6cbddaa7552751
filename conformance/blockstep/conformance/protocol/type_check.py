"""Type check of a value against the vocabulary's annotations, down to its last field.

An engine's observation is made by foreign code. If it is ill-typed, it cannot be compared, and its
author needs the name of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from blockstep.conformance.protocol.findings import Difference, Finding, FindingKind, cut_repr
from blockstep.spec import vocabulary as v

STATE = v.Snapshot | None
KINDS = {v.Observation: "an observation", STATE: "None or a Snapshot"}
PLAIN = {int: "an int", str: "a str", bool: "a bool", NoneType: "None"}


@dataclass(frozen=True, slots=True)
class IllTyped:
    """The first field with a wrong type."""

    path: str
    value: object
    rule: str

    def inside(self, path: str) -> IllTyped:
        """Return the same with the path of the enclosing value in front."""
        return IllTyped(path + self.path, self.value, self.rule)


Check: TypeAlias = Callable[[object], IllTyped | None]
"""A function that returns what is wrong with a value, or None. It is fast for right values."""


def find_ill_typed(value: object, kind: Any) -> IllTyped | None:
    """Return the first field of `value` that does not match the annotations of `kind`; None if all
    do.

    `kind` is a type of the vocabulary, or a union (`A | B`). An int must not be a bool or a float.
    """
    return _check_of(kind)(value)


def fault_of_types(event: v.Event, seen: object, after: object) -> Finding | None:
    """Return a finding for an ill-typed observation of an event or state after it (FAULT), or
    None.
    """
    name = type(event).__name__
    for what, value, kind in (
        (f"apply({name}(...))", seen, v.Observation),
        (f"snapshot() after {name}", after, STATE),
    ):
        found = find_ill_typed(value, kind)
        if found is not None:
            text, path = cut_repr(found.value), f"{type(value).__name__}{found.path}"
            rule = found.rule
            if not found.path:
                path, rule = "the answer", f"{KINDS[kind]} of blockstep.spec.vocabulary"
            return Finding(
                FindingKind.FAULT,
                "",
                "engine_answers_in_the_vocabulary",
                f"{what}: {path} = {text}: must be {rule}",
                (Difference(path, rule, text),),
            )
    return None


# Checks, made once per type.


@cache
def _check_of(kind: Any) -> Check:
    if kind in PLAIN:
        return _plain(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _any_of(kind, args)
    if origin is tuple:
        return _items(kind, args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(kind, *args)
    if is_dataclass(kind):
        return _record(kind)
    assert isinstance(kind, type), f"the vocabulary has no {kind}"
    return _plain(kind)


def _plain(kind: type) -> Check:
    rule = _name(kind)

    def check(value: object) -> IllTyped | None:
        is_right = type(value) is kind or (
            isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        )
        return None if is_right else IllTyped("", value, rule)

    return check


def _any_of(kind: Any, kinds: tuple[Any, ...]) -> Check:
    """Return a check for a union; a wrong field is reported for the record that contains it."""
    checks = {one: _check_of(one) for one in kinds}
    rule = _name(kind)

    def check(value: object) -> IllTyped | None:
        own = checks.get(type(value))
        if own is not None:
            return own(value)
        found = [one(value) for one in checks.values()]
        if None in found:
            return None
        deeper = [one for one in found if one is not None and one.path]
        return deeper[0] if deeper else IllTyped("", value, rule)

    return check


def _items(kind: Any, kinds: tuple[Any, ...]) -> Check:
    """Return a check for a tuple, of any length with one type or of fixed length."""
    rule = _name(kind)
    is_open = kinds[-1] is Ellipsis
    checks = [_check_of(one) for one in kinds if one is not Ellipsis]
    own = {kinds[0]} if is_open and kinds[0] in PLAIN else set()

    def check(value: object) -> IllTyped | None:
        if not isinstance(value, tuple) or not (is_open or len(value) == len(checks)):
            return IllTyped("", value, rule)
        if own and own.issuperset(map(type, value)):
            return None
        for index, item in enumerate(value):
            found = checks[0 if is_open else index](item)
            if found is not None:
                return found.inside(f"[{index}]")
        return None

    return check


def _mapping(kind: Any, key_kind: Any, value_kind: Any) -> Check:
    rule, check_key, check_value = _name(kind), _check_of(key_kind), _check_of(value_kind)

    def check(value: object) -> IllTyped | None:
        if not isinstance(value, Mapping):
            return IllTyped("", value, rule)
        for key, held in value.items():
            found = check_key(key) or check_value(held)
            if found is not None:
                return found.inside(f"[{cut_repr(key)}]")
        return None

    return check


def _record(kind: Any) -> Check:
    hints = get_type_hints(kind)
    checks = [(field.name, _check_of(hints[field.name])) for field in fields(kind)]
    rule = _name(kind)

    def check(value: object) -> IllTyped | None:
        if not isinstance(value, kind):
            return IllTyped("", value, rule)
        for name, check_field in checks:
            found = check_field(getattr(value, name))
            if found is not None:
                return found.inside(f".{name}")
        return None

    return check


def _name(kind: Any) -> str:
    """Return a type in words: `a tuple of NewRow`."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_name, args))
    if origin is tuple:
        inner = [one for one in args if one is not Ellipsis]
        return f"a tuple of {', '.join(map(_plural, inner))}"
    if isinstance(origin, type):
        return f"a mapping from {_plural(args[0])} to {_plural(args[1])}"
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return f"{article} {kind.__name__}" + (" of the vocabulary" if issubclass(kind, Enum) else "")


def _plural(kind: Any) -> str:
    text = _name(kind)
    return text.removeprefix("an ").removeprefix("a ") if get_origin(kind) is None else text
