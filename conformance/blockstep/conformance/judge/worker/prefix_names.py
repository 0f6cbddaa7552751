"""Names: one small int for every prefix, so that equal content is one comparison.

A name stands for a whole chain, from a root that has adapter and salt:

    root(adapter, salt) <- (token 0, extra 0) <- (token 1, extra 1) <- ... <- (token p, extra p)

Two positions have the same name exactly if everything that determines their KV is the same. `extra
p` says which multimodal item starts at position p or continues into p's block there, and how far
into the item p is; and which embedding replaces the token at p. An item is named once per block,
not once per position: its identifier names its whole content, so a shorter item of the same
identifier would be a client's mistake, not an engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from blockstep.spec.vocabulary import BlockKey, Request, TokenId

Name: TypeAlias = int
Extra: TypeAlias = tuple[str | int, ...]
"""Identifier of an item and how far into it the position is; then the number of an embedding."""

NEVER_WRITTEN: Name = -1
"""Content of a slot that no plan ever wrote."""
BEFORE_RESET: Name = -2
"""Content of a slot last written before the last reset of the cache."""

GARBLED: Name = -3
"""Content of a slot of real memory in which no name can be read."""
OF_ANOTHER_GROUP: Name = -4
"""Content of a slot in a block that another KV group wrote, for a reader of this group."""
SPOILED: Name = -5
"""Content of a slot whose load failed or is not done, or that was computed on such a slot."""
MEMO_SIZE_MAX = 200_000


class PrefixNames:
    """Assigns names. Names compare with each other only within one object."""

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self._groups = range(num_groups)
        self._roots: dict[object, Name] = {}
        self._children: dict[tuple[object, ...], Name] = {}
        self._parents: list[Name] = []
        """Parent of each name; `NEVER_WRITTEN` for a root."""
        self._tokens: list[int] = []
        # By identity of the key, since engines show the same key objects again and again.
        # Holding the key keeps its identity from being reused.
        self._memo: dict[int, tuple[BlockKey, list[Name]]] = {}

    def root(self, adapter: str | None, cache_salt: str | None) -> Name:
        """The name of the empty prefix of requests with this adapter and salt."""
        return self._root(("request", adapter, cache_salt))

    def of_item(self, identifier: str, num_embeds: int) -> list[Name]:
        """The names of an item's embeddings, in order."""
        chain: list[Name] = []
        self.extend(chain, self._root(("item", identifier)), range(num_embeds), {}, 0)
        return chain

    def extend(
        self,
        chain: list[Name],
        root: Name,
        tokens: Sequence[int],
        extras: Mapping[int, Extra],
        first: int,
    ) -> None:
        """Append the names of `tokens` at positions `first`, `first` + 1, ...

        `chain` holds the names of all positions below `first`.
        """
        children = self._children
        parent = chain[-1] if chain else root
        for position, token in enumerate(tokens, first):
            link: tuple[object, ...] = (
                (parent, token, extras[position]) if position in extras else (parent, token)
            )
            name = children.get(link)
            if name is None:
                name = self._new(parent, token)
                children[link] = name
            chain.append(name)
            parent = name

    def of_key(self, key: BlockKey) -> list[Name]:
        """The names of the slots of the block that `key` names."""
        known = self._memo.get(id(key))
        if known is not None:
            return known[1]
        missing: list[BlockKey] = []
        link: BlockKey | None = key
        while link is not None and id(link) not in self._memo:
            missing.append(link)
            link = link.parent
        if len(self._memo) > MEMO_SIZE_MAX:
            self._memo.clear()
            return self.of_key(key)
        slots = [] if link is None else self._memo[id(link)][1]
        for link in reversed(missing):
            slots = self._slots(link, slots)
            self._memo[id(link)] = (link, slots)
        return slots

    def of_block(self, key: BlockKey, num_links: int) -> list[Name]:
        """The names of the slots of a block that the last `num_links` keys of a chain name, `key`
        the last."""
        if num_links == 1:
            return self.of_key(key)
        links = key.chain()
        if len(links) % num_links:
            return self._odd(key, num_links)
        return [name for link in links[-num_links:] for name in self.of_key(link)]

    def token_of(self, name: Name) -> int:
        """The last token of a prefix."""
        return self._tokens[name]

    def same_tokens(self, left: Name, right: Name) -> bool:
        """Whether two different names have the same tokens, so that they differ in extra keys."""
        while self._parents[left] >= 0 and self._parents[right] >= 0:
            if self._tokens[left] != self._tokens[right]:
                return False
            left, right = self._parents[left], self._parents[right]
            if left == right:
                return True
        return self._parents[left] < 0 and self._parents[right] < 0

    def show(self, name: Name, count: int = 6) -> str:
        """The last tokens of a prefix as text."""
        if name == NEVER_WRITTEN:
            return "never written"
        if name == BEFORE_RESET:
            return "written before the last reset"
        if name == OF_ANOTHER_GROUP:
            return "KV of another group"
        if name == SPOILED:
            return "not loaded, or computed on that"
        if name == GARBLED:
            return "garbled"
        tokens: list[str] = []
        while self._parents[name] >= 0 and len(tokens) < count:
            tokens.append(str(self._tokens[name]))
            name = self._parents[name]
        dots = "... " if self._parents[name] >= 0 else ""
        return f"[{dots}{' '.join(reversed(tokens))}]"

    def _root(self, what: object) -> Name:
        name = self._roots.get(what)
        if name is None:
            name = self._roots[what] = self._new(NEVER_WRITTEN, 0)
        return name

    def _new(self, parent: Name, token: int) -> Name:
        self._parents.append(parent)
        self._tokens.append(token)
        return len(self._parents) - 1

    def _slots(self, key: BlockKey, parent_slots: list[Name]) -> list[Name]:
        """The names of `key`'s slots, after those of its parent."""
        size = self.block_size
        extras: dict[int, Extra] = {}
        for identifier, offset in key.items:
            slot = max(offset, 0)
            if slot >= size or slot in extras:
                # No request has items like these; the names still differ from all others.
                extras = {0: ("items", repr(key.items), 0)}
                break
            extras[slot] = (identifier, slot - offset)
        _add_embeds(extras, key.embeds)
        parent = key.parent
        is_first = parent is None
        if (
            len(key.token_ids) != size
            or len(key.embeds) > size
            or key.group not in self._groups
            or (parent is not None and parent.group != 0)
            or (parent is not None and key.cache_salt is not None)
            or (parent is not None and parent.adapter != key.adapter)
        ):
            return self._odd(key)
        root = self.root(key.adapter, key.cache_salt) if is_first else parent_slots[-1]
        slots: list[Name] = []
        self.extend(slots, root, key.token_ids, extras, 0)
        return slots

    def _odd(self, key: BlockKey, num_links: int = 1) -> list[Name]:
        """Names for a key that no content can have; they equal nothing else."""
        return [self._root(("odd", key, slot)) for slot in range(self.block_size * num_links)]


def extras_of(request: Request, block_size: int) -> dict[int, Extra]:
    """Items and embeddings that determine the KV besides the token, by position in the prompt.

    An item is at the position where it starts, and at each block boundary inside it.
    """
    extras: dict[int, Extra] = {}
    for item in request.items:
        end = item.offset + item.length
        extras[item.offset] = (item.identifier, 0)
        next_block = (item.offset // block_size + 1) * block_size
        for position in range(next_block, end, block_size):
            extras[position] = (item.identifier, position - item.offset)
    _add_embeds(extras, request.prompt_embeds)
    return extras


def _add_embeds(extras: dict[int, Extra], embeds: Sequence[int]) -> None:
    for position, number in enumerate(embeds):
        extras[position] = (*extras.get(position, ()), number)


class NamedText:
    """A request, its known tokens, and the names of its positions."""

    __slots__ = ("chain", "extras", "names", "num_prompt", "request", "root", "tokens")

    def __init__(self, request: Request, names: PrefixNames) -> None:
        self.request = request
        self.names = names
        self.root = names.root(request.adapter, request.cache_salt)
        self.extras = extras_of(request, names.block_size)
        self.tokens: list[TokenId] = list(request.prompt_token_ids)
        """Prompt and outputs."""
        self.num_prompt = len(self.tokens)
        self.chain: list[Name] = []
        """The name of each position, as far as one was needed."""
