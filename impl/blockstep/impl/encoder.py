"""Encoder: the cache of encoder outputs.

An entry is held while a request needs it, and kept after that until its space is needed.

    size        | held: a a b        | freeable: x y | free |
                                       ^ evicted first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from blockstep.spec.vocabulary import (
    Config,
    EncoderEntry,
    EncoderSnapshot,
    MultiModalItem,
    Request,
    RequestId,
)

Place: TypeAlias = tuple[RequestId, int]
"""One item of one request: the request's id and the item's index."""


@dataclass(slots=True)
class Entry:
    """The encoder output of an item, in the cache or made by a frame in flight."""

    identifier: str
    num_embeds: int
    holders: set[Place] = field(default_factory=set)
    """The request items that still need it (P22): one prompt may have the same item twice."""


@dataclass(slots=True)
class Encoding:
    """The encoder outputs that a row needs. Choosing them changes nothing."""

    num_tokens: int
    """Tokens of the row; it ends before the first item that does not fit."""
    inputs: list[int] = field(default_factory=list)
    """The items to be encoded."""
    external: list[int] = field(default_factory=list)
    """The items to be loaded."""
    found: list[int] = field(default_factory=list)
    """The items that are in the cache, or that are the same as an earlier item of this row."""
    evicted: list[str] = field(default_factory=list)
    """The entries to be evicted for them, in this order."""
    num_embeds: int = 0
    """The number of embeddings to be encoded."""


class EncoderCache:
    """A cache of `encoder_cache_size` embeddings, by the identifiers of items (P9, P22)."""

    def __init__(self, config: Config) -> None:
        self.size = config.encoder_cache_size
        self.lookahead = config.num_encoder_lookahead_tokens
        self.is_whole = config.disable_chunked_mm_input
        """Whether a row must not end inside of an item."""
        self.is_beside = config.is_encoder_decoder
        """Whether the model is an encoder-decoder: its items are not part of the prompt."""
        self.entries: dict[str, Entry] = {}
        self.freeable: dict[str, None] = {}
        """The identifiers of entries that no request holds; the first is evicted first."""
        self.num_free = self.size
        self.freed: list[str] = []
        """Entries evicted and not yet reported to the worker; some may be in the cache again."""
        self.sizes_freed: dict[str, int] = {}
        """For each identifier, the size of the entry evicted last."""
        self.offered: frozenset[str] = frozenset()
        """The identifiers that a connector can load."""

    @property
    def num_freeable(self) -> int:
        """Return the free embeddings and those of entries that no request holds."""
        return self.num_free + sum(self.entries[name].num_embeds for name in self.freeable)

    # Choice: changes nothing.

    def choose(self, request: Request, num_computed: int, num_tokens: int, budget: int) -> Encoding:
        """Return the encoder outputs that a row needs, and the tokens that the row can have.

        Args:
            request: the request of the row.
            num_computed: its computed tokens before the row.
            num_tokens: the most tokens of the row.
            budget: the embeddings that may still be encoded in this step.
        """
        while True:
            num_tokens = self._count_unsplit(request, num_computed, num_tokens)
            chosen = self._fit(request, num_computed, num_tokens, budget)
            if not self.is_whole or self.is_beside or chosen.num_tokens == num_tokens:
                return chosen
            num_tokens = chosen.num_tokens

    def _count_unsplit(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """Return the most tokens, up to `num_tokens`, that end inside of no item that must be
        whole."""
        if not self.is_whole or self.is_beside or not self.size:
            return num_tokens
        for item in reversed(request.items):
            num_before = item.offset - num_computed
            if num_before < num_tokens:
                splits = num_tokens < num_before + item.length
                return max(num_before, 0) if splits else num_tokens
        return num_tokens

    def _fit(self, request: Request, num_computed: int, num_tokens: int, budget: int) -> Encoding:
        """Return what a row of `num_tokens` tokens needs, or one that ends before an item that does
        not fit."""
        chosen = Encoding(num_tokens)
        if num_tokens <= 0:
            return chosen
        begin = num_computed + self.lookahead
        for index, item in enumerate(request.items):
            if item.offset >= begin + chosen.num_tokens:
                break
            if self._is_behind(item, num_computed):
                continue
            if not self._is_read(item, num_computed, num_tokens):
                continue
            if self._is_there(item.identifier, chosen, request):
                chosen.found.append(index)
                continue
            if not self._make_place(item, budget, chosen, request):
                chosen.num_tokens = max(item.offset - begin, 0)
                break
            if self._is_offered(item):
                chosen.external.append(index)
            else:
                chosen.inputs.append(index)
                chosen.num_embeds += item.num_embeds
        return chosen

    def _is_behind(self, item: MultiModalItem, num_computed: int) -> bool:
        """Return whether the KV of all its tokens is computed."""
        if self.is_beside:
            return num_computed > 0
        return item.offset + item.length <= num_computed

    def _is_there(self, name: str, chosen: Encoding, request: Request) -> bool:
        """Return whether an item is in the cache, or is the same as an earlier item of the row."""
        if self.is_beside:
            return False
        if any(request.items[i].identifier == name for i in chosen.inputs + chosen.external):
            return True
        return name in self.entries and name not in chosen.evicted

    def _is_read(self, item: MultiModalItem, num_computed: int, num_tokens: int) -> bool:
        """Return whether the row, or the draft head after it, reads one of the item's
        embeddings."""
        if self.is_beside or not item.is_embed:
            return True
        begin = max(num_computed - item.offset, 0)
        return any(item.is_embed[begin : num_computed + num_tokens + self.lookahead - item.offset])

    def _make_place(
        self, item: MultiModalItem, budget: int, chosen: Encoding, request: Request
    ) -> bool:
        """Return whether there is room for the item after the chosen ones; add the entries to
        evict."""
        if not self._is_offered(item) and item.num_embeds > budget - chosen.num_embeds:
            return False
        items = request.items
        brought = sum(items[i].num_embeds for i in chosen.inputs + chosen.external)
        room = self.num_free + self._count(chosen.evicted) - brought
        kept = {items[i].identifier for i in chosen.found}
        evicted: list[str] = []
        for name in self.freeable:
            if room >= item.num_embeds:
                break
            if name not in kept and name not in chosen.evicted:
                evicted.append(name)
                room += self.entries[name].num_embeds
        if room < item.num_embeds:
            return False
        chosen.evicted += evicted
        return True

    def _count(self, names: Iterable[str]) -> int:
        return sum(self.entries[name].num_embeds for name in names)

    # What is done once the row is certain.

    def hold(self, request: Request, chosen: Encoding) -> None:
        """Hold what a row needs, once the row has its blocks.

        The choice may be outdated, as another row may have been removed since: a found entry may be
        gone, and an evicted entry may be back. So each item is looked up again.
        """
        needed = sorted(chosen.inputs + chosen.external + chosen.found)
        chosen.inputs, chosen.external, chosen.found, chosen.num_embeds = [], [], [], 0
        for index in needed:
            item, name = request.items[index], self.name_of(request, index)
            if name in self.entries:
                chosen.found.append(index)
            else:
                self._bring_in(name, item)
                if self._is_offered(item):
                    chosen.external.append(index)
                else:
                    chosen.inputs.append(index)
                    chosen.num_embeds += item.num_embeds
            self.freeable.pop(name, None)
            self.entries[name].holders.add((request.request_id, index))

    def _bring_in(self, name: str, item: MultiModalItem) -> None:
        """Add an entry; if there is no room, evict the entries that became freeable first."""
        while self.num_free < item.num_embeds:
            self._evict(next(iter(self.freeable)))
        self.entries[name] = Entry(item.identifier, item.num_embeds)
        self.num_free -= item.num_embeds

    def name_of(self, request: Request, index: int) -> str:
        """Return the key of an entry: the item's identifier; in an encoder-decoder one key per item
        and request."""
        name = request.items[index].identifier
        return f"{name} {index} {request.request_id}" if self.is_beside else name

    def _is_offered(self, item: MultiModalItem) -> bool:
        """Return whether the item can be loaded; never in an encoder-decoder model."""
        return item.identifier in self.offered and not self.is_beside

    def is_held(self, name: str) -> bool:
        """Return whether a request holds the entry."""
        return bool(self.entries[name].holders)

    def release(self, request: Request, num_computed: int) -> None:
        """Release the items of a request whose tokens are computed."""
        for index, item in enumerate(request.items):
            if self._is_behind(item, num_computed):
                self._let_go(request, index)

    def drop(self, request: Request) -> None:
        """Release all items of a request that was preempted or has finished."""
        for index in range(len(request.items)):
            self._let_go(request, index)

    def reset(self) -> None:
        """Remove all entries, even those in use."""
        self.entries.clear()
        self.freeable.clear()
        self.freed.clear()
        self.sizes_freed.clear()
        self.num_free = self.size

    def announce(self) -> tuple[str, ...]:
        """Return the identifiers that the worker has to drop, each once."""
        there = {entry.identifier for entry in self.entries.values()}
        freed = tuple([name for name in dict.fromkeys(self.freed) if name not in there])
        self.freed.clear()
        self.sizes_freed.clear()
        return freed

    def undo(self, slot: int, encodings: dict[int, Encoding], requests: Sequence[Request]) -> int:
        """Undo the encoding of a row that was removed from the step (P4, P22).

        An item that another row of the step also reads is encoded for that row. Entries that were
        evicted for the removed row are restored.

        Args:
            slot: of the removed row's request.
            encodings: of the rows of the step, by slot, in the order of scheduling.
            requests: by slot.

        Returns:
            The embeddings that the encoder need not compute any more.
        """
        request = requests[slot]
        self.drop(request)
        undone = encodings.pop(slot, None)
        if undone is None:
            return 0
        num_embeds = undone.num_embeds
        for index in undone.inputs + undone.external:
            name = self.name_of(request, index)
            if self.is_held(name):
                num_embeds -= _encode_for_another(name, index in undone.inputs, encodings, requests)
            else:
                self._withdraw(name)
        self._bring_back()
        return num_embeds

    def _withdraw(self, name: str) -> None:
        """Remove an entry whose row was removed from the step."""
        self.num_free += self.entries.pop(name).num_embeds
        self.freeable.pop(name, None)

    def _bring_back(self) -> None:
        """Restore the entries evicted last in this step while there is room again (P7, P22)."""
        for name in reversed(() if self.is_beside else tuple(self.freed)):
            if name in self.entries:
                continue
            if self.sizes_freed[name] > self.num_free:
                return
            self.freed.remove(name)
            self.num_free -= self.sizes_freed[name]
            self.entries[name] = Entry(name, self.sizes_freed[name])
            self.freeable = {name: None, **self.freeable}

    def _let_go(self, request: Request, index: int) -> None:
        name = self.name_of(request, index)
        entry, place = self.entries.get(name), (request.request_id, index)
        if entry is not None and place in entry.holders:
            entry.holders.remove(place)
            if not entry.holders:
                self.freeable[name] = None
                if self.is_beside:  # its KV is in cross-attention blocks: no request looks it up
                    self._evict(name)

    def _evict(self, name: str) -> None:
        del self.freeable[name]
        entry = self.entries.pop(name)
        self.num_free += entry.num_embeds
        self.freed.append(entry.identifier)
        self.sizes_freed[entry.identifier] = entry.num_embeds

    def snapshot(self) -> EncoderSnapshot:
        """Return the canonical state of the cache."""
        entries = [
            EncoderEntry(name, entry.num_embeds, tuple(sorted(one for one, _ in entry.holders)))
            for name, entry in sorted(self.entries.items())
        ]
        return EncoderSnapshot(
            tuple(entries),
            tuple(self.freeable),
            self.num_free,
            self.num_freeable,
            tuple(self.freed),
        )


def _encode_for_another(
    name: str, is_input: bool, encodings: dict[int, Encoding], requests: Sequence[Request]
) -> int:
    """Let the first row that found an item encode or load it; return the embeddings to encode."""
    for slot, chosen in encodings.items():
        items = requests[slot].items
        index = next((i for i in chosen.found if items[i].identifier == name), None)
        if index is None:
            continue
        chosen.found.remove(index)
        if is_input:
            chosen.inputs = sorted([*chosen.inputs, index])
            chosen.num_embeds += items[index].num_embeds
            return items[index].num_embeds
        chosen.external = sorted([*chosen.external, index])
        return 0
    return 0
