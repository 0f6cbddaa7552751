"""Index: holds a router's index of cached blocks to the stream of events that it was given.

An index is a Python object with `apply(events)` and `lookup(block_hashes)`, or a process that
answers lines of JSON (`cmd:./my-index`):

    -> {"type":"Events","events":[{"type":"BlockStored",...}]}
    <- {"type":"Ok"}
    -> {"type":"Lookup","block_hashes":[17,18]}
    <- {"type":"Found","num_blocks":1}

`lookup` returns how many leading blocks of a chain are cached. A block is cached until each copy
was removed: an engine stores the same content twice if two requests compute it at once. After a
restart of the engine the index is given an `AllBlocksCleared` before the first events.
"""

from __future__ import annotations

import importlib
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.link import Link
from blockstep.conformance.protocol.registry import COMMAND
from blockstep.conformance.protocol.trace_lines import shown
from blockstep.conformance.recorded.stream import (
    CLEARED,
    Batch,
    BlockHash,
    Follower,
    KVRecord,
    Name,
)


class Index(Protocol):
    """A router's index of the blocks of one engine."""

    def apply(self, events: Sequence[dict[str, Any]]) -> object:
        """Take the events of a batch, each a dict with the fields of vLLM and its `type`."""

    def lookup(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a chain are cached."""


class ProcessIndex:
    """An index in a process of its own."""

    def __init__(self, command: str) -> None:
        try:
            self._link = Link(shlex.split(command))
        except (OSError, ValueError, IndexError) as error:
            raise UsageError(f"--index cmd:{command}: cannot be started ({error})") from None

    def apply(self, events: Sequence[dict[str, Any]]) -> None:
        """Hand over events. Raises EngineFault for any answer but Ok."""
        answer = self._link.ask_row({"type": "Events", "events": events}, dict[str, Any])
        if answer.get("type") != "Ok":
            raise EngineFault(f"the index answered events with {shown(answer)}")

    def lookup(self, block_hashes: Sequence[BlockHash]) -> int:
        """Ask for a chain. Raises EngineFault for any answer but Found."""
        row = {"type": "Lookup", "block_hashes": block_hashes}
        answer = self._link.ask_row(row, dict[str, Any])
        found = answer.get("num_blocks")
        if not isinstance(found, int) or isinstance(found, bool):
            raise EngineFault(f"the index answered a lookup with {shown(answer)}")
        return found

    def close(self) -> None:
        """End the process."""
        self._link.end()


def load_index(name: str) -> Index:
    """Return the index of `module:attribute` (a class or a function) or `cmd:COMMAND`.

    Raises:
        UsageError: it cannot be loaded or started.
    """
    if name.startswith(COMMAND):
        return ProcessIndex(name.removeprefix(COMMAND))
    module, _, attribute = name.partition(":")
    try:
        index: Index = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise UsageError(
            f"--index {name}: {type(error).__name__}: {error}; name module:attribute or cmd:COMMAND"
        ) from None
    lacks = [method for method in ("apply", "lookup") if not callable(getattr(index, method, None))]
    if lacks:
        raise UsageError(f"--index {name}: has no {lacks[0]}()")
    return index


@dataclass(frozen=True, slots=True)
class Lie:
    """An answer of an index that the stream contradicts."""

    seq: int | None
    block_hashes: tuple[BlockHash, ...]
    expected: int
    seen: object
    why: str


class IndexJudge:
    """Gives an index each batch and asks it for chains that the batch has changed."""

    def __init__(self, index: Index, follower: Follower, num_lookups: int, seed: int) -> None:
        self._index = index
        self._follower = follower
        self._num_lookups = num_lookups
        self._random = random.Random(seed)  # noqa: S311 - which chains are asked for
        self._known: list[Name] = []
        self.num_lookups = 0

    def take(self, batch: Batch) -> Lie | None:
        """Return the first answer that is wrong after a batch, or None."""
        changed = [(event.group, one) for event in batch.events for one in event.block_hashes]
        chains = {name: self._follower.get_chain(name) for name in changed}  # as they were
        num_restarts = len(self._follower.restarts)
        self._follower.take(batch)
        has_restarted = len(self._follower.restarts) > num_restarts
        events = (*[KVRecord(CLEARED)] * has_restarted, *batch.events)
        try:
            self._index.apply([event.to_plain() for event in events])
        except Exception as error:
            return Lie(batch.seq, (), 0, None, f"apply() raised {type(error).__name__}: {error}")
        self._known += [name for name in changed if name in self._follower.parents]
        count = min(self._num_lookups, len(self._known))
        names = [*dict.fromkeys([*changed[-count:], *self._random.sample(self._known, count)])]
        for name in names[: 2 * self._num_lookups]:
            chain = max(chains.get(name, []), self._follower.get_chain(name), key=len)
            lie = self._ask(batch, name[0], chain)
            if lie is not None:
                return lie
        return None

    def _ask(self, batch: Batch, group: int, chain: Sequence[BlockHash]) -> Lie | None:
        self.num_lookups += 1
        expected = self._follower.count_found(chain, group)
        try:
            seen: object = self._index.lookup(chain)
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
        if seen == expected:
            return None
        return Lie(batch.seq, tuple(chain), expected, seen, f"lookup of {len(chain)} blocks")
