"""Changed values: copies of values and records with one field changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from typing import Any

from blockstep.spec.vocabulary import BlockKey, EncoderSnapshot, PinsSnapshot, TransfersSnapshot


def alter(value: Any, name: str = "") -> Any:
    """Return another value of the same type. `name`: the field, which decides in place of None."""
    match value:
        case bool():
            return not value
        case StrEnum():
            return next(other for other in type(value) if other is not value)
        case int():
            return value + 1
        case str():
            return value + "1"
        case tuple():
            return (*value, *value[-1:]) if value else ("Z",)
        case Mapping():
            return {}
        case BlockKey():
            return value.parent
        case None if name == "encoder":
            return EncoderSnapshot()
        case None if name == "transfers":
            return TransfersSnapshot()
        case None if name == "pins":
            return PinsSnapshot()
        case None if name == "has_work":
            return True
        case None if name == "num_external_tokens":
            return 1
    raise TypeError(f"no other value for {value!r}: say here what one is, or give the sample one")


def alter_each(record: Any) -> Iterator[tuple[type, str, Any]]:
    """Yield each field of a record and of the records in it, with that field alone changed.

    Each field comes as its type, its name, and the changed record.
    """
    for part in fields(record):
        value = getattr(record, part.name)
        inner = value if isinstance(value, tuple) and value and is_dataclass(value[0]) else ()
        if is_dataclass(value):
            for owner, name, other in alter_each(value):
                yield owner, name, replace(record, **{part.name: other})
        for owner, name, other in alter_each(inner[0]) if inner else ():
            yield owner, name, replace(record, **{part.name: (other, *inner[1:])})
        if not is_dataclass(value):  # another record differs in a field of its own
            yield type(record), part.name, replace(record, **{part.name: alter(value, part.name)})
