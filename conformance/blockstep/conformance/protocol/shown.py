"""Completion of a state of which an engine shows a part (`engine.show_state`).

Parts that are not shown are taken from the specification's state, so they are neither compared nor
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from blockstep.conformance.engine import PartOfState
from blockstep.conformance.protocol.features import PARTS
from blockstep.conformance.protocol.renaming import pair_states
from blockstep.spec import vocabulary as v

ALWAYS_SHOWN = frozenset(
    {"request_id", "status", "output_token_ids", "num_computed_tokens", "block_tables"}
)
"""Fields of a request that every engine shows. Another field is shown if it differs from its
default in `RequestSnapshot`."""
DEFAULTS = {
    part.name: part.default for part in fields(v.RequestSnapshot) if part.name not in ALWAYS_SHOWN
}


def shows_holders(shown: v.Snapshot, config: v.Config) -> bool:
    """Whether a state shows the holders of each block.

    A partial state does, except the blocks that no request holds, which `show_state` does not
    take.
    """
    if not isinstance(shown, PartOfState):
        return True
    needs = config.kv_connector or any(getattr(config, part.setting) for part in PARTS)
    parts = (shown.transfers, *[getattr(shown, part.name) for part in PARTS])
    return not needs or any(part is not None for part in parts)


def complete_state(shown: PartOfState, spec: v.Snapshot, is_renamed: bool) -> v.Snapshot:
    """Return the state that an engine shows, with all other parts as in the specification.

    `is_renamed`: its block ids are the engine's own.
    """
    known = {request.request_id: request for request in spec.requests}
    requests = tuple([_complete(it, known.get(it.request_id)) for it in shown.requests])
    waiting, skipped = shown.waiting, shown.skipped_waiting
    if sorted(shown.waiting) == sorted(spec.waiting + spec.skipped_waiting):
        # Both queues are shown as one; the plan decides which of them is tried first.
        waiting, skipped = spec.waiting, spec.skipped_waiting
    frames = shown.frames_in_flight
    if len(frames) == len(spec.frames_in_flight):
        frames = spec.frames_in_flight
    return replace(
        spec,
        waiting=waiting,
        skipped_waiting=skipped,
        running=shown.running,
        requests=requests,
        ref_counts=shown.ref_counts,
        free_queue=shown.free_queue,
        block_keys=shown.block_keys,
        cached=_order_copies(shown, spec, is_renamed),
        frames_in_flight=frames,
        transfers=shown.transfers,
        has_work=spec.has_work if shown.has_work is None else shown.has_work,
        **{part.name: getattr(shown, part.name) for part in PARTS},
    )


def _order_copies(
    shown: v.Snapshot, spec: v.Snapshot, is_renamed: bool
) -> Mapping[v.BlockKey, tuple[v.BlockId, ...]]:
    """Return the blocks of each key in the specification's order, since an engine shows none."""
    name_of = pair_states(spec, shown).of if is_renamed else {}
    return {
        key: tuple(sorted(blocks, key=_place_in(spec.cached.get(key, ()), name_of)))
        for key, blocks in shown.cached.items()
    }


def _place_in(
    ordered: Sequence[v.BlockId], name_of: Mapping[v.BlockId, v.BlockId]
) -> Callable[[v.BlockId], int]:
    """Return a function that gives the place of a block among others, or the end if it is not
    there.
    """
    place = {block: index for index, block in enumerate(ordered)}
    return lambda block: place.get(name_of.get(block, block), len(place))


def _complete(shown: v.RequestSnapshot, spec: v.RequestSnapshot | None) -> v.RequestSnapshot:
    """Return a request with the fields that are not shown taken from the specification."""
    if spec is None:
        return shown
    missing = {
        name: getattr(spec, name)
        for name, default in DEFAULTS.items()
        if getattr(shown, name) == default
    }
    # The reason why a request waits is not shown.
    if v.Status.RUNNING not in (shown.status, spec.status):
        missing["status"] = spec.status
    return replace(shown, **missing)
