"""Keys: contents of blocks as structural keys, and the KV events that name them."""

from __future__ import annotations

from blockstep.impl.host import state as c
from blockstep.impl.host.requests import Requests
from blockstep.spec.vocabulary import AllBlocksCleared, BlockKey, BlockRemoved, BlockStored, KVEvent


class Keys:
    """Structural keys of nodes. They are built once and kept, as they are compared often."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self._keys: dict[int, tuple[int, BlockKey]] = {}
        """By node: its serial number, and its key."""

    def key_in(self, node: int, group: int) -> BlockKey:
        """Return the structural key of a node in a group; the same object each time."""
        key = self._key(node)
        return key.in_group(group) if group else key

    def _key(self, node: int) -> BlockKey:
        """Return the structural key of a node; the same object each time."""
        s, missing = self.requests.state, []
        parent: BlockKey | None = None
        while node != c.NONE:
            serial, parent = self._keys.get(node, (c.NONE, None))
            if serial == s.nodes[node, c.SERIAL]:
                break
            parent = None
            missing.append(node)
            node = int(s.nodes[node, c.PARENT])
        for node in reversed(missing):
            extras = self.requests.extras.values[s.nodes[node, c.NODE_EXTRAS]]
            adapter, salt, items, embeds = extras
            tokens = tuple(s.node_tokens[node].tolist())
            parent = BlockKey(parent, tokens, adapter, salt, items, embeds=embeds)
            self._keys[node] = (int(s.nodes[node, c.SERIAL]), parent)
        assert parent is not None, "a node has a key"
        return parent

    def list_events(self) -> tuple[KVEvent, ...]:
        """Return the logged KV events; blocks published behind one another are one event (P20)."""
        s, found = self.requests.state, list[KVEvent]()
        log = s.log[: s.scalars[c.NUM_LOGGED]].tolist()
        at = 0
        while at < len(log):
            kind, node, group = log[at]
            end = at + 1
            if kind == c.CLEARED:
                found.append(AllBlocksCleared())
            elif kind == c.REMOVED:
                found.append(BlockRemoved((self.key_in(node, group),)))
            else:
                while end < len(log) and log[end][0] == c.STORED_NEXT:
                    end += 1
                found.append(self._stored([entry[1] for entry in log[at:end]], group))
            at = end
        return tuple(found)

    def _stored(self, nodes: list[int], group: int) -> BlockStored:
        s, links = self.requests.state, int(self.requests.state.groups[group, c.LINKS])
        tokens: list[int] = []
        parent = c.NONE
        for node in reversed(nodes):
            parent = node
            for _ in range(links):
                tokens[:0] = s.node_tokens[parent].tolist()
                parent = int(s.nodes[parent, c.PARENT])
        return BlockStored(
            tuple([self.key_in(node, group) for node in nodes]),
            None if parent == c.NONE else self.key_in(parent, group),
            tuple(tokens),
            int(s.groups[group, c.SIZE]),
            self.requests.extras.values[s.nodes[nodes[0], c.NODE_EXTRAS]][0],
        )
