"""The benchmark of engines in processes: every side gets the same events and has a cost."""

from __future__ import annotations

import sys

from benchmarks.processes import HOST, SERVE, measure, record_events

from blockstep.conformance.protocol.registry import load_engine


def test_each_side_has_a_cost() -> None:
    command = f"cmd:{sys.executable} {SERVE} host"
    runs = record_events(command, 60)
    assert sum(len(events) for _, events in runs) >= 60
    sides = {HOST: load_engine("host"), "process": load_engine(command)}
    costs = {(cost.side, cost.with_state): cost for cost in measure(sides, runs, 1)}
    assert len(costs) == 4
    assert all(cost.here_us > 0 for cost in costs.values())
    assert [costs[HOST, shown].there_us for shown in (False, True)] == [0, 0]
    assert all(costs["process", shown].there_us > 0 for shown in (False, True))
