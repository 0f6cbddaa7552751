"""Full ISL: a request is admitted only if all of its known tokens fit, not only its first chunk.

Source: seed 001 "Full ISL reservation"; vLLM 0.19.1 `scheduler_reserve_full_isl`.
"""

from __future__ import annotations

from typing import Final

from blockstep.spec.core.block_pool import Pool, count_free, get_num_free_blocks
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.requests import Hit, Holding, RequestState, without_nulls
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import compute_num_blocks, count_copies, get_num_slots_of
from blockstep.spec.core.work import Step
from blockstep.spec.vocabulary import BlockId, Config, KVGroup


def process_reservation(
    step: Step, pool: Pool, request: RequestState, hit: Hit, num_spared: int
) -> bool:
    """Whether all known tokens of a waiting request fit. Source: seed 001 "Full ISL reservation";
    P8."""
    rules = step.state.rules
    return rules[can_finish](step.state.config, pool, request, hit, rules, num_spared)


def can_finish(
    config: Config, pool: Pool, request: RequestState, hit: Hit, rules: Rules, num_spared: int = 0
) -> bool:
    """Whether the free blocks suffice for all known tokens of a waiting request, and leave some.

    Blocks of its hit are counted; `num_spared` blocks must be left. Source: seed 001 "Full ISL
    reservation"; P8, P11.
    """
    num_slots = min(request.num_known_tokens, config.max_model_len)
    hit_tables = hit.block_tables or ((),) * len(request.holdings)
    count, slots_of, num_needed = rules[count_reserved_blocks], rules[get_num_slots_of], 0
    for group, found, held in zip(config.kv_groups, hit_tables, request.holdings, strict=True):
        num_copies = count_copies(pool, group, held, request.num_computed_tokens, rules)
        num_owned = slots_of(group, num_slots, request.request)
        num_needed += count(config, pool, group, num_owned, found, held, num_copies)
    return num_needed + num_spared <= get_num_free_blocks(pool)


def count_reserved_blocks(
    config: Config,
    pool: Pool,
    group: KVGroup,
    num_slots: int,
    hit: tuple[BlockId, ...],
    holding: Holding,
    num_copies: int = 0,
) -> int:
    """Return the free blocks of one group that a waiting request needs for `num_slots`, after its
    hit.

    Source: seed 001 "Full ISL reservation"; P8, P11.
    """
    del config
    num_blocks = compute_num_blocks(num_slots, group.block_size)
    return count_lacking(pool, num_blocks, num_blocks, hit, holding, num_copies)


def count_lacking(
    pool: Pool,
    num_blocks: int,
    num_at_once: int,
    hit: tuple[BlockId, ...],
    holding: Holding,
    num_copies: int,
) -> int:
    """Return the free blocks that a table of `num_blocks` lacks after its hit.

    What it lacks, and copies of shared blocks, but no more than it ever holds at once: the blocks
    that the request has kept become free again, unless others hold them too. Source: seed 001 "Full
    ISL reservation"; upstream #39734; P8, P10, P11.
    """
    kept = holding.block_table
    num_new_blocks = max(num_blocks - len(kept) - len(hit), 0)
    num_lacking = num_new_blocks + count_free(pool, hit) + num_copies
    num_own = sum([pool.ref_counts[block_id] == 1 for block_id in without_nulls(kept)])
    return max(min(num_lacking, num_at_once - num_own), 0)


def is_reserving(config: Config) -> bool:
    """Whether an admission considers all known tokens. Source: seed 001 "Full ISL reservation"."""
    return config.scheduler_reserve_full_isl


FEATURE: Final = Feature("full_isl", is_reserving, Hooks(reserves=(process_reservation,)))
