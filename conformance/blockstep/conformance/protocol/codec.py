"""Conversion of vocabulary values to plain JSON values and back, without loss.

A dataclass becomes an object of its fields; `type` names the class if several are possible. Reading
is as strict as writing: an unknown field, a missing one or one of a wrong type is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from blockstep.conformance.protocol.kv_event_json import (
    FORMS,
    Links,
    from_forms,
    from_links,
    to_links,
)
from blockstep.spec import vocabulary as v

T = TypeVar("T")


def build(raw: dict[str, Any], cls: type[T], where: str) -> T:
    """Return a value of the class with these fields. Raises `msgspec.ValidationError`."""
    form = FORMS.get(cls)
    if form is not None:
        parsed = msgspec.convert(raw, form)
        _refuse_unknown(raw, msgspec.to_builtins(parsed), where)
        return cls(**msgspec.structs.asdict(parsed) | {"kv_events": from_forms(parsed.kv_events)})
    value = msgspec.convert(raw, cls)
    _refuse_unknown(raw, msgspec.to_builtins(value), where)
    return value


def build_tagged(raw: dict[str, Any], types: Mapping[str, type], where: str) -> Any:
    """Return a value of the class that the tag names. Raises `msgspec.ValidationError`."""
    fields = dict(raw)
    tag = fields.pop("type", None)
    if not isinstance(tag, str) or tag not in types:
        known = ", ".join(types)
        raise msgspec.ValidationError(
            f"Invalid value {tag!r} - at `{where}.type`; it must be one of {known}"
        )
    return build(fields, types[tag], where)


def _refuse_unknown(raw: Any, known: Any, where: str) -> None:
    """Raise `msgspec.ValidationError` for a field that msgspec ignored, as it does in
    dataclasses.
    """
    if isinstance(raw, dict):
        for name, part in raw.items():
            if name not in known:
                raise msgspec.ValidationError(f"unknown field `{name}` - at `{where}`")
            _refuse_unknown(part, known[name], f"{where}.{name}")
    elif isinstance(raw, list) and raw and isinstance(raw[0], dict | list):
        for part, same in zip(raw, known, strict=True):
            _refuse_unknown(part, same, f"{where}[...]")


def get_fields(value: Any) -> dict[str, object]:
    """Return the fields of a dataclass by name."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def get_changed(value: Any) -> dict[str, object]:
    """Return the fields of a dataclass that differ from their defaults."""
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    }


def to_plain(value: Any) -> Any:
    """Return the value as lists, objects, strings and numbers, without fields at their defaults."""
    if dataclasses.is_dataclass(value):
        return {name: to_plain(part) for name, part in get_changed(value).items()}
    if isinstance(value, tuple):
        return [to_plain(part) for part in value]
    return msgspec.to_builtins(value)


def to_tagged(value: Any) -> dict[str, Any]:
    """Return the same with the name of the class as `type`, as `build_tagged` reads it."""
    return {"type": type(value).__name__, **to_plain(value)}


class StateForm(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A snapshot as it is written in JSON.

    Two fields differ from the vocabulary, since keys of a JSON object are strings: `block_keys`
    holds for each block the chain of its key, first block first, or null; `cached` holds the blocks
    of each key, in order of publication.
    """

    pause_state: v.PauseState
    waiting: tuple[str, ...]
    skipped_waiting: tuple[str, ...]
    running: tuple[str, ...]
    requests: tuple[v.RequestSnapshot, ...]
    ref_counts: tuple[int, ...]
    free_queue: tuple[int, ...]
    block_keys: tuple[Links | None, ...]
    cached: tuple[tuple[int, ...], ...]
    frames_in_flight: tuple[int, ...]
    next_frame_id: int
    finished_req_ids: tuple[str, ...]
    prev_scheduled_req_ids: tuple[str, ...]
    stats: v.Stats
    encoder: v.EncoderSnapshot | None = None
    transfers: v.TransfersSnapshot | None = None
    pins: v.PinsSnapshot | None = None
    admission_closed: bool = False
    has_work: bool | None = None


def to_form(snapshot: v.Snapshot) -> StateForm:
    """Return the snapshot as it is written in JSON."""
    fields: dict[str, Any] = {name: getattr(snapshot, name) for name in StateForm.__struct_fields__}
    fields["block_keys"] = tuple(key and to_links(key) for key in snapshot.block_keys)
    fields["cached"] = tuple(sorted(snapshot.cached.values()))
    return StateForm(**fields)


def from_form(form: StateForm) -> v.Snapshot:
    """Return the snapshot that was written.

    Raises:
        msgspec.ValidationError: `cached` holds a block without a key in `block_keys`, or the
            blocks of one key in two lists.
    """
    keys = [from_links(links) if links else None for links in form.block_keys]
    cached: dict[v.BlockKey, tuple[int, ...]] = {}
    for blocks in form.cached:
        key = keys[blocks[0]] if blocks and 0 <= blocks[0] < len(keys) else None
        if key is None:
            raise msgspec.ValidationError(
                f"cached blocks {list(blocks)}: the first has no key in block_keys - at `$.cached`"
            )
        if key in cached:
            raise msgspec.ValidationError(
                f"cached blocks {list(cached[key])} and {list(blocks)} have one key: "
                "they are one list - at `$.cached`"
            )
        cached[key] = blocks
    fields = {name: getattr(form, name) for name in StateForm.__struct_fields__}
    return v.Snapshot(**fields | {"block_keys": tuple(keys), "cached": cached})
