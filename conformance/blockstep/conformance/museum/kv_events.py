"""Seeded bugs in the KV event log: the scheduler is right, but its events are not."""

from __future__ import annotations

from collections.abc import Sequence

from blockstep.conformance.museum.bug import Page, Right, instead
from blockstep.spec.copies import replace
from blockstep.spec.core.admission import get_findable_pool
from blockstep.spec.core.block_pool import Pool, with_changes, withdraw_all, withdraw_blocks
from blockstep.spec.core.prefix_cache import get_group_keys, get_tokens
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import revoke_slots
from blockstep.spec.core.work import Step
from blockstep.spec.features.kv_events import get_stored
from blockstep.spec.releases.kv_events import null_blocks_are_reported
from blockstep.spec.vocabulary import (
    AllBlocksCleared,
    BlockId,
    BlockStored,
    Config,
)

PAGE = Page(takes="events")
SKIPPING = Page(takes_groups=True, takes_states=True, takes="events")
_UNSEEN = "books: the events are compared with the state, which is hidden"


@PAGE.exhibit(
    "no BlockRemoved is sent for an evicted block",
    "LMCache #5076 sends stores only",
    "P20",
    invisible_if_hidden=_UNSEEN,
)
@instead(withdraw_blocks)
def evictions_are_not_told(right: Right[Pool], pool: Pool) -> Pool:
    """A router takes every block that was ever stored as cached."""
    return replace(right(), journal=pool.journal)


@PAGE.exhibit(
    "BlockRemoved is sent only when the last block with a key is evicted",
    "#55092, #48933",
    "P20",
    invisible_if_hidden=_UNSEEN,
)
@instead(withdraw_blocks)
def last_copy_alone_is_told(right: Right[Pool], pool: Pool, block_ids: Sequence[BlockId]) -> Pool:
    """BlockStored is sent for each block, so a router that counts them never reaches zero."""
    for block_id in block_ids:
        before, key = pool.journal, pool.block_keys[block_id]
        pool = right(pool=pool, block_ids=[block_id])
        if key in pool.cached:
            pool = replace(pool, journal=before)
    return pool


@PAGE.exhibit(
    "BlockStored repeats the blocks before the new ones",
    "Dynamo #8012, for its followers",
    "P20",
    invisible_if_hidden=_UNSEEN,
)
@instead(get_stored)
def prefix_is_told_again(
    right: Right[tuple[BlockStored, ...]],
    config: Config,
    request: RequestState,
    group: int,
    fresh: Sequence[BlockId],
    first: int,
) -> tuple[BlockStored, ...]:
    """Each event starts with the prompt's first block, so a router counts too many copies."""
    end, size = first + len(fresh), config.block_sizes[group]
    return tuple(
        replace(
            event,
            keys=get_group_keys(request.block_keys, group, size // config.block_size, 0, end),
            parent=None,
            token_ids=get_tokens(request, 0, end * size),
        )
        for event in right()
    )


@PAGE.exhibit(
    "no AllBlocksCleared is sent for a reset",
    "AIBrix #2287",
    "P20",
    invisible_if_hidden=_UNSEEN,
)
@instead(withdraw_all)
def resets_are_not_told(right: Right[Pool], pool: Pool) -> Pool:
    """A router sends prompts to an engine that no longer has their prefix."""
    return replace(right(), journal=pool.journal)


@PAGE.exhibit(
    "a prefix-cache lookup sends AllBlocksCleared",
    "TokenSpeed #166",
    "P20",
    invisible_if_hidden=_UNSEEN,
)
def looking_is_told_as_a_reset(rules: Rules, config: Config) -> Rules:
    """The stored blocks are still cached, but a router takes them as gone."""

    def look(step: Step) -> Pool:
        step.pool = with_changes(step.pool, (AllBlocksCleared(),))
        return rules[get_findable_pool](step)

    return rules.replacing(get_findable_pool, look) if config.enable_prefix_caching else rules


@PAGE.exhibit(
    "no BlockRemoved is sent for keys that a preemption withdraws",
    "#43569, repaired in part",
    "P20",
    wrong_fix_of="zombie-key",
    invisible_if_hidden=_UNSEEN,
)
@instead(revoke_slots)
def taken_back_in_silence(right: Right[Pool], pool: Pool) -> Pool:
    """The key leaves the map, but a router that got it as stored still has it."""
    after = right()
    return replace(after, journal=pool.journal)


@SKIPPING.exhibit(
    "BlockStored lists the tokens of blocks that are not cached",
    "#44451",
    "P20",
    invisible_if_hidden=_UNSEEN,
)
def skipped_tokens_are_told(rules: Rules, config: Config) -> Rules:
    """States are kept at some block boundaries only; tokens of the other blocks are listed, too."""
    return null_blocks_are_reported(rules, config)
