"""Encoder: what it makes of the items in prompts is kept while somebody needs it, and then as long
as there is room.

    size        | held: a a b        | held by nobody: x y | free |
                                       ^ evicted first
"""

from __future__ import annotations

from collections.abc import Iterable
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
"""An item in a request, by its index."""


@dataclass(slots=True)
class Entry:
    """What the encoder made of an item, or makes in a frame in flight."""

    identifier: str
    num_embeds: int
    holders: set[Place] = field(default_factory=set)
    """Places that still need it (P22): the same item may stand in a prompt twice."""


@dataclass(slots=True)
class Encoding:
    """What a row needs of the encoder. Nothing is done for it yet."""

    num_tokens: int
    """Tokens of the row, which ends before an item that there is no room for."""
    inputs: list[int] = field(default_factory=list)
    """Items to be encoded."""
    external: list[int] = field(default_factory=list)
    """Items to be loaded."""
    found: list[int] = field(default_factory=list)
    """Items that are in the cache, or that an earlier one of these brings there."""
    evicted: list[str] = field(default_factory=list)
    """What has to go for them, in this order."""
    num_embeds: int = 0
    """To be encoded."""


class EncoderCache:
    """A cache of `encoder_cache_size` embeddings, by identifiers of items (P9, P22)."""

    def __init__(self, config: Config) -> None:
        self.size = config.encoder_cache_size
        self.lookahead = config.num_encoder_lookahead_tokens
        self.is_whole = config.disable_chunked_mm_input
        """Whether a row never ends inside of an item."""
        self.is_beside = config.is_encoder_decoder
        """Whether items stand beside the prompt."""
        self.entries: dict[str, Entry] = {}
        self.freeable: dict[str, None] = {}
        """Identifiers that nobody holds, next to be evicted first."""
        self.num_free = self.size
        self.freed: list[str] = []
        """Evicted, and not announced yet; some may have been brought in anew."""
        self.sizes_freed: dict[str, int] = {}
        """Embeddings of what was evicted last by a name."""
        self.offered: frozenset[str] = frozenset()
        """What a connector holds."""

    @property
    def num_freeable(self) -> int:
        """Free embeddings, and those that nobody holds."""
        return self.num_free + sum(self.entries[name].num_embeds for name in self.freeable)

    # Choice: changes nothing.

    def choose(self, request: Request, num_computed: int, num_tokens: int, budget: int) -> Encoding:
        """What a row of so many tokens needs, and how many of them it can have.

        Args:
            request: of the row.
            num_computed: tokens before the row.
            num_tokens: of the row, as far as all else goes.
            budget: embeddings that may still be encoded in this step.
        """
        while True:
            num_tokens = self._count_unsplit(request, num_computed, num_tokens)
            chosen = self._fit(request, num_computed, num_tokens, budget)
            if not self.is_whole or self.is_beside or chosen.num_tokens == num_tokens:
                return chosen
            num_tokens = chosen.num_tokens

    def _count_unsplit(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """The most tokens up to `num_tokens` with which a row splits no item that must be whole."""
        if not self.is_whole or self.is_beside or not self.size:
            return num_tokens
        for item in reversed(request.items):
            num_before = item.offset - num_computed
            if num_before < num_tokens:
                splits = num_tokens < num_before + item.length
                return max(num_before, 0) if splits else num_tokens
        return num_tokens

    def _fit(self, request: Request, num_computed: int, num_tokens: int, budget: int) -> Encoding:
        """What a row of `num_tokens` tokens needs, or a shorter one before what does not fit."""
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
        """Whether the KV of all its tokens is there."""
        if self.is_beside:
            return num_computed > 0
        return item.offset + item.length <= num_computed

    def _is_there(self, name: str, chosen: Encoding, request: Request) -> bool:
        """Whether an item need not be brought in: it is kept, or an earlier one is the same."""
        if self.is_beside:
            return False
        if any(request.items[i].identifier == name for i in chosen.inputs + chosen.external):
            return True
        return name in self.entries and name not in chosen.evicted

    def _is_read(self, item: MultiModalItem, num_computed: int, num_tokens: int) -> bool:
        """Whether the row, or the head behind it, reads one of its embeddings."""
        if self.is_beside or not item.is_embed:
            return True
        begin = max(num_computed - item.offset, 0)
        return any(item.is_embed[begin : num_computed + num_tokens + self.lookahead - item.offset])

    def _make_place(
        self, item: MultiModalItem, budget: int, chosen: Encoding, request: Request
    ) -> bool:
        """Whether it can be brought in, beside what is chosen; who has to go for it."""
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
        """The row has its blocks: what it needs is there, or will be when it runs.

        Since it was chosen the row of another may have been taken back: what was found is gone, or
        what was evicted for that one is there again. So each item is looked for once more.
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
        """Give it room; who became freeable first goes first for it."""
        while self.num_free < item.num_embeds:
            self._evict(next(iter(self.freeable)))
        self.entries[name] = Entry(item.identifier, item.num_embeds)
        self.num_free -= item.num_embeds

    def name_of(self, request: Request, index: int) -> str:
        """What an item is kept by: what is in it, or beside the prompt each place by itself."""
        name = request.items[index].identifier
        return f"{name} {index} {request.request_id}" if self.is_beside else name

    def _is_offered(self, item: MultiModalItem) -> bool:
        """Whether it is loaded; into an encoder-decoder model nothing is."""
        return item.identifier in self.offered and not self.is_beside

    def is_held(self, name: str) -> bool:
        """Whether somebody needs it."""
        return bool(self.entries[name].holders)

    def release(self, request: Request, num_computed: int) -> None:
        """It needs none of the items any more that are behind it."""
        for index, item in enumerate(request.items):
            if self._is_behind(item, num_computed):
                self._let_go(request, index)

    def drop(self, request: Request) -> None:
        """It needs none of its items any more: it was preempted, or has ended."""
        for index in range(len(request.items)):
            self._let_go(request, index)

    def reset(self) -> None:
        """Forget everything, what is in use included."""
        self.entries.clear()
        self.freeable.clear()
        self.freed.clear()
        self.sizes_freed.clear()
        self.num_free = self.size

    def announce(self) -> tuple[str, ...]:
        """What the worker has to drop, once."""
        there = {entry.identifier for entry in self.entries.values()}
        freed = tuple([name for name in dict.fromkeys(self.freed) if name not in there])
        self.freed.clear()
        self.sizes_freed.clear()
        return freed

    def withdraw(self, name: str) -> None:
        """It is not brought in after all."""
        self.num_free += self.entries.pop(name).num_embeds
        self.freeable.pop(name, None)

    def bring_back(self) -> None:
        """What was evicted last in this step, as far as there is room for it again (P7, P22)."""
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
                if self.is_beside:  # its KV is kept across, so nobody looks for it again
                    self._evict(name)

    def _evict(self, name: str) -> None:
        del self.freeable[name]
        entry = self.entries.pop(name)
        self.num_free += entry.num_embeds
        self.freed.append(entry.identifier)
        self.sizes_freed[entry.identifier] = entry.num_embeds

    def snapshot(self) -> EncoderSnapshot:
        """The canonical state."""
        entries = [
            EncoderEntry(name, entry.num_embeds, tuple(sorted(who for who, _ in entry.holders)))
            for name, entry in sorted(self.entries.items())
        ]
        return EncoderSnapshot(
            tuple(entries),
            tuple(self.freeable),
            self.num_free,
            self.num_freeable,
            tuple(self.freed),
        )
