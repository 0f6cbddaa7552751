"""Changed records: copies of what a release of vLLM returned, each with one value changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec
import numpy as np

Change = tuple[str, Any]
"""The path of the changed value, by type and fields, and the copy."""


FIRST_FIELDS = {"SamplingParams": ("max_tokens",)}
"""Fields to change in records that the adapter passes on as a whole, by type."""


def change_each(record: Any, path: str = "") -> Iterator[Change]:
    """Yield copies of a record of the release, each with one of its values changed.

    A record inside of a record is changed in the same way; of a list, its first record. None and
    empty values are left alone: they have nothing to change.
    """
    path = path or type(record).__name__
    for name in _list_fields(record):
        value = getattr(record, name)
        for inner, other in _change_field(value, f"{path}.{name}"):
            changed = copy.copy(record)
            if isinstance(record, msgspec.Struct):
                setattr(changed, name, other)
            else:
                object.__setattr__(changed, name, other)  # it may be frozen
            yield inner, changed


def _change_field(value: Any, path: str) -> Iterator[Change]:
    if _list_fields(value):
        yield from change_each(value, path)
        return
    if isinstance(value, list | tuple) and value and _list_fields(value[0]):
        for inner, other in change_each(value[0], path):
            yield inner, type(value)([other, *value[1:]])
        yield f"{path} (an entry less)", value[:-1]
        return
    other = change(value)
    if other is not None:
        yield path, other
    if isinstance(value, list | tuple | set | frozenset | dict) and value:
        yield f"{path} (an entry less)", _shorten(value)


def change(value: Any) -> Any:
    """Return another value of the same type; None if there is none."""
    match value:
        case bool():
            return not value
        case Enum():
            members = list(type(value))
            return members[(members.index(value) + 1) % len(members)]
        case int():
            return value + 1
        case float():
            return value + 0.125
        case str():
            return value + "1"
        case list() | tuple():
            for index, entry in enumerate(value):
                other = change(entry)
                if other is not None:
                    return type(value)([*value[:index], other, *value[index + 1 :]])
        case set() | frozenset() if value:
            first = min(value)
            return type(value)([change(first), *(value - {first})])
        case Mapping():
            for key, entry in value.items():
                other = change(entry)
                if other is not None:
                    return {**value, key: other}
        case bytes():
            return value[:-1] + bytes([value[-1] ^ 1])
        case _ if hasattr(value, "clone"):  # an array of torch
            other = value.clone()
            other.view(-1)[0] = (
                not other.view(-1)[0] if other.dtype.is_signed is False else (other.view(-1)[0] + 1)
            )
            return other
        case np.ndarray():
            other = value.copy()
            other.flat[0] ^= 1
            return other
    return None


def _shorten(value: Any) -> Any:
    """Return a container without one of its entries."""
    match value:
        case list() | tuple():
            return value[:-1]
        case set() | frozenset():
            return type(value)(value - {min(value)})
        case _:
            return dict(list(value.items())[:-1])


def _list_fields(value: Any) -> tuple[str, ...]:
    """Return the names of the fields of a record, for each kind of record in that release."""
    if type(value).__name__ in FIRST_FIELDS:
        return FIRST_FIELDS[type(value).__name__]
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    known = getattr(type(value), "__dataclass_fields__", None)
    if known is not None:
        return tuple(known)
    module = type(value).__module__
    is_ours = module.endswith(("vllm_store", "vllm_ec_connector"))
    return tuple(vars(value)) if is_ours else ()
