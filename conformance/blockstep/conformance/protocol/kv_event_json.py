"""KV events in JSON.

::

    {"type":"BlockStored","keys":[[{"token_ids":[1,2]},{"token_ids":[3,4]}]],"parent":
     [{"token_ids":[1,2]}],"token_ids":[3,4],"block_size":2,"adapter":null,"medium":"GPU"}

A key is the chain of its links, the first block first, so that each says for itself what it names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, assert_never

import msgspec

from blockstep.spec import vocabulary as v


class Link(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The part of a key that one block of the chain adds."""

    token_ids: tuple[int, ...]
    adapter: str | None = None
    cache_salt: str | None = None
    items: tuple[tuple[str, int], ...] = ()
    group: int = 0
    embeds: tuple[int, ...] = ()


Links: TypeAlias = tuple[Link, ...]


class _Stored(msgspec.Struct, forbid_unknown_fields=True, tag="BlockStored"):
    keys: tuple[Links, ...]
    parent: Links | None
    token_ids: tuple[int, ...]
    block_size: int
    adapter: str | None = None
    medium: str = v.MEDIUM_GPU


class _Removed(msgspec.Struct, forbid_unknown_fields=True, tag="BlockRemoved"):
    keys: tuple[Links, ...]
    medium: str = v.MEDIUM_GPU


class _Cleared(msgspec.Struct, forbid_unknown_fields=True, tag="AllBlocksCleared"):
    pass


Form: TypeAlias = _Stored | _Removed | _Cleared
"""An event in its JSON form."""


class OutputsForm(msgspec.Struct, forbid_unknown_fields=True):
    """`Outputs` in JSON."""

    rows: tuple[v.OutputRow, ...] = ()
    kv_events: tuple[Form, ...] = ()


class ResetDoneForm(msgspec.Struct, forbid_unknown_fields=True):
    """`ResetDone` in JSON."""

    success: bool
    kv_events: tuple[Form, ...] = ()


FORMS: dict[type, type[OutputsForm | ResetDoneForm]] = {
    v.Outputs: OutputsForm,
    v.ResetDone: ResetDoneForm,
}
"""The JSON forms of observations with KV events."""


def to_links(key: v.BlockKey) -> Links:
    """Return the chain of a key."""
    names = Link.__struct_fields__
    return tuple([Link(*[getattr(link, name) for name in names]) for link in key.chain()])


def from_links(links: Links) -> v.BlockKey:
    """Return the key of a chain. Raises `msgspec.ValidationError` for an empty chain."""
    key: v.BlockKey | None = None
    for link in links:
        names = (link.token_ids, link.adapter, link.cache_salt, link.items, link.group)
        key = v.BlockKey(key, *names, link.embeds)
    if key is None:
        raise msgspec.ValidationError("Invalid key []: names a link at least")
    return key


def to_forms(kv_events: Iterable[v.KVEvent]) -> tuple[Form, ...]:
    """Return events in their JSON form."""
    return tuple([_to_form(event) for event in kv_events])


def from_forms(forms: Iterable[Form]) -> tuple[v.KVEvent, ...]:
    """Return events from their JSON form. Raises `msgspec.ValidationError`."""
    return tuple([_from_form(form) for form in forms])


def _to_form(event: v.KVEvent) -> Form:
    match event:
        case v.BlockStored():
            parent = None if event.parent is None else to_links(event.parent)
            keys = tuple(map(to_links, event.keys))
            more = (event.token_ids, event.block_size, event.adapter, event.medium)
            return _Stored(keys, parent, *more)
        case v.BlockRemoved():
            return _Removed(tuple(map(to_links, event.keys)), event.medium)
        case v.AllBlocksCleared():
            return _Cleared()
        case _:
            assert_never(event)


def _from_form(form: Form) -> v.KVEvent:
    match form:
        case _Stored():
            parent = None if form.parent is None else from_links(form.parent)
            keys = tuple(map(from_links, form.keys))
            more = (form.token_ids, form.block_size, form.adapter, form.medium)
            return v.BlockStored(keys, parent, *more)
        case _Removed():
            return v.BlockRemoved(tuple(map(from_links, form.keys)), form.medium)
        case _Cleared():
            return v.AllBlocksCleared()
        case _:
            assert_never(form)
