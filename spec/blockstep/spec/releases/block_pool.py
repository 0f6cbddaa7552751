"""Memory: quirks of releases in which blocks are taken, kept and freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core import admission, async_, block_pool, slots
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.parts import Part
from blockstep.spec.core.requests import Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features import common_prefix, full_isl
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import BlockId, Config, FrameId


def _with_unnamed_first(rules: Rules) -> Rules:
    """Return the rules in which free blocks without a key are taken before all others."""

    def free_blocks(pool: Pool, block_table: Sequence[BlockId]) -> Pool:
        after = rules[block_pool.free_blocks](pool, block_table)
        num_released = len(after.free_queue) - len(pool.free_queue)
        released = after.free_queue[-num_released:] if num_released else ()
        if pool.is_lifo:
            released = after.free_queue[:num_released]
        named = [block_id for block_id in released if pool.block_keys[block_id] is not None]
        unnamed = [block_id for block_id in released if pool.block_keys[block_id] is None]
        rest = (*named, *pool.free_queue) if pool.is_lifo else (*pool.free_queue, *named)
        return replace(after, free_queue=(*unnamed, *rest))

    return rules.replacing(block_pool.free_blocks, free_blocks)


def unwritten_keys_stay(rules: Rules, _config: Config) -> Rules:
    """Blocks of a removed row stay published although the step does not fill them."""

    return rules.replacing(slots.revoke_slots, revoke_slots)


def revoke_slots(
    pool: Pool,
    request: RequestState,
    block_sizes: tuple[int, ...],
    rules: Rules,
    fence: FrameId | None = None,
) -> Pool:
    """Modified `slots.revoke_slots`: no key is withdrawn."""
    del block_sizes
    return slots.release_slots(pool, request, rules, fence)


def no_full_isl_reserve(rules: Rules, _config: Config) -> Rules:
    """A request is admitted when its first chunk fits, even with scheduler_reserve_full_isl."""
    return rules.replacing(full_isl.can_finish, can_finish)


def can_finish(
    config: Config, pool: Pool, request: RequestState, hit: Hit, rules: Rules, num_spared: int = 0
) -> bool:
    """Modified `full_isl.can_finish`: whatever it needs later."""
    del config, pool, request, hit, rules, num_spared
    return True


def admitted_with_lookahead(rules: Rules, _config: Config) -> Rules:
    """A request is admitted with lookahead slots, which it does not need yet."""

    return rules.replacing(admission.allocate_first_slots, allocate_first_slots)


def allocate_first_slots(
    step: Step, pool: Pool, request: RequestState, num_new: int, hit: Hit
) -> tuple[Pool, RequestState] | None:
    """Modified `admission.allocate_first_slots`: with lookahead slots."""
    config, rules = step.state.config, step.state.rules
    num_lookahead = config.num_lookahead_tokens
    return slots.allocate_slots(config, pool, request, num_new, num_lookahead, hit, rules)


def blocks_without_keys_reused_first(rules: Rules, config: Config) -> Rules:
    """Freed blocks without a key are taken before all others, if there is caching."""
    return _with_unnamed_first(rules) if config.enable_prefix_caching else rules


def lifo_reuse_without_caching(rules: Rules, config: Config) -> Rules:
    """Without caching, the block that was freed last is taken first."""
    return rules if config.enable_prefix_caching else _with_unnamed_first(rules)


def drafts_publish_at_commit(rules: Rules, _config: Config) -> Rules:
    """A synchronous commit publishes the blocks that it fills, if there are drafts."""

    def publishes_at_commit(config: Config) -> bool:
        return config.num_speculative_tokens > 0 or rules[async_.publishes_at_commit](config)

    return rules.replacing(async_.publishes_at_commit, publishes_at_commit)


def no_common_prefix_while_blocks_are_short(rules: Rules, config: Config) -> Rules:
    """No common prefix blocks are counted while a request waits that was refused blocks."""

    def get_slots_at_admission(
        step: Step, request: RequestState, num_new: int, hit: Hit
    ) -> tuple[Pool, RequestState] | Verdict:
        granted = rules[admission.get_slots_at_admission](step, request, num_new, hit)
        if isinstance(granted, Verdict):
            waiting = step.requests[request.request_id]
            step.requests[request.request_id] = WAS_REFUSED.put(waiting, value=True)
            return granted
        pool, after = granted
        return pool, WAS_REFUSED.put(after, value=False)

    def list_common_prefixes(step: Step) -> list[int]:
        if any(WAS_REFUSED.of(step.requests[name]) for name in (*step.waiting, *step.skipped)):
            return [0] * len(config.block_sizes)
        return rules[common_prefix.list_common_prefixes](step)

    return rules.replacing(admission.get_slots_at_admission, get_slots_at_admission).replacing(
        common_prefix.list_common_prefixes, list_common_prefixes
    )


WAS_REFUSED: Final = Part("was_refused", absent=False)
"""Whether a waiting request was refused blocks since it came, or since it was preempted."""


STORIES = (
    QuirkStory(
        Quirk.UNWRITTEN_KEYS_STAY,
        unwritten_keys_stay,
        "blocks of a removed row stay published although the step does not fill them",
        ("P3", "P4", "P25"),
        "#43569 (open)",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0 0.33.0",
        "PRIORITY; a low request fills a block in this step, and a high one after it needs a "
        "block: the low one is preempted, its key stays, and the next request with that prefix "
        "hits the block",
    ),
    QuirkStory(
        Quirk.NO_FULL_ISL_RESERVE,
        no_full_isl_reserve,
        "a request is admitted when its first chunk fits, even with scheduler_reserve_full_isl",
        ("P8",),
        "#37307 (the option came with 0.19.0)",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.18.1",
        "3 blocks of 1 are free, a budget of 2: a prompt of 4 tokens is admitted",
    ),
    QuirkStory(
        Quirk.NO_COMMON_PREFIX_WHILE_BLOCKS_ARE_SHORT,
        no_common_prefix_while_blocks_are_short,
        "no common prefix blocks are counted while a request waits that was refused blocks",
        (),
        "#23485 (merged; ended by #30166)",
        "0.12.0",
        "a pool of one block of 1; two prompts of one token, of which the second gets no block: "
        "num_common_prefix_blocks is 0, not 1",
    ),
    QuirkStory(
        Quirk.ADMITTED_WITH_LOOKAHEAD,
        admitted_with_lookahead,
        "a request is admitted with lookahead slots, which it does not need yet",
        ("P8", "P15"),
        "#43733 (merged)",
        "0.23.0 0.27.0 0.33.0",
        "a draft head and 2 drafts, blocks of 1: a prompt of 3 tokens takes 5 blocks",
    ),
    QuirkStory(
        Quirk.BLOCKS_WITHOUT_KEYS_REUSED_FIRST,
        blocks_without_keys_reused_first,
        "with caching, freed blocks without a key are taken before all others",
        ("P16",),
        "#42656 (merged)",
        "0.27.0 0.33.0",
        "a prompt of a block and a half is aborted: the half block is at the head of the queue",
    ),
    QuirkStory(
        Quirk.LIFO_REUSE_WITHOUT_CACHING,
        lifo_reuse_without_caching,
        "without caching, the block that was freed last is taken first",
        ("P16",),
        "#42656, #48017 (took it back), #51482 (merged)",
        "0.33.0",
        "no caching; a request is aborted: its blocks are at the head of the queue",
    ),
    QuirkStory(
        Quirk.DRAFTS_PUBLISH_AT_COMMIT,
        drafts_publish_at_commit,
        "with drafts a synchronous commit publishes the blocks that it fills",
        ("P14", "P18"),
        "not found upstream (searched 2026-11-26: cache_blocks, accepted drafts)",
        "0.33.0",
        "one draft, blocks of 2; the commit of a prompt of 4 tokens and of two accepted ones "
        "publishes the third block, which else the next plan publishes",
    ),
)
