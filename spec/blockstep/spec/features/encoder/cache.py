"""Encoder: its compute budget per step, and the cache of its outputs.

    cache    | held | held | freeable: evicted last ... next |  free  |      embeddings
    prompt   |  text  | item | text |   item   |  text               |      tokens
    chunk                |-- computed now --|+| embeddings read; + by a draft head, one ahead

An entry is for one item, and all requests with that item share it. Each occurrence of the item in a
running request holds it, from the first chunk that reads it until a chunk ends after it. Then it is
freeable: kept until the room is needed. What a step plans is available when it runs, and frames run
in order, so a frame in flight has read an item before a later one drops it. An encoder-decoder
model shares nothing: the embeddings of an item are read by the step that computes them, and dropped
with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from blockstep.spec.copies import replace, wide_dataclass
from blockstep.spec.core.parts import Part
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import MultiModalItem, Request, RequestId

Holder: TypeAlias = tuple[RequestId, int]
"""An occurrence of an item: request id, and index of the item in it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An encoded item."""

    num_embeds: int
    holders: tuple[Holder, ...] = ()
    """Sorted."""


NO_ENTRIES: Final[FrozenMap[str, Entry]] = FrozenMap()


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item that the step being planned encodes, or loads."""

    holder: Holder
    """The occurrence that it is encoded for."""
    identifier: str
    num_embeds: int
    is_external: bool
    """Whether it is loaded, which needs no compute."""

    @property
    def cost(self) -> int:
        """Embeddings that the encoder computes for it."""
        return 0 if self.is_external else self.num_embeds


@wide_dataclass(frozen=True, slots=True)
class Encoder:
    """An encoder and its cache; `planned` and `evicted` are used while a step is planned."""

    size: int
    """Maximum of embeddings in the cache; 0: there is no encoder."""
    is_shared: bool = True
    """False for an encoder-decoder model."""
    entries: FrozenMap[str, Entry] = NO_ENTRIES
    """The entries by identifier."""
    freeable: tuple[str, ...] = ()
    """Entries without a holder, in the order of eviction."""
    offered: tuple[str, ...] = ()
    """Identifiers that a connector has, sorted."""
    freed: tuple[str, ...] = ()
    """Identifiers that the worker drops with the next plan; only if nothing is shared."""
    budget: int = 0
    """Embeddings that the step, or the next one, may still compute."""
    planned: tuple[PlannedItem, ...] = ()
    evicted: tuple[tuple[str, int], ...] = ()
    """Identifiers with embeddings, in the order of eviction."""


NO_ENCODER: Final = Encoder(0)
ENCODER: Final = Part("encoder", NO_ENCODER)
"""The encoder of a state, or of a step."""


# Room.


def count_free(encoder: Encoder) -> int:
    """Return the embeddings that nothing takes. Source: vLLM 0.19.1 `num_free_slots`; P22."""
    kept = encoder.entries.values() if encoder.is_shared else encoder.planned
    return encoder.size - sum([one.num_embeds for one in kept])


def count_freeable(encoder: Encoder) -> int:
    """Return the embeddings that have no holder. Source: vLLM 0.19.1 `num_freeable_slots`; P22."""
    entries = encoder.entries
    return count_free(encoder) + sum([entries[name].num_embeds for name in encoder.freeable])


def has_room(encoder: Encoder, item: MultiModalItem) -> bool:
    """Whether an item can be encoded now, and kept. Source: vLLM 0.19.1 `can_allocate`; P9, P22."""
    cost = 0 if item.identifier in encoder.offered else item.num_embeds
    return item.num_embeds <= count_freeable(encoder) and cost <= encoder.budget


def evict_for(encoder: Encoder, num_embeds: int) -> Encoder:
    """Evict entries until `num_embeds` are free: what became freeable first is evicted first.

    The caller has checked that it fits. Source: vLLM 0.19.1 `can_allocate`; P16, P22.
    """
    if count_free(encoder) >= num_embeds:
        return encoder
    first, *others = encoder.freeable
    evicted = (*encoder.evicted, (first, encoder.entries[first].num_embeds))
    entries = encoder.entries.without(first)
    encoder = replace(encoder, entries=entries, freeable=tuple(others), evicted=evicted)
    return evict_for(encoder, num_embeds)


# Holding.


def hold_entry(encoder: Encoder, identifier: str, holder: Holder) -> Encoder:
    """Add a holder to an entry. Source: vLLM 0.19.1 `check_and_update_cache`; P22."""
    entry = encoder.entries[identifier]
    entry = Entry(entry.num_embeds, tuple(sorted({*entry.holders, holder})))
    return replace(
        encoder,
        entries=encoder.entries.having(identifier, entry),
        freeable=tuple([name for name in encoder.freeable if name != identifier]),
    )


def let_go(encoder: Encoder, identifier: str, holder: Holder) -> Encoder:
    """Remove a holder from an entry, if it holds it. The last one leaves it freeable.

    Source: vLLM 0.19.1 `free_encoder_input`; P18, P22.
    """
    entry = encoder.entries.get(identifier)
    if entry is None or holder not in entry.holders:
        return encoder
    holders = tuple([other for other in entry.holders if other != holder])
    freeable = encoder.freeable if holders else (*encoder.freeable, identifier)
    entries = encoder.entries.having(identifier, Entry(entry.num_embeds, holders))
    return replace(encoder, entries=entries, freeable=freeable)


def free_items(encoder: Encoder, request: Request, num_computed: int | None = None) -> Encoder:
    """Release a request's items that end within its computed tokens; without a number, all of them.

    Known tokens only: no draft is part of an item, so a rejected one never rolls back into an item.
    Source: vLLM 0.19.1 `_free_encoder_inputs`, `EncoderCacheManager.free`; P22.
    """
    for index, item in enumerate(request.items):
        if num_computed is None or item.offset + item.length <= num_computed:
            encoder = let_go(encoder, item.identifier, (request.request_id, index))
    return encoder


# One item of a chunk.


def is_item_needed(item: MultiModalItem, num_computed: int, num_new: int, num_ahead: int) -> bool:
    """Whether a chunk of `num_new` tokens reads an embedding of the item.

    A draft head reads the embedding of the token after each, so `num_ahead` more. Source: vLLM
    0.19.1 `_try_schedule_encoder_inputs`; P15, P22.
    """
    first = max(num_computed - item.offset, 0)
    end = min(num_computed + num_new + num_ahead - item.offset, item.length)
    return any(item.is_embed[first:end]) if item.is_embed else first < end


def compute_end_before(offset: int, num_computed: int, num_ahead: int) -> int:
    """Return the tokens of a chunk that ends so early that neither it nor the head reads the item.

    Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P10, P22.
    """
    return max(offset - num_computed - num_ahead, 0)


def compute_end_between_items(items: Sequence[MultiModalItem], num_computed: int, end: int) -> int:
    """Return the end of a chunk that could reach `end` and must not end inside an item.

    That is `end` or the offset of the item around it, and `num_computed` if the chunk would begin
    within that item: bidirectional attention needs all of an item in one chunk, wherever its KV
    begins. Source: vLLM `disable_chunked_mm_input`; upstream #52306, #52412; P22.
    """
    for item in items:
        if item.offset < end < item.offset + item.length:
            return max(item.offset, num_computed)
    return end


def take_item(encoder: Encoder, request: Request, index: int) -> Encoder:
    """Hold an item of a request: its entry, or a new one planned with this step. Each occurrence of
    the item counts. Source: vLLM 0.19.1 `check_and_update_cache`, `allocate`; P22.
    """
    item, holder = request.items[index], (request.request_id, index)
    identifier, num_embeds = item.identifier, item.num_embeds
    if identifier in encoder.entries:
        return hold_entry(encoder, identifier, holder)
    planned = PlannedItem(holder, identifier, num_embeds, identifier in encoder.offered)
    assert num_embeds <= count_freeable(encoder), "the caller has checked the room"
    encoder = evict_for(encoder, num_embeds)
    if encoder.is_shared:
        entries = encoder.entries.having(identifier, Entry(num_embeds, (holder,)))
        encoder = replace(encoder, entries=entries)
    return replace(
        encoder, budget=encoder.budget - planned.cost, planned=(*encoder.planned, planned)
    )


# One step.


def withdraw_items(encoder: Encoder, order: Sequence[RequestId]) -> Encoder:
    """Withdraw what this step planned for requests that have no row in it any more.

    `order`: the requests with rows. If some of these share an item, it is encoded for the first, at
    the same cost. Otherwise there is no entry, its compute is available to others, and so is its
    room: what was evicted last in this step returns to its place, as far as it fits. Source:
    upstream #23347; P4, P9, P22.
    """
    planned: list[PlannedItem] = []
    entries, budget = encoder.entries.to_dict(), encoder.budget
    for item in encoder.planned:
        holders = (item.holder, *entries[item.identifier].holders)
        in_step = [holder for holder in holders if holder[0] in order]
        if in_step:
            first = min(in_step, key=lambda holder: order.index(holder[0]))
            planned.append(replace(item, holder=first))
        else:
            del entries[item.identifier]
            budget += item.cost
    planned.sort(key=lambda item: order.index(item.holder[0]))
    encoder = replace(encoder, entries=FrozenMap(entries), planned=tuple(planned), budget=budget)
    return get_with_evicted(encoder)


def get_with_evicted(encoder: Encoder) -> Encoder:
    """Return the cache with what was evicted last in this step, as far as it fits. Source: P7,
    P22."""
    for identifier, num_embeds in reversed(encoder.evicted):
        if identifier in encoder.entries:
            continue  # encoded again in this step
        if num_embeds > count_free(encoder):
            break
        evicted = [entry for entry in encoder.evicted if entry[0] != identifier]
        entries = encoder.entries.having(identifier, Entry(num_embeds))
        freeable = (identifier, *encoder.freeable)
        encoder = replace(encoder, entries=entries, freeable=freeable, evicted=tuple(evicted))
    return encoder


def list_freed(encoder: Encoder) -> tuple[str, ...]:
    """Return what the plan has the worker drop: evicted items, except those encoded again.

    If nothing is shared, the items of the plan before. Source: vLLM 0.19.1 `get_freed_mm_hashes`;
    upstream #52482; P22.
    """
    there = set(encoder.entries).union([planned.identifier for planned in encoder.planned])
    gone = [name for name, _ in encoder.evicted] if encoder.is_shared else encoder.freed
    return tuple([name for name in dict.fromkeys(gone) if name not in there])


def end_step(encoder: Encoder, budget: int) -> Encoder:
    """Return the encoder after planning, with the budget of the next step. Source: vLLM 0.19.1
    `get_freed_mm_hashes`; P9, P22."""
    made = () if encoder.is_shared else tuple([item.identifier for item in encoder.planned])
    return replace(encoder, freed=made, budget=budget, planned=(), evicted=())
