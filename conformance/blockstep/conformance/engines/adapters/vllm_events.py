"""The KV events of vLLM, translated into the vocabulary without repair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventPublisherFactory,
    KVEventBatch,
)

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_block_keys import Digests, get_lora_name
from blockstep.conformance.engines.adapters.vllm_fields import UNUSED, is_empty
from blockstep.conformance.engines.adapters.vllm_releases import require_release
from blockstep.spec import vocabulary as v

RELEASE = require_release()

PUBLISHER = "blockstep"

SPEC_KINDS: Mapping[v.GroupKind, str] = {
    v.GroupKind.FULL: "full_attention",
    v.GroupKind.SLIDING_WINDOW: "sliding_window",
    v.GroupKind.CHUNKED_LOCAL: "chunked_local_attention",
    v.GroupKind.RECURRENT: "mamba",
    v.GroupKind.CROSS_ATTENTION: "cross_attention",
}
"""The word by which an event says of which kind a KV group is."""


class Recorder(EventPublisher):  # type: ignore[misc]
    """A publisher that keeps the batches it is given until the adapter reads them."""

    def __init__(self, data_parallel_rank: int = 0, **settings: Any) -> None:
        super().__init__(data_parallel_rank)
        del settings  # of a socket: there is none
        self._batches: list[KVEventBatch] = []

    def publish(self, events: KVEventBatch) -> None:
        """Keep the events of one step."""
        self._batches.append(events)

    def take(self) -> list[Any]:
        """Return the events published since the last call, oldest first."""
        batches, self._batches = self._batches, []
        return [event for batch in batches for event in batch.events]

    def shutdown(self) -> None:
        """Do nothing: no socket is open."""


EventPublisherFactory.register_publisher(PUBLISHER, Recorder)


def ask_for_events(vllm_config: Any) -> None:
    """Make the release build `Recorder` as its publisher."""
    asked = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    # Set afterwards: a config names one of its own, a scheduler takes whoever is registered.
    asked.publisher = PUBLISHER
    vllm_config.kv_events_config = asked


def read_events(
    publisher: Any,
    digests: Digests,
    groups: Sequence[v.KVGroup],
    lora_ids: Mapping[str, int],
    separate_names: bool,
    get_extras: Callable[[v.BlockKey], object] | None,
) -> tuple[v.KVEvent, ...]:
    """Return the events that the release has published since the last call.

    Args:
        publisher: The scheduler's.
        digests: The block key of each digest.
        groups: The KV groups of the run.
        lora_ids: The number of each adapter.
        separate_names: See `VllmEngine.separate_names`.
        get_extras: Returns the extra keys of a block that the release hashes; None to compare none.

    Raises:
        EngineFault: an event is of an unknown kind, or names an unknown block or adapter.
    """
    if not isinstance(publisher, Recorder):
        return ()
    names = {
        number: (adapter, get_lora_name(adapter, separate_names))
        for adapter, number in lora_ids.items()
    }
    found = []
    for event in publisher.take():
        read = _read_event(event, digests, groups, names)
        if isinstance(read, v.BlockStored) and get_extras is not None:
            _check_extras(event, read.keys, get_extras)
        found.append(read)
    return tuple(found)


def _read_event(
    event: Any,
    digests: Digests,
    groups: Sequence[v.KVGroup],
    names: Mapping[int, tuple[str, str]],
) -> v.KVEvent:
    for field in UNUSED.get(type(event).__name__, ()):
        value = getattr(event, field, None)
        if not is_empty(value):
            raise EngineFault(
                f"{field} of a KV event is {value!r}, although no config here uses it"
            )
    if isinstance(event, AllBlocksCleared):
        return v.AllBlocksCleared()
    group = _read_group(event, groups)
    match event:
        case BlockRemoved(block_hashes=hashes, medium=medium):
            return v.BlockRemoved(_read_keys(digests, hashes, group), medium)
        case BlockStored(block_hashes=hashes, parent_block_hash=parent, medium=medium):
            return v.BlockStored(
                keys=_read_keys(digests, hashes, group),
                parent=None if parent is None else _read_keys(digests, [parent], group)[0],
                token_ids=tuple(event.token_ids),
                block_size=event.block_size,
                adapter=_read_adapter(event, names),
                medium=medium,
            )
    raise EngineFault(f"no such KV event: {event!r}")


def _read_group(event: Any, groups: Sequence[v.KVGroup]) -> int:
    """Return the KV group of an event's blocks: the first one where the release names none.

    Raises:
        EngineFault: there is no such group, or it is of another kind than the event says.
    """
    if not RELEASE.has_event_groups:
        return 0
    group = event.group_idx
    if not isinstance(group, int) or not 0 <= group < len(groups):
        raise EngineFault(f"group_idx of a KV event is {group!r}, of {len(groups)} groups")
    if isinstance(event, BlockStored):
        seen = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        right = SPEC_KINDS[groups[group].kind], groups[group].sliding_window or None
        if seen != right:
            raise EngineFault(f"a KV event says that group {group} is {seen!r}, not {right!r}")
    return group


def _read_keys(digests: Digests, hashes: list[Any], group: int) -> tuple[v.BlockKey, ...]:
    """Return the block keys that digests stand for, in one group."""
    keys = []
    for digest in hashes:
        if not isinstance(digest, bytes):
            raise EngineFault(
                f"a KV event has {digest!r}, a part of the digest of a block: "
                "set VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"
            )
        keys.append(digests.read(digest, group))
    return tuple(keys)


def _read_adapter(event: Any, names: Mapping[int, tuple[str, str]]) -> str | None:
    """Return the adapter that an event numbers; the LoRA name in the event, where it has one,
    must be the name of that adapter.
    """
    adapter, name = names.get(event.lora_id, (None, None))
    if getattr(event, "lora_name", name) != name:
        raise EngineFault(f"a KV event is of adapter {event.lora_name!r} and {event.lora_id!r}")
    return adapter


def _check_extras(
    event: Any, keys: tuple[v.BlockKey, ...], get_extras: Callable[[v.BlockKey], object]
) -> None:
    """Raise unless an event has the extra keys that the release hashes for each block.

    The content of the entry of a block with several digests is not compared.
    """
    extras = getattr(event, "extra_keys", None)
    if extras is None:
        return
    if len(extras) != len(keys):
        raise EngineFault(f"extra_keys of {len(keys)} blocks: {extras!r}")
    for reported, key in zip(extras, keys, strict=True):
        hashed: Any = get_extras(key)
        # Where the last item alone names a block that outputs complete, all of them are told,
        # behind the name of an adapter.
        if not RELEASE.has_all_items and reported and hashed:
            reported = tuple(
                [one for one in reported if one in hashed or not isinstance(one, tuple)]
            )
        if len(key.token_ids) == event.block_size and reported != hashed:
            raise EngineFault(f"extra_keys of {key!r} are {reported!r}, not {hashed!r}")
