"""Laws about the blocks that are published and withdrawn. PYTEST_DONT_REWRITE."""

from __future__ import annotations

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.host_states import BLOCKS, COLUMNS, build_host
from blockstep.conformance.prove.law import LawModule
from blockstep.spec.core.slots import (
    compute_num_publishable_blocks,
    compute_num_slots,
)
from blockstep.spec.vocabulary import MAX_INT

ROOM = LawModule("publishing")


# The specification.


@ROOM.law("P3 P4", (16, 20, 33, 16))
def check_published_blocks_are_full_of_computed_known_tokens(
    num_computed: int, num_new: int, num_known: int, block_size: int
) -> None:
    """No draft, no partly filled block and nothing that a later step computes is published.

    The next block is not full yet, or its tokens are not known.
    """
    assert 0 <= num_computed and 1 <= num_new and 1 <= num_known and 1 <= block_size
    num_full = compute_num_publishable_blocks(num_computed, num_new, num_known, block_size)
    end = num_full * block_size
    assert end <= num_known and end <= num_computed + num_new
    assert end + block_size > num_known or end + block_size > num_computed + num_new


@ROOM.law("P3 P8", (16, 20, 33, 4, 64, 16))
def check_published_blocks_lie_inside_the_table(
    num_computed: int,
    num_new: int,
    num_known: int,
    num_lookahead: int,
    max_model_len: int,
    block_size: int,
) -> None:
    """This also holds for a table that the model length cuts short."""
    assert 0 <= num_computed and 1 <= num_new and 0 <= num_lookahead and 1 <= block_size
    assert 1 <= num_known <= max_model_len
    num_slots = compute_num_slots(num_computed, num_new, num_lookahead, max_model_len)
    num_full = compute_num_publishable_blocks(num_computed, num_new, num_known, block_size)
    assert num_full * block_size <= num_slots


# The engine.


@ROOM.law("P3 P4", (16, 20, 33, 1, 16))
def check_engine_publishes_the_same_blocks(
    num_computed: int, num_scheduled: int, num_known: int, num_settled: int, block_size: int
) -> None:
    """These are the full blocks of the table that are not published yet."""
    assert 1 <= block_size <= MAX_INT and 0 <= num_computed and 1 <= num_scheduled
    assert 1 <= num_known <= 3 * block_size and num_known < 8192 and 0 <= num_settled <= 3
    request = h.build_runner("a", num_known, num_computed, (1, 2, 3), num_settled)
    host = build_host(h.build_config(block_size, enable_prefix_caching=True), request)
    host.node_tables.values[0][:3] = [1, 2, 3]
    for node in (1, 2, 3):
        host.carriers[node, 0, COLUMNS.LAST_BLOCK] = COLUMNS.NONE
    end = min(num_computed + num_scheduled, num_known)
    BLOCKS.publish(host, 0, num_computed, end)
    full = compute_num_publishable_blocks(num_computed, num_scheduled, num_known, block_size)
    published = [b for b in (1, 2, 3) if host.blocks[b, COLUMNS.NODE] == b]
    assert tuple(published) == (1, 2, 3)[num_settled:full]
    assert host.holdings[0, 0, COLUMNS.PUBLISHED] == max(num_settled, full)
