"""The benchmark of commits times the specification over a recording, by profile."""

from __future__ import annotations

import pickle
from pathlib import Path

from benchmarks import commits, digest


def test_a_recording_is_timed_by_profile(tmp_path: Path) -> None:
    runs = digest.record(["strict", "vllm-0.19.1"], 50, [()])
    file = tmp_path / "recording"
    file.write_bytes(pickle.dumps(runs))
    figures = commits.measure_recording(["."], file, 1)
    counts = {name: count for name, (count, _) in digest.replay(runs).items()}
    assert {row.group: row.events for row in figures} == counts
    assert all(row.commit == "." and row.us_per_event > 0 for row in figures)
