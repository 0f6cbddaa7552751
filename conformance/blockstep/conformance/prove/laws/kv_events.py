"""Laws about KV events: they suffice to rebuild the prefix cache.

PYTEST_DONT_REWRITE.

It is symbolic which blocks of a table exist and what happens to each block; tokens are numbered by
their positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec import vocabulary as v
from blockstep.spec.core import block_pool as pools
from blockstep.spec.core.block_pool import Pool, publish_blocks, withdraw_all, withdraw_blocks
from blockstep.spec.core.requests import RequestState
from blockstep.spec.features.kv_events import get_stored, take_events

ROOM = LawModule("kv_events")
TOKENS = tuple(range(20))
Stored = tuple[v.BlockStored, ...]


def name_tokens(num_tokens: int) -> tuple[v.BlockKey, ...]:
    """Return the keys of the first tokens, one per token."""
    keys: list[v.BlockKey] = []
    for token in range(num_tokens):
        keys.append(v.BlockKey(keys[-1] if keys else None, (token,)))
    return tuple(keys)


KEYS = name_tokens(len(TOKENS))
ASKED = v.Request("a", TOKENS, max_tokens=1)
REQUEST = RequestState(ASKED, v.Status.RUNNING, block_keys=KEYS)


def build_grouped(size: int) -> v.Config:
    """Return a config of two groups; blocks of the second have `size` tokens."""
    groups = (v.KVGroup(v.GroupKind.FULL, 1), v.KVGroup(v.GroupKind.FULL, size))
    return v.Config(16, 1, groups=groups, enable_kv_cache_events=True)


def list_blocks(*there: int) -> tuple[v.BlockId, ...]:
    """Return the block ids, with the null block where there is none."""
    return tuple([index if is_there == 1 else 0 for index, is_there in enumerate(there, 1)])


def follow(copies: Counter[v.BlockKey], events: Sequence[v.KVEvent]) -> None:
    """Update the number of copies of each key as a consumer of the events does."""
    for event in events:
        match event:
            case v.BlockStored():
                copies.update(event.keys)
            case v.BlockRemoved():
                copies.subtract(event.keys)
            case _:
                copies.clear()


# Mistakes.


@instead(get_stored, theirs="#44451")
def tokens_of_absent_blocks_are_listed(
    right: Right[Stored], request: RequestState, fresh: Sequence[int], first: int, config: v.Config
) -> Stored:
    """One event lists the tokens of all blocks that became full, cached or not."""
    events, size = right(), config.block_sizes[1]
    keys = tuple([key for event in events for key in event.keys])
    tokens = request.request.prompt_token_ids[first * size : (first + len(fresh)) * size]
    return (replace(events[0], keys=keys, token_ids=tokens),) if events else ()


@instead(publish_blocks)
def second_copy_is_not_reported(right: Right[Pool], pool: Pool, keys: Sequence[v.BlockKey]) -> Pool:
    """A block is not reported if its key is cached already."""
    return right(changes=()) if all(key in pool.cached for key in keys) else right()


@instead(withdraw_blocks)
def removal_without_a_key_is_reported(
    right: Right[Pool], pool: Pool, block_ids: Sequence[int]
) -> Pool:
    """A removal is reported even for a block without a key."""
    gone = [v.BlockRemoved((pool.block_keys[b] or KEYS[0],)) for b in block_ids]
    events = () if pool.journal is None else pool.journal
    return replace(right(), journal=(*events, *gone))


@instead(take_events)
def events_are_returned_again(
    pool: Pool,
) -> tuple[Pool, tuple[v.KVEvent, ...]]:
    """The events stay in the log and are returned again."""
    return pool, pool.journal or ()


# Blocks that become cached.


@ROOM.law("P20", (1, 1, 0, 1, 2), tokens_of_absent_blocks_are_listed)
def check_stored_event_has_the_parent_and_tokens_of_its_blocks(
    first: int, is_1: int, is_2: int, is_3: int, size: int
) -> None:
    """Three blocks became full, from index `first` on; the group keeps some or all."""
    assert 0 <= first <= 1 and 1 <= size <= 2
    assert 0 <= is_1 <= 1 and 0 <= is_2 <= 1 and 0 <= is_3 <= 1
    fresh = list_blocks(is_1, is_2, is_3)
    for event in get_stored(build_grouped(size), REQUEST, 1, fresh, first):
        begin = event.token_ids[0] // size
        end = begin + len(event.keys)
        assert event.keys == tuple(
            [KEYS[(index + 1) * size - 1].in_group(1) for index in range(begin, end)]
        )
        assert event.parent == (KEYS[begin * size - 1].in_group(1) if begin else None)
        assert event.token_ids == TOKENS[begin * size : end * size]
        assert event.block_size == size


@ROOM.law("P20", (1, 1, 0, 1))
def check_each_cached_block_is_reported_once_in_order(
    first: int, is_1: int, is_2: int, is_3: int
) -> None:
    """Blocks that are not cached are not reported, and no event is empty."""
    assert 0 <= first <= 1
    assert 0 <= is_1 <= 1 and 0 <= is_2 <= 1 and 0 <= is_3 <= 1
    fresh = list_blocks(is_1, is_2, is_3)
    events = get_stored(build_grouped(2), REQUEST, 1, fresh, first)
    assert all(event.keys for event in events)
    assert [key for event in events for key in event.keys] == [
        KEYS[2 * index + 1].in_group(1) for index, block_id in enumerate(fresh, first) if block_id
    ]


# Blocks that are no longer cached.


@ROOM.law("P20", (1, 0, 1, 0, 1), second_copy_is_not_reported, removal_without_a_key_is_reported)
def check_events_count_the_copies_of_each_key(
    name_2: int, name_3: int, goes_1: int, goes_2: int, goes_3: int
) -> None:
    """A block is published, then two more with its key, another key or none; some are withdrawn."""
    assert 0 <= name_2 <= 2 and 0 <= name_3 <= 2
    assert 0 <= goes_1 <= 1 and 0 <= goes_2 <= 1 and 0 <= goes_3 <= 1
    pool, copies = publish_each(0, name_2, name_3), Counter[v.BlockKey]()
    leaving = [b for b, goes in ((1, goes_1), (2, goes_2), (3, goes_3)) if goes == 1]
    after, events = take_events(withdraw_blocks(pool, leaving))
    follow(copies, events)
    assert dict(+copies) == {key: len(blocks) for key, blocks in after.cached.items()}
    assert +copies == copies


@ROOM.law("P20 P25", (0, 0, 1))
def check_events_are_in_order_around_a_reset(name_1: int, name_2: int, is_reset: int) -> None:
    """Blocks are published, the cache is reset, and one of them is published again."""
    assert 0 <= name_1 <= 2 and 0 <= name_2 <= 2 and 0 <= is_reset <= 1
    pool, copies = publish_each(name_1, name_2), Counter[v.BlockKey]()
    if is_reset == 1:
        pool = publish_block(withdraw_all(pool), 1, name_1)
    after, events = take_events(pool)
    follow(copies, events)
    assert dict(+copies) == {key: len(blocks) for key, blocks in after.cached.items()}


@ROOM.law("P20", (0, 1), events_are_returned_again)
def check_no_event_is_returned_twice(name_1: int, name_2: int) -> None:
    """A second call returns no events."""
    assert 0 <= name_1 <= 2 and 0 <= name_2 <= 2
    pool, events = take_events(publish_each(name_1, name_2))
    assert len(events) == (name_1 < 2) + (name_2 < 2)
    assert take_events(pool)[1] == ()


def publish_block(pool: Pool, block_id: v.BlockId, name: int) -> Pool:
    """Publish a block under one of the first two keys, or not at all if `name` is 2."""
    if name == 2:
        return pool
    key = KEYS[0] if name == 0 else KEYS[1]
    return publish_blocks(pool, (block_id,), (key,), (v.BlockStored((key,), None, (0,), 1),))


def publish_each(*names: int) -> Pool:
    """Return a pool with KV events whose first blocks are published one by one."""
    pool = replace(pools.create_pool(len(names) + 1), journal=())
    for block_id, name in enumerate(names, 1):
        pool = publish_block(pool, block_id, name)
    return pool
