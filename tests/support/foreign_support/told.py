"""Told: what a release of vLLM told in one call, copied with one thing in it changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec
import numpy as np

Change = tuple[str, Any]
"""The path of what was changed, by type and fields, and the copy."""


FIRST_FIELDS = {"SamplingParams": ("max_tokens",)}
"""Of records that are handed on as they are, by type: the fields that stand for all."""


def change_each(record: Any, path: str = "") -> Iterator[Change]:
    """Copies of a record of the release, each with one of its values changed by one.

    A record inside of a record is changed likewise, and of records in a list the first one. A value
    that says nothing (None, or empty) is left alone: there is nothing in it to change.
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
    """Another value of the same kind, with one thing changed in it; None if there is none."""
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
    """A container without one of its entries."""
    match value:
        case list() | tuple():
            return value[:-1]
        case set() | frozenset():
            return type(value)(value - {min(value)})
        case _:
            return dict(list(value.items())[:-1])


def _list_fields(value: Any) -> tuple[str, ...]:
    """Names of the fields of a record, of whatever kind records are in that release."""
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
