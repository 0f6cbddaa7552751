"""Random transfers through the specification and the host: both say the same after every event.

The programs are drawn here, and not by `draw`: a store that says anything at any time, beside
sessions, adapters, grammars and all that else is drawn. Nothing of it needs to make sense.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from alike_support import Pair, play_all
from stored_support import drain, draw_event, draw_stored

from blockstep.spec import vocabulary as v


def count_witnesses(
    event: v.Event, found: object, before: v.Snapshot, after: v.Snapshot
) -> Counter[str]:
    """What shows that the programs reach what they are to reach."""
    assert before.transfers is not None
    assert after.transfers is not None
    seen: Counter[str] = Counter()
    now = {r.request_id: r for r in after.requests}
    if isinstance(found, v.Plan):
        seen["at once"] += sum(not load.is_async for load in found.kv_loads)
        seen["later"] += sum(load.is_async for load in found.kv_loads)
        received = set(before.transfers.received)
        seen["back"] += len(received.intersection(after.running))
        seen["gave"] += sum(not any(now[name].block_tables) for name in received)
    if isinstance(event, v.TransfersReported | v.Commit) and isinstance(found, v.Outputs):
        seen["failed"] += sum(row.finish_reason is v.FinishReason.ERROR for row in found.rows)
        if before.transfers.unsettled and event.transfers.invalid_block_ids:
            seen["recomputed"] += sum(
                name not in after.transfers.unsettled
                and name in now
                and now[name].num_computed_tokens < request.num_computed_tokens
                for name in before.transfers.unsettled
                if (request := before.request(name)) is not None
            )
    if isinstance(event, v.Abort | v.Commit):
        seen["held"] += len(after.transfers.held) > len(before.transfers.held)
    if isinstance(found, v.ResetDone):
        seen["reset"] += found.success and event != v.Reset()
    return seen


def run(seeds: range, num_events: int) -> Counter[str]:
    def begin(draw: random.Random, seed: int) -> Pair:
        return Pair(draw_stored(draw), seed, count_witnesses)

    return play_all(seeds, num_events, begin, draw_event, drain)


def test_specification_and_host_are_alike() -> None:
    witnessed = run(range(40), 100)
    for name in ("at once", "later", "back", "gave", "failed", "recomputed", "held", "reset"):
        assert witnessed[name] > 2, (name, witnessed)


@pytest.mark.soak
def test_specification_and_host_are_alike_for_long() -> None:
    witnessed = run(range(1000, 1400), 250)
    assert witnessed["events"] > 100_000
