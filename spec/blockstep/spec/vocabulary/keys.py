"""BlockKey: the structural key of a full block's content."""

from __future__ import annotations

from typing import TypeAlias, final

from blockstep.spec.copies import set_class
from blockstep.spec.vocabulary.request import TokenIds

Link: TypeAlias = tuple[
    TokenIds, str | None, str | None, tuple[tuple[str, int], ...], int, TokenIds
]
"""The fields of a key after `parent`, in their order."""


@final
class BlockKey:
    """The identity of a full block: every token up to its end, and everything else that affects its
    KV.

    Structural and injective (P6): two keys are equal only if the whole chain of tokens and extra
    keys is equal, so no hash can collide here. Engines may use hashes; a snapshot translates them
    back into keys. Each kind of extra key has a field of its own, so an adapter and a salt of the
    same name are different.

    `hash()` is computed once. `==` walks up the two chains without recursion until they are the
    same object, and makes equal keys share one chain from then on.
    """

    __slots__ = (
        "_hash",
        "_link",
        "adapter",
        "cache_salt",
        "embeds",
        "group",
        "items",
        "parent",
        "token_ids",
    )

    parent: BlockKey | None
    """The key of the block before it; None for the first block."""
    token_ids: TokenIds
    """The last `Config.block_size` tokens of this block; in a group of larger blocks its first
    tokens are the parents'."""
    adapter: str | None
    cache_salt: str | None
    """Only in the first block's key; the chain includes it in later ones."""
    items: tuple[tuple[str, int], ...]
    """Identifier of each overlapping item, and its offset relative to the block's first slot."""
    group: int
    """KV group of the block. Parents have group 0: all groups share one chain."""
    embeds: TokenIds
    """The embedding's number for each prompt position in the block for which the client sent one.
    """

    def __init__(
        self,
        parent: BlockKey | None,
        token_ids: TokenIds,
        adapter: str | None = None,
        cache_salt: str | None = None,
        items: tuple[tuple[str, int], ...] = (),
        group: int = 0,
        embeds: TokenIds = (),
    ) -> None:
        set_class(self, _OpenKey)
        self.parent = parent
        self.token_ids = token_ids
        self.adapter = adapter
        self.cache_salt = cache_salt
        self.items = items
        self.group = group
        self.embeds = embeds
        self._link = link = (token_ids, adapter, cache_salt, items, group, embeds)
        self._hash = hash((0 if parent is None else parent._hash, *link))
        set_class(self, BlockKey)

    _hash: int
    _link: Link
    """The fields after `parent` once more, for fast comparison."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"BlockKey is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"BlockKey is immutable: cannot delete {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        # Rebuilt from the outside in, so that a long chain cannot exhaust the stack.
        return (chain_from_links, (tuple(key._link for key in self.chain()),))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockKey):
            return NotImplemented
        mine: BlockKey | None = self
        theirs: BlockKey | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine._hash != theirs._hash:
                return False
            if mine._link != theirs._link:
                return False
            mine, theirs = mine.parent, theirs.parent
        if self.parent is not other.parent or self._link is not other._link:
            self._share(other)
        return True

    def _share(self, other: BlockKey) -> None:
        """Replace parents and tokens by those of `other`, to which this key is equal.

        No value changes, so the only effect is speed: the next comparison of the two chains ends at
        its first step. Snapshots compare thousands of equal keys at a time.
        """
        put = object.__setattr__
        mine: BlockKey | None = self
        theirs: BlockKey | None = other
        while mine is not theirs and mine is not None and theirs is not None:
            parent = mine.parent
            put(mine, "parent", theirs.parent)
            put(mine, "token_ids", theirs.token_ids)
            put(mine, "_link", theirs._link)
            mine, theirs = parent, theirs.parent

    def __repr__(self) -> str:
        names = ("adapter", "cache_salt", "items", "group", "embeds")
        values = [(name, getattr(self, name)) for name in names]
        extras = "".join(f", {name}={value!r}" for name, value in values if value)
        return f"BlockKey(index={self.index}, token_ids={self.token_ids!r}{extras})"

    @property
    def index(self) -> int:
        """Position of its last `Config.block_size` tokens, in units of that size, from 0: in a
        group of such blocks, the position of the block in its table."""
        return len(self.chain()) - 1

    def in_group(self, group: int) -> BlockKey:
        """Return the key of the same tokens in this KV group."""
        if group == self.group:
            return self
        names = (self.token_ids, self.adapter, self.cache_salt, self.items)
        return BlockKey(self.parent, *names, group, self.embeds)

    def chain(self) -> list[BlockKey]:
        """Return the keys from the first block to this one."""
        keys: list[BlockKey] = []
        key: BlockKey | None = self
        while key is not None:
            keys.append(key)
            key = key.parent
        keys.reverse()
        return keys


class _OpenKey:
    """The class of a key while its fields are set: by `object.__setattr__` they take twice as
    long."""

    __slots__ = BlockKey.__slots__


def chain_from_links(links: tuple[Link, ...]) -> BlockKey:
    """Return the last key of the chain whose keys add `links`, first block first.

    At least one link.
    """
    key: BlockKey | None = None
    for link in links:
        key = BlockKey(key, *link)
    assert key is not None, "a chain has at least one link"
    return key
