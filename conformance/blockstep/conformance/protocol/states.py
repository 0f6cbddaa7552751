"""States: a `Snapshot` in JSON, and back.

Fields are named as in the vocabulary. Two are written otherwise, since the keys of a JSON object
are strings: `block_keys` holds for each block the chain of its key, first block first, or null;
`cached` holds the blocks of each key, in order of publication.
"""

from __future__ import annotations

from typing import Any

import msgspec

from blockstep.conformance.protocol.telling import Links, from_links, to_links
from blockstep.spec import vocabulary as v


class StateForm(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A snapshot as it is written in JSON."""

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
        msgspec.ValidationError: `cached` holds a block without a key in `block_keys`.
    """
    keys = [from_links(links) if links else None for links in form.block_keys]
    cached: dict[v.BlockKey, tuple[int, ...]] = {}
    for blocks in form.cached:
        key = keys[blocks[0]] if blocks and 0 <= blocks[0] < len(keys) else None
        if key is None:
            raise msgspec.ValidationError(
                f"cached blocks {list(blocks)}: the first has no key in block_keys - at `$.cached`"
            )
        cached[key] = blocks
    fields = {name: getattr(form, name) for name in StateForm.__struct_fields__}
    return v.Snapshot(**fields | {"block_keys": tuple(keys), "cached": cached})
