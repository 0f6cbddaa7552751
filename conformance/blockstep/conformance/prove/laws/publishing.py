"""Laws about the blocks that are published and withdrawn. PYTEST_DONT_REWRITE."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.prove import harness as h
from blockstep.conformance.prove.hosts import build_host
from blockstep.conformance.prove.law import Room
from blockstep.spec.core.async_ import publish_verified
from blockstep.spec.core.rules import STRICT_RULES
from blockstep.spec.core.slots import (
    compute_num_publishable_blocks,
    compute_num_slots,
    revoke_slots,
)
from blockstep.spec.vocabulary import MAX_INT

ROOM = Room("publishing")


# The specification.


@ROOM.law("P3 P4", (16, 20, 33, 16))
def check_published_blocks_are_those_full_of_known_tokens_that_the_step_computes(
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


# The host engine.


class Published(list[int]):
    """Replaces the prefix-cache map and records which blocks are published."""

    log = None
    """No KV events are logged."""

    def publish(self, block: int, _lineage: object, _index: int) -> None:
        """Record that the block is published."""
        self.append(block)

    def withdraw(self, block: int) -> None:
        """Record that the block is no longer published."""
        if block in self:
            self.remove(block)


@ROOM.law("P3 P4", (16, 20, 33, 1, 16))
def check_host_publishes_the_same_blocks(
    num_computed: int, num_scheduled: int, num_known: int, num_settled: int, block_size: int
) -> None:
    """These are the full blocks of the table that are not published yet."""
    assert 1 <= block_size <= MAX_INT and 0 <= num_computed and 1 <= num_scheduled
    assert 1 <= num_known <= 3 * block_size and num_known < 8192 and 0 <= num_settled <= 3
    request = h.build_runner("a", num_known, num_computed, (1, 2, 3), num_settled)
    host = build_host(h.build_config(block_size, enable_prefix_caching=True), request)
    host.prefix = Published()
    host._publish(0, num_computed, num_scheduled)
    full = compute_num_publishable_blocks(num_computed, num_scheduled, num_known, block_size)
    assert tuple(host.prefix) == (1, 2, 3)[num_settled:full]
    assert host.table.holdings[0][0].num_cached == max(num_settled, full)


@ROOM.law("P3 P4", (40, 1, 16))
def check_host_publishes_the_same_blocks_of_what_a_commit_verified(
    num_known: int, num_settled: int, block_size: int
) -> None:
    """These are the full blocks before the last known token, with frames in flight."""
    assert 1 <= block_size <= MAX_INT and 1 <= num_known <= 3 * block_size and num_known < 8192
    assert 0 <= num_settled <= 3
    config = h.build_config(block_size, max_frames_in_flight=2, enable_prefix_caching=True)
    request = replace(
        h.build_runner("a", num_known, num_known, (1, 2, 3), num_settled),
        block_keys=tuple(map(h.key_of, (1, 2, 3))),
    )
    pool = h.build_pool((0, 1, 1, 1, 0, 0), (4, 5), published=(1, 2, 3)[:num_settled])
    after, due = publish_verified(h.build_state(config, (request,)), pool, request)
    host = build_host(config, request)
    host.prefix = Published((1, 2, 3)[:num_settled])
    host._publish_verified(0)
    assert host.prefix == [b for b in (1, 2, 3) if after.block_keys[b] is not None]
    assert host.table.holdings[0][0].num_cached == due.holdings[0].num_cached_blocks


@ROOM.law("P4", (20, 2, 16))
def check_host_withdraws_the_same_keys_from_a_victim(
    num_computed: int, num_settled: int, block_size: int
) -> None:
    """The host asks for every block that was not full before, even if it has no key."""
    assert 1 <= block_size <= MAX_INT and 0 <= num_computed <= 3 * block_size
    assert num_computed < 8192 and 0 <= num_settled <= 3
    request = h.build_runner("a", 1, num_computed, (1, 2, 3), num_settled)
    pool = h.build_pool((0, 1, 1, 1, 0, 0), (4, 5), published=(1, 2, 3)[:num_settled])
    after = revoke_slots(pool, request, (block_size,), STRICT_RULES)
    host = build_host(h.build_config(block_size), request)
    host.prefix = Published((1, 2, 3)[:num_settled])
    host._withdraw_unwritten(0)
    assert host.prefix == [b for b in (1, 2, 3) if after.block_keys[b] is not None]
