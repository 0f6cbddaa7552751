"""Report: measurements as a table, as JSON, as a page of the documentation, and as a plot."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from blockstep.conformance.bench.measure import Measurement, Reading, get_slope

COLUMNS = (
    "scenario", "running", "engine", "reading", "schedule p50", "schedule p99", "commit p50",
    "commit p99", "step p50", "step p99", "times vllm", "MiB",
)  # fmt: skip
YARDSTICK = "vllm"
"""Everybody is compared with this engine, where it was measured."""


def make_rows(measurements: Sequence[Measurement]) -> list[dict[str, str]]:
    """A row for each side in each reading; times in microseconds."""
    rows = []
    for entry in measurements:
        slow = next((found for found in entry.readings if found.engine == YARDSTICK), None)
        for found in entry.readings:
            parts = (found.schedule, found.commit, found.step)
            times = [_shown(value) for part in parts for value in (part.p50, part.p99)]
            ratio = "" if slow in (None, found) else f"{get_ratio(slow, found):.1f}"
            values = (entry.scenario, f"{entry.num_running:,}", found.engine, found.reading)
            cells = (*values, *times, ratio, f"{found.memory_mib:.0f}")
            rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows


def get_ratio(slow: Reading | None, fast: Reading) -> float:
    """How many times the p50 of a step of one fits into that of the other."""
    return slow.step.p50 / fast.step.p50 if slow is not None and fast.step.p50 else 0.0


def make_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """For a terminal."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index in (0, 2, 3) else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def list_slopes(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Nanoseconds per running request, by scenario, engine and reading; where sizes differ."""
    found = []
    for scenario in dict.fromkeys(entry.scenario for entry in measurements):
        entries = [entry for entry in measurements if entry.scenario == scenario]
        for reading in entries[0].readings:
            slope = get_slope(entries, reading.engine, reading.reading)
            if slope is not None:
                found.append(
                    {
                        "scenario": scenario,
                        "engine": reading.engine,
                        "reading": reading.reading,
                        "nanoseconds_per_request": round(slope, 1),
                    }
                )
    return found


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


def make_markdown(
    measurements: Sequence[Measurement], conditions: Mapping[str, Any], plot: Path | None
) -> str:
    """A part of a page: machine, command, table, slopes, plot."""
    machine = conditions["machine"]
    rows = make_rows(measurements)
    told = (
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, "
        f"{machine['system']}, {machine['date']}; load {machine['load_1min']} when it began. "
        f"Garbage collection while measuring: {conditions['gc']}. Microseconds of processor time. "
        "All sides made the same decisions: their digests are equal in every row."
    )
    lines = [
        f"`{conditions['command']}`",
        "",
        told,
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row.values()) + " |" for row in rows),
        "",
    ]
    slopes = list_slopes(measurements)
    if slopes:
        lines += ["| scenario | engine | reading | ns per running request |", "|---|---|---|---|"]
        lines += [
            f"| {row['scenario']} | {row['engine']} | {row['reading']} | "
            f"{row['nanoseconds_per_request']:,} |"
            for row in slopes
        ]
        lines.append("")
    if plot is not None:
        lines += [f"![p50 of a step over the number of running requests]({plot.name})", ""]
    return "\n".join(lines)


def draw_plot(path: Path, measurements: Sequence[Measurement]) -> None:
    """The p50 of a step over the number of running requests, one panel per scenario.

    The ending of `path` says what kind of picture: .svg or .png.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib = importlib.import_module("matplotlib")  # heavy, and needed for pictures only
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "blockstep"  # the same bytes for the same figures
    pyplot = importlib.import_module("matplotlib.pyplot")
    scenarios = list(dict.fromkeys(entry.scenario for entry in measurements))
    columns = min(len(scenarios), 3)
    rows = -(-len(scenarios) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for place, scenario in enumerate(scenarios):
        panel = axes[place // columns][place % columns]
        entries = [entry for entry in measurements if entry.scenario == scenario]
        for index, reading in enumerate(entries[0].readings):
            panel.plot(
                [entry.num_running for entry in entries],
                [entry.readings[index].step.p50 for entry in entries],
                marker="o",
                markersize=3,
                label=f"{reading.engine}, {reading.reading}",
            )
        panel.set(title=scenario, xscale="log", yscale="log", xlabel="running", ylabel="us, p50")
        panel.grid(visible=True, alpha=0.3)
    axes[0][0].legend(fontsize="small")
    for place in range(len(scenarios), rows * columns):
        axes[place // columns][place % columns].axis("off")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _shown(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
