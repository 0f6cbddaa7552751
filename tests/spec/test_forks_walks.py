"""Random walks with forks: what is read is what was written for that text, and all is given back.

The worker of the walk knows no rule of forks: it copies what it is told to copy, and looks at every
slot that it reads.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from forks_support import Walk

from blockstep.spec.lives import branches
from blockstep.spec.memory import forks, slots
from blockstep.spec.memory.groups import compute_num_skipped_blocks
from blockstep.spec.pool import Pool
from blockstep.spec.requests import Holding
from blockstep.spec.vocabulary import NULL_BLOCK, KVGroup, TokenIds

SITUATIONS = (
    *("forked", "shared within a block", "branch row", "branch with outputs", "copied"),
    *("remapped", "preempted", "bad_fork", "fork_in_flight"),
)


@pytest.mark.parametrize("part", range(4))
def test_every_token_reads_its_own_text_and_everything_ends(part: int) -> None:
    seen = Counter[str]()
    for seed in range(part * 60, part * 60 + 60):
        walk = Walk(seed)
        walk.run(70)
        seen += walk.seen
    assert [name for name in SITUATIONS if not seen[name]] == []


def copies_nothing(pool: Pool, group: KVGroup, holding: Holding, num_computed: int) -> Any:
    del group, num_computed
    return pool, holding


def shares_in_findable_blocks(group: KVGroup, holding: Holding, num_shared: int) -> bool:
    first, end = compute_num_skipped_blocks(group, num_shared), -(-num_shared // group.block_size)
    return NULL_BLOCK not in holding.block_table[first:end]


def shares_what_windows_left(group: KVGroup, holding: Holding, num_shared: int) -> bool:
    is_within = num_shared % group.block_size > 0
    return not is_within or num_shared // group.block_size >= holding.num_cached_blocks


def takes_all_for_common(mine: TokenIds, theirs: TokenIds) -> int:
    return min(len(mine), len(theirs))


MISTAKES = (
    (slots, "get_own", copies_nothing),
    (forks, "is_shareable", shares_in_findable_blocks),
    (forks, "is_shareable", shares_what_windows_left),
    (branches, "count_common_tokens", takes_all_for_common),
)


def run_many(num_walks: int) -> None:
    for seed in range(num_walks):
        Walk(seed).run(70)


@pytest.mark.parametrize(("room", "name", "wrong"), MISTAKES)
def test_a_specification_that_shares_wrongly_is_seen(
    monkeypatch: pytest.MonkeyPatch, room: Any, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(room, name, wrong)
    monkeypatch.setattr(Walk, "find_shared", lambda _, __, child: child.num_computed_tokens)
    with pytest.raises((AssertionError, IndexError)):
        run_many(60)
