"""Report: measurements as rows, as a table for a terminal, and as JSON that can be read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import msgspec
from rich.table import Table

from blockstep.conformance.bench.measure import Measurement, Reading, get_slope, group

COLUMNS = (
    "scenario", "running", "engine", "reading", "schedule p50", "schedule p99", "commit p50",
    "commit p99", "step p50", "step p99", "times vllm", "by means", "MiB",
)  # fmt: skip
YARDSTICK = "vllm"
"""Everybody is compared with this engine, where it was measured."""


def make_rows(entry: Measurement) -> list[dict[str, str]]:
    """A row for each side in each reading; times in microseconds."""
    rows = []
    for found in entry.readings:
        parts = (found.schedule, found.commit, found.step)
        times = [show_time(value) for part in parts for value in (part.p50, part.p99)]
        ratios = [get_ratio(entry, found), get_ratio(entry, found, "mean")]
        told = ["" if ratio is None else f"{ratio:.1f}" for ratio in ratios]
        values = (entry.scenario, f"{entry.num_running:,}", found.engine, found.reading)
        cells = (*values, *times, *told, f"{found.memory_mib:.0f}")
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows


def make_table(measurements: Sequence[Measurement]) -> Table:
    """For a terminal; an empty line where another scenario or size begins."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index in (0, 2, 3) else "right")
    for entry in measurements:
        if table.rows:
            table.add_row()
        for row in make_rows(entry):
            table.add_row(*row.values())
    return table


def get_yardstick(entry: Measurement) -> Reading | None:
    """What the others are compared with."""
    return next((found for found in entry.readings if found.engine == YARDSTICK), None)


def get_ratio(
    entry: Measurement, found: Reading, of: Literal["p50", "mean"] = "p50"
) -> float | None:
    """How many times a step of `found` fits into one of the yardstick; None: nothing to compare."""
    slow = get_yardstick(entry)
    fast: float = getattr(found.step, of)
    if slow is None or found == slow or not fast:
        return None
    return float(getattr(slow.step, of)) / fast


def get_seconds(entry: Measurement, found: Reading) -> float:
    """All measured steps together."""
    return found.step.mean * entry.num_steps / 1e6


def list_slopes(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Nanoseconds per running request, by scenario, engine and reading; where sizes differ."""
    found = [
        (entries[0].scenario, one.engine, one.reading, get_slope(entries, one.engine, one.reading))
        for entries in group(measurements)
        for one in entries[0].readings
    ]
    return [
        {
            "scenario": scenario,
            "engine": engine,
            "reading": reading,
            "nanoseconds_per_request": round(slope, 1),
        }
        for scenario, engine, reading, slope in found
        if slope is not None
    ]


def to_json(
    measurements: Sequence[Measurement], conditions: Mapping[str, object]
) -> dict[str, Any]:
    """For machines; `conditions` are machine, command and settings."""
    return {
        "format": "blockstep-bench-scheduler",
        "version": 1,
        **conditions,
        "unit": "microseconds of processor time",
        "measurements": [asdict(entry) for entry in measurements],
        "slopes": list_slopes(measurements),
    }


def from_json(plain: Mapping[str, Any]) -> list[Measurement]:
    """The measurements in what `to_json` made.

    Raises:
        msgspec.ValidationError: it is something else.
    """
    return msgspec.convert(plain.get("measurements"), list[Measurement])


def show_time(microseconds: float) -> str:
    """In as many digits as say something."""
    return f"{microseconds:,.1f}" if microseconds < 1000 else f"{microseconds:,.0f}"
