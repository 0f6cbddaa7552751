"""Telling: quirks of releases with KV events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from blockstep.spec.copies import replace
from blockstep.spec.core.block_pool import Changes, Pool
from blockstep.spec.core.prefix_cache import get_group_keys, get_tokens
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.features import kv_events, resets
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import (
    NULL_BLOCK,
    AllBlocksCleared,
    BlockId,
    BlockKey,
    BlockRemoved,
    BlockStored,
    Config,
    Reset,
    ResetDone,
)

Change: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def reset_event_is_late(rules: Rules, _config: Config) -> Rules:
    """The event of a reset is returned by the next commit, however late."""

    def process_reset(state: State, reset: Reset) -> tuple[State, ResetDone]:
        state, done = rules[resets.process_reset](state, reset)
        if not done.kv_events:
            return state, done
        pool = replace(state.pool, journal=done.kv_events)
        return replace(state, pool=pool), replace(done, kv_events=())

    return rules.replacing(resets.process_reset, process_reset)


def null_blocks_are_reported(rules: Rules, _config: Config) -> Rules:
    """Stored blocks are reported in one event, with the tokens of null blocks among them.

    A load that is confirmed reports no null block: the skipped blocks of a load count as cached
    (`skipped_load_blocks_count_as_cached`), so they are not among those that it stores. Seen by
    running 0.19.1 and 0.33.0 with windows, loads and events; the adapter reads no events of 0.27.0.
    """

    def get_stored(
        config: Config, request: RequestState, group: int, fresh: Sequence[BlockId], first: int
    ) -> tuple[BlockStored, ...]:
        if not fresh:
            return ()
        size, end = config.block_sizes[group], first + len(fresh)
        num_links = size // config.block_size
        parent = get_group_keys(request.block_keys, group, num_links, max(first - 1, 0), first)
        keys = get_group_keys(request.block_keys, group, num_links, first, end)
        return (
            BlockStored(
                keys=tuple([k for k, b in zip(keys, fresh, strict=True) if b != NULL_BLOCK]),
                parent=parent[0] if parent else None,
                token_ids=get_tokens(request, first * size, end * size),
                block_size=size,
                adapter=request.request.adapter,
            ),
        )

    return rules.replacing(kv_events.get_stored, get_stored)


def events_without_groups(rules: Rules, _config: Config) -> Rules:
    """KV events name blocks by their tokens alone, so the keys of all groups look alike."""

    def take_events(pool: Pool) -> tuple[Pool, Changes]:
        pool, events = rules[kv_events.take_events](pool)
        return pool, tuple(map(without_group, events))

    return rules.replacing(kv_events.take_events, take_events)


def without_group(event: Change) -> Change:
    """Returns the event with each key as it would be in the first group. Source: #37688."""
    match event:
        case BlockStored(keys=keys, parent=parent):
            first = None if parent is None else _in_first_group(parent)
            return replace(event, keys=tuple(map(_in_first_group, keys)), parent=first)
        case BlockRemoved(keys=keys):
            return replace(event, keys=tuple(map(_in_first_group, keys)))
        case _:
            return event


def _in_first_group(key: BlockKey) -> BlockKey:
    return key.in_group(0)


STORIES = (
    QuirkStory(
        Quirk.NULL_BLOCKS_ARE_REPORTED,
        null_blocks_are_reported,
        "stored blocks are reported in one event, with the tokens of null blocks among them",
        ("P20",),
        "#44451",
        "0.19.1",
        "events on; a recurrent group that keeps one state of a prompt of two blocks: its one key "
        "is reported with the tokens of both blocks, and without a parent",
    ),
    QuirkStory(
        Quirk.RESET_EVENT_IS_LATE,
        reset_event_is_late,
        "the event of a reset is returned by the next commit, however late",
        ("P20",),
        "noticed in AIBrix #2287",
        "0.19.1, 0.33.0",
        "events on; one request of a block finishes, and the cache is reset: no event is returned "
        "until another request is served, so a router still sends prompts there",
    ),
    QuirkStory(
        Quirk.EVENTS_WITHOUT_GROUPS,
        events_without_groups,
        "KV events do not say of which KV group a block is",
        ("P20",),
        "#37688; a release up to 0.19.1 therefore makes one group of all with KV events",
        "0.19.1",
        "events on, full attention and a window: a block that the window leaves is evicted, and "
        "a router believes that the block of full attention is gone",
    ),
)
