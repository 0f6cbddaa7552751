"""Seeded bugs from the block manager's listings that fit no other page.

The listings were read and run; the page on discrepancies lists all of their defects, each with the
seeded bug that reproduces it.
"""

from __future__ import annotations

from blockstep.conformance.museum.exhibit import Page
from blockstep.spec.core.admission import get_verdict
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.parts import Note
from blockstep.spec.core.requests import NO_HIT, Hit, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import Growth, allocate_slots, count_taken, publish_slots
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.vocabulary import Config, KVGroup, RequestId

PAGE = Page()


@PAGE.exhibit(
    "a partly filled last block is not allocated if full blocks are computed, too",
    "the block manager: Prefix Cache Lookup, breaks its rule",
    "P26 P8",
)
def tail_block_left_out(rules: Rules, _config: Config) -> Rules:
    """The tail is allocated only if all full blocks of the request were hit."""

    def count(group: KVGroup, growth: Growth, num_held: int, num_hit: int) -> int:
        num_taken = rules[count_taken](group, growth, num_held, num_hit)
        num_full, num_rest = divmod(growth.num_slots, group.block_size)
        is_left_out = num_held == 0 and num_rest > 0 and num_full != num_hit
        return num_taken - is_left_out

    return rules.replacing(count_taken, count)


@PAGE.exhibit(
    "a block is published when it is allocated",
    "the block manager: Prefix Cache Lookup, breaks its rule",
    "P4 P3",
)
def published_as_it_is_taken(rules: Rules, _config: Config) -> Rules:
    """A chunk may end within the block, so the next request hits slots that are not computed."""

    allocate_rightly = rules[allocate_slots]

    def allocate(
        config: Config,
        pool: Pool,
        request: RequestState,
        num_new: int,
        num_lookahead: int = 0,
        hit: Hit = NO_HIT,
        rules: Rules = rules,
    ) -> tuple[Pool, RequestState] | None:
        granted = allocate_rightly(config, pool, request, num_new, num_lookahead, hit, rules)
        if granted is None or not config.enable_prefix_caching:
            return granted
        pool, request = granted
        num_full = request.num_known_tokens // config.block_size
        nums_full = [min(num_full, len(table)) for table in request.block_tables]
        return publish_slots(config, pool, request, nums_full, rules)

    return rules.replacing(allocate_slots, allocate)


_SKIPS_NEXT = Note("skips_next", False)


@PAGE.exhibit(
    "every second waiting request is skipped",
    "the block manager: in the Scheduling Loop, breaks its rule",
    "P16 P15",
    invisible="policy: which request is admitted first",
)
def every_second_is_passed_over(rules: Rules, _config: Config) -> Rules:
    """The queue is shortened during an iteration over it."""

    def try_next(step: Step, request_id: RequestId) -> Verdict:
        skips, verdict = _SKIPS_NEXT.of(step), Verdict.PASSED_OVER
        if not skips:
            verdict = rules[get_verdict](step, request_id)
        _SKIPS_NEXT.set(step, verdict is Verdict.ADMITTED)
        return verdict

    return rules.replacing(get_verdict, try_next)
