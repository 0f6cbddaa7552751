"""Seeded bugs from the block manager's listings that fit no other page.

The listings were read and run; the page on discrepancies lists all of their defects, each with the
seeded bug that reproduces it.
"""

from __future__ import annotations

from blockstep.conformance.museum.exhibit import Page, Right, instead
from blockstep.spec.core.admission import get_verdict
from blockstep.spec.core.block_pool import Pool
from blockstep.spec.core.parts import Note
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.slots import Growth, allocate_slots, count_taken, publish_slots
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.vocabulary import Config, KVGroup

PAGE = Page()
Granted = tuple[Pool, RequestState] | None


@PAGE.exhibit(
    "a partly filled last block is not allocated if full blocks are computed, too",
    "the block manager: Prefix Cache Lookup, breaks its rule",
    "P26 P8",
)
@instead(count_taken)
def tail_block_left_out(
    right: Right[int], group: KVGroup, growth: Growth, num_held: int, num_hit: int
) -> int:
    """The tail is allocated only if all full blocks of the request were hit."""
    num_taken = right()
    num_full, num_rest = divmod(growth.num_slots, group.block_size)
    is_left_out = num_held == 0 and num_rest > 0 and num_full != num_hit
    return num_taken - is_left_out


@PAGE.exhibit(
    "a block is published when it is allocated",
    "the block manager: Prefix Cache Lookup, breaks its rule",
    "P4 P3",
)
@instead(allocate_slots)
def published_as_it_is_taken(right: Right[Granted], config: Config, rules: Rules) -> Granted:
    """A chunk may end within the block, so the next request hits slots that are not computed."""
    granted = right()
    if granted is None or not config.enable_prefix_caching:
        return granted
    pool, request = granted
    num_full = request.num_known_tokens // config.block_size
    nums_full = [min(num_full, len(table)) for table in request.block_tables]
    return publish_slots(config, pool, request, nums_full, rules)


_SKIPS_NEXT = Note("skips_next", False)


@PAGE.exhibit(
    "every second waiting request is skipped",
    "the block manager: in the Scheduling Loop, breaks its rule",
    "P16 P15",
    invisible="policy: which request is admitted first",
)
@instead(get_verdict)
def every_second_is_passed_over(right: Right[Verdict], step: Step) -> Verdict:
    """The queue is shortened during an iteration over it."""
    skips, verdict = _SKIPS_NEXT.of(step), Verdict.PASSED_OVER
    if not skips:
        verdict = right()
    _SKIPS_NEXT.set(step, verdict is Verdict.ADMITTED)
    return verdict
