"""Differences between two observations or two snapshots, one line each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from blockstep.conformance.protocol.findings import Difference, Subjects, shown_apart
from blockstep.spec import vocabulary as v

ABSENT = "-"
NOT_COMPARED: Mapping[type, Mapping[str, str]] = {
    v.Rejected: {"detail": "wording is free"},
    v.OutputRow: {"num_external_tokens": "a hint, held to the loads that plans told (P21)"},
    v.Plan: {"num_common_prefix_blocks": "a hint, compared of an engine that claims it"},
}
"""Fields of states and observations that are not compared, by type, with the reason. All others are
compared; a field is left out by `compare=False` in its declaration, and nowhere else."""


def observation_differences(
    spec: v.Observation, engine: object, with_hints: bool = False
) -> tuple[Difference, ...]:
    """Return where the engine's observation of one event differs from the spec's; empty if nowhere.

    `with_hints`: the engine claims `Capability.COMMON_PREFIX`, so the hints of its plans are
    compared.
    """
    with_hints = with_hints and isinstance(spec, v.Plan)
    if spec == engine:
        return _hint_differences(spec, engine) if with_hints else ()
    if type(spec) is not type(engine):
        return (Difference("observation", _short(spec), _short(engine)),)
    found = tuple(_field_differences("", spec, engine))
    return (*found, *_hint_differences(spec, engine)) if with_hints else found


def _hint_differences(spec: v.Observation, engine: object) -> tuple[Difference, ...]:
    if not (isinstance(spec, v.Plan) and isinstance(engine, v.Plan)):
        return ()
    mine, theirs = spec.num_common_prefix_blocks, engine.num_common_prefix_blocks
    return () if mine == theirs else tuple(_value("num_common_prefix_blocks", mine, theirs))


def find_subjects(difference: Difference, names: Collection[v.RequestId]) -> Subjects:
    """Return the request or the block that a difference is about, by the words of its field.

    Args:
        difference: A difference as this module tells it: `rows A num_computed_tokens`, `block 3`.
        names: The requests that there are.
    """
    words = difference.field.split(" ")
    requests = tuple(word for word in words[1:] if word in names)
    is_block = words[0] == "block" and words[1:2] and words[1].isdecimal()
    return Subjects(requests[:1], (int(words[1]),) if is_block else ())


def snapshot_differences(spec: v.Snapshot, engine: v.Snapshot) -> tuple[Difference, ...]:
    """Return where two states differ: queues, requests, blocks, then the rest."""
    if spec == engine:
        return ()
    found: list[Difference] = []
    for name in _QUEUES:
        found.extend(_field(name, spec, engine))
    for names, find in _DESCRIBED_FIELDS.items():
        # Not everything has words, for example the order of requests or the parent of a key.
        found.extend(
            find(spec, engine) or [each for name in names for each in _field(name, spec, engine)]
        )
    for part in fields(v.Snapshot):
        if part.name not in _SHOWN_APART:
            found.extend(_field(part.name, spec, engine))
    return tuple(found)


def _field(name: str, spec: v.Snapshot, engine: v.Snapshot) -> list[Difference]:
    return _field_differences(name, getattr(spec, name), getattr(engine, name))


def name_key(key: v.BlockKey | None) -> str:
    """Return a short name of a key: its block index and tokens, adapter, salt, group and items."""
    if key is None:
        return ABSENT
    extras = [key.adapter and f"adapter {key.adapter}", key.cache_salt and f"salt {key.cache_salt}"]
    extras += [f"group {key.group}"] if key.group else []
    extras += [f"{identifier}@{offset}" for identifier, offset in key.items]
    extras += ["embeds " + ",".join(map(str, key.embeds))] if key.embeds else []
    tokens = ",".join(map(str, key.token_ids[:6])) + ("..." if len(key.token_ids) > 6 else "")
    return " ".join([f"#{key.index}[{tokens}]", *(extra for extra in extras if extra)])


def _request_differences(spec: v.Snapshot, engine: v.Snapshot) -> list[Difference]:
    found: list[Difference] = []
    left = {request.request_id: request for request in spec.requests}
    right = {request.request_id: request for request in engine.requests}
    for name in sorted({*left, *right}):
        if left.get(name) == right.get(name):
            continue
        mine, theirs = left.get(name), right.get(name)
        if mine is None or theirs is None:
            found.append(Difference(f"request {name}", _present(mine), _present(theirs)))
        else:
            found.extend(_field_differences(f"request {name}", mine, theirs))
    return found


def _present(request: v.RequestSnapshot | None) -> str:
    return "no such request" if request is None else str(request.status)


def _block_differences(spec: v.Snapshot, engine: v.Snapshot) -> list[Difference]:
    found: list[Difference] = []
    for block_id in range(max(len(spec.ref_counts), len(engine.ref_counts))):
        mine, theirs = describe_block(spec, block_id), describe_block(engine, block_id)
        if mine != theirs:
            found.append(Difference(f"block {block_id}", mine, theirs))
    return found


def describe_block(snapshot: v.Snapshot, block_id: v.BlockId) -> str:
    """Return a block in words: `free, carries #0[1,2]`, `held by 2, no key`."""
    if block_id >= len(snapshot.ref_counts):
        return "no such block"
    ref_count = snapshot.ref_counts[block_id]
    queued = snapshot.free_queue.count(block_id)
    held = f"held by {ref_count}" if ref_count else "free" if queued else "no holder, not queued"
    twice = f", queued {queued} times" if queued > 1 or (queued and ref_count) else ""
    key = snapshot.block_keys[block_id] if block_id < len(snapshot.block_keys) else None
    return f"{held}{twice}, " + ("no key" if key is None else f"carries {name_key(key)}")


def _cached_differences(spec: v.Snapshot, engine: v.Snapshot) -> list[Difference]:
    found: list[Difference] = []
    left, right = spec.cached, engine.cached
    for key in [*left, *(key for key in right if key not in left)]:
        if left.get(key) != right.get(key):
            mine, theirs = _blocks(left, key), _blocks(right, key)
            found.append(Difference(f"cached {name_key(key)}", mine, theirs))
    return found


def _blocks(cached: Mapping[v.BlockKey, tuple[v.BlockId, ...]], key: v.BlockKey) -> str:
    return "blocks " + ", ".join(map(str, cached[key])) if key in cached else ABSENT


def _field_differences(name: str, mine: object, theirs: object) -> list[Difference]:
    """Return the differences field by field if both are records of one type, else of the whole
    values.
    """
    if mine == theirs:
        return []
    if is_dataclass(mine) and type(mine) is type(theirs):
        parts = [
            (part.name, getattr(mine, part.name), getattr(theirs, part.name))
            for part in fields(mine)
            if part.compare
        ]
    elif (
        isinstance(mine, tuple)
        and isinstance(theirs, tuple)
        and len(mine) == len(theirs)
        and all(map(is_dataclass, mine))
        and _list_names(mine) == _list_names(theirs)
    ):
        parts = list(zip(_list_names(mine), mine, theirs, strict=True))
    elif _are_named(mine) and _are_named(theirs):
        return _named(name, mine, theirs) or _value(name, mine, theirs)
    else:
        return _value(name, mine, theirs)
    return [
        difference
        for label, left, right in parts
        for difference in _field_differences(f"{name} {label}".strip(), left, right)
    ]


def _value(name: str, mine: object, theirs: object) -> list[Difference]:
    if mine == theirs:
        return []
    left, right = _short(mine), _short(theirs)
    if left == right:  # they differ in what was cut off
        left, right = shown_apart(str(mine), str(theirs))
    return [Difference(name, left, right)]


def _named(name: str, mine: Any, theirs: Any) -> list[Difference]:
    """Return the differences of records by request id; [] if only the order differs."""
    left, right = ({one.request_id: one for one in records} for records in (mine, theirs))
    found: list[Difference] = []
    for request_id in [*left, *(other for other in right if other not in left)]:
        label = f"{name} {request_id}".strip()
        if request_id in left and request_id in right:
            found += _field_differences(label, left[request_id], right[request_id])
        else:
            sides = [request_id in side for side in (left, right)]
            found.append(Difference(label, *["there" if side else ABSENT for side in sides]))
    return found


def _list_names(records: tuple[object, ...]) -> list[str]:
    """Return the request id of each record, "" for one of no request."""
    return [getattr(record, "request_id", "") for record in records]


def _are_named(records: object) -> bool:
    """Whether these are records of requests, each of a different one."""
    if not isinstance(records, tuple) or not all(map(is_dataclass, records)):
        return False
    names = [getattr(record, "request_id", None) for record in records]
    return None not in names and len(set(names)) == len(names)


def _short(value: object) -> str:
    """Return a value on one line: tuples as lists, long values cut."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        text = "[" + ", ".join(_short(item) for item in value[:12])
        return text + (f", ... {len(value)} in all]" if len(value) > 12 else "]")
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


_QUEUES = ("waiting", "skipped_waiting", "running", "free_queue")
_DESCRIBED_FIELDS: dict[tuple[str, ...], Callable[[v.Snapshot, v.Snapshot], list[Difference]]] = {
    ("requests",): _request_differences,
    ("ref_counts", "block_keys"): _block_differences,
    ("cached",): _cached_differences,
}
_SHOWN_APART = {*_QUEUES, *(name for names in _DESCRIBED_FIELDS for name in names)}
