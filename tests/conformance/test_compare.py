"""Differences: in words, on one line, only where there are any."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.protocol.compare import (
    describe_block,
    name_key,
    observation_differences,
    snapshot_differences,
)
from blockstep.spec import Config, Oracle, Plan, Request, Snapshot
from blockstep.spec.vocabulary import Ack, BlockKey, Rejected
from blockstep.spec.vocabulary.observations import RejectCode


def snapshot() -> Snapshot:
    oracle = Oracle(Config(num_blocks=6, block_size=2))
    oracle.submit(Request("A", (1, 2, 3), max_tokens=3))
    oracle.schedule()
    return oracle.snapshot()


def rows(left: Snapshot, right: Snapshot) -> list[tuple[str, str, str]]:
    return [(row.field, row.expected, row.seen) for row in snapshot_differences(left, right)]


def test_equal_states_differ_nowhere() -> None:
    assert snapshot_differences(snapshot(), snapshot()) == ()


def test_a_lost_block_shows_in_queue_and_block() -> None:
    left = snapshot()
    right = replace(left, free_queue=left.free_queue[1:])
    assert rows(left, right) == [
        ("free_queue", "[3, 4, 5]", "[4, 5]"),
        ("block 3", "free, no key", "no holder, not queued, no key"),
    ]


def test_a_stale_key_shows_in_block_and_map() -> None:
    left = snapshot()
    key = BlockKey(None, (8, 9), cache_salt="s")
    right = replace(
        left,
        block_keys=(*left.block_keys[:4], key, left.block_keys[5]),
        cached={**left.cached, key: (4,)},
    )
    assert rows(left, right) == [
        ("block 4", "free, no key", "free, carries #0[8,9] salt s"),
        ("cached #0[8,9] salt s", "-", "blocks 4"),
    ]


def test_a_request_differs_by_field() -> None:
    left = snapshot()
    right = replace(left, requests=(replace(left.requests[0], num_computed_tokens=9),))
    assert rows(left, right) == [("request A num_computed_tokens", "3", "9")]
    assert rows(left, replace(left, requests=())) == [("request A", "running", "no such request")]


def test_plans_differ_by_row_and_field() -> None:
    oracle = Oracle(Config(num_blocks=6, block_size=2))
    oracle.submit(Request("A", (1, 2, 3), max_tokens=3))
    plan = oracle.schedule()
    assert observation_differences(plan, plan) == ()
    other = replace(plan, new=(replace(plan.new[0], num_scheduled_tokens=1),))
    (row,) = observation_differences(plan, other)
    assert (row.field, row.expected, row.seen) == ("new A num_scheduled_tokens", "3", "1")


def test_answers_of_different_kinds() -> None:
    (row,) = observation_differences(Ack(), Rejected(RejectCode.NEVER_FITS, "too long"))
    assert row.field == "observation"
    assert "never_fits" in row.seen
    assert observation_differences(Plan(0), None)[0].seen == "None"


def test_words_for_blocks_and_keys() -> None:
    assert describe_block(snapshot(), 1) == "held by 1, carries #0[1,2]"
    assert describe_block(snapshot(), 99) == "no such block"
    assert name_key(None) == "-"
    assert name_key(BlockKey(None, tuple(range(9)))) == "#0[0,1,2,3,4,5...]"
