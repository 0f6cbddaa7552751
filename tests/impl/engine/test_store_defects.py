"""Defects of released stores, planted in ours: a check of the rules for stores finds each one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from blockstep.impl.engine.store import BlockKV, BlockName, HostStore

NUM_KEPT = 6
BLOCK_BYTES = 8


def make_block(tag: int) -> BlockKV:
    return (torch.tensor([tag], dtype=torch.int64),)


def name_text(tokens: Sequence[int]) -> list[BlockName]:
    """Return the block keys of `text`, one token a block: each key includes those before it."""
    return [bytes(tokens[: end + 1]) for end in range(len(tokens))]


def check_rules(store: HostStore, seed: int, num_calls: int = 200) -> None:
    """Save and load texts that share prefixes, with space for six blocks."""
    draw, tags = random.Random(seed), dict[BlockName, int]()
    for call in range(num_calls):
        names = name_text([draw.randrange(2) for _ in range(draw.randint(1, 9))])
        held = store.count(names)
        assert held is not None
        if draw.random() < 0.5:
            blocks = store.load(names)
            assert len(blocks) == held, "what was counted is there"
            assert [int(block[0]) for block in blocks] == [tags[name] for name in names[:held]]
        else:
            tags.update((name, call) for name in names[held:])
            store.save(names, held, [make_block(call) for _ in names[held:]])
            kept = store.count(names)
            assert kept == min(len(names), NUM_KEPT), (
                "what was asked for is kept, from the first on"
            )
        assert store.num_bytes == len(store) * BLOCK_BYTES <= store.max_bytes


@pytest.mark.parametrize("seed", range(5))
def test_our_store_follows_the_rules(seed: int) -> None:
    check_rules(HostStore(NUM_KEPT * BLOCK_BYTES), seed)


class EvictsWhatItKeeps(HostStore):
    """Evicts the first blocks of a call to make space for its last (upstream #35846)."""

    def _make_room(self, num_bytes: int, kept: set[BlockName]) -> bool:
        del kept
        return super()._make_room(num_bytes, set())


class KeepsOnlyWhatIsNew(HostStore):
    """A wrong fix: evicts stored blocks of the call, so that later ones are useless."""

    def _make_room(self, num_bytes: int, kept: set[BlockName]) -> bool:
        return super()._make_room(num_bytes, kept - self._before)

    def save(self, names: Sequence[BlockName], first: int, blocks: Sequence[BlockKV]) -> None:
        self._before = set(names[:first])
        super().save(names, first, blocks)


class NewestGoesFirst(HostStore):
    """Another wrong fix: evicts the newest block, which is of the same call."""

    def _make_room(self, num_bytes: int, kept: set[BlockName]) -> bool:
        for name in reversed(self._blocks):
            self._blocks.move_to_end(name, last=False)
            break
        return super()._make_room(num_bytes, kept)


class SkipsAhead(HostStore):
    """Skips as many blocks as were asked for, even if some were never stored (#36052)."""

    def save(self, names: Sequence[BlockName], first: int, blocks: Sequence[BlockKV]) -> None:
        seen: int = self.__dict__.setdefault("seen", {}).get(names[0], first)
        self.__dict__["seen"][names[0]] = max(seen, len(names))
        skipped = max(seen - first, 0)
        super().save(names, first + skipped, blocks[skipped:])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "planted", [EvictsWhatItKeeps, KeepsOnlyWhatIsNew, NewestGoesFirst, SkipsAhead]
)
def test_each_defect_is_found(planted: type[HostStore], seed: int) -> None:
    with pytest.raises(AssertionError, match="is kept, from the first on"):
        check_rules(planted(NUM_KEPT * BLOCK_BYTES), seed)
