"""Report: measurements as tables for a terminal and for a page, as a plot, and as JSON."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from blockstep.conformance.bench.measure import Measurement, Reading, get_slope, group
from blockstep.conformance.bench.scenarios import SCENARIOS, TRACE

COLUMNS = (
    "scenario", "running", "engine", "reading", "schedule p50", "schedule p99", "commit p50",
    "commit p99", "step p50", "step p99", "times vllm", "by means", "MiB",
)  # fmt: skip
WIDTH_MIN = 150
"""Width of a screen that shows all columns, in characters."""
FEW_COLUMNS = ("scenario", "running", "engine", "reading", "step p50", "step p99", "times vllm")
"""Columns on a narrower screen."""
YARDSTICK = "vllm"
"""The engine that all others are compared with, if it was measured."""
LEGEND = "A step is schedule and commit: p50 / p99 in microseconds of processor time"
RATIO = f", and in bold how many p50 of this column fit into that of {YARDSTICK}"


def make_rows(entry: Measurement) -> list[dict[str, str]]:
    """Return a row for each side in each reading; times are in microseconds."""
    rows = []
    for found in entry.readings:
        parts = (found.schedule, found.commit, found.step)
        times = [show_time(value) for part in parts for value in (part.p50, part.p99)]
        ratios = [get_ratio(entry, found), get_ratio(entry, found, "mean")]
        ratio_cells = ["" if ratio is None else f"{ratio:.1f}" for ratio in ratios]
        values = (entry.scenario, f"{entry.num_running:,}", found.engine, found.reading)
        cells = (*values, *times, *ratio_cells, f"{found.memory_mib:.0f}")
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows


def make_table(measurements: Sequence[Measurement], columns: Sequence[str] = COLUMNS) -> Table:
    """Return a table for a terminal, with an empty line between scenarios and sizes."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        is_word = column in ("scenario", "engine", "reading")
        table.add_column(column, justify="left" if is_word else "right", no_wrap=is_word)
    for entry in measurements:
        if table.rows:
            table.add_row()
        for row in make_rows(entry):
            table.add_row(*(row[column] for column in columns))
    return table


def get_yardstick(entry: Measurement) -> Reading | None:
    """Return the reading that the others are compared with; None if it was not measured."""
    return next((found for found in entry.readings if found.engine == YARDSTICK), None)


def get_ratio(
    entry: Measurement, found: Reading, of: Literal["p50", "mean"] = "p50"
) -> float | None:
    """Return the yardstick's step time divided by that of `found`; None without a yardstick."""
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
    return [
        {
            "scenario": entries[0].scenario,
            "engine": one.engine,
            "reading": one.reading,
            "nanoseconds_per_request": round(slope, 1),
        }
        for entries in group(measurements)
        for one in entries[0].readings
        if (slope := get_slope(entries, one.engine, one.reading)) is not None
    ]


def to_json(
    measurements: Sequence[Measurement], conditions: Mapping[str, object]
) -> dict[str, Any]:
    """Return JSON types; `conditions` are machine, command and settings."""
    return {
        "format": "blockstep-bench-scheduler",
        "version": 1,
        **conditions,
        "unit": "microseconds of processor time",
        "measurements": [asdict(entry) for entry in measurements],
        "slopes": list_slopes(measurements),
    }


def show_time(microseconds: float) -> str:
    """Return a time in microseconds as text: one digit after the point below 1,000."""
    return f"{microseconds:,.1f}" if microseconds < 1000 else f"{microseconds:,.0f}"


def make_markdown(
    measurements: Sequence[Measurement], conditions: Mapping[str, Any], plot: Path | None
) -> str:
    """Return a section of a page: command, machine, a table for each scenario, plot."""
    compared = RATIO if any(map(get_yardstick, measurements)) else ""
    paragraph = (
        f"{format_machine(conditions['machine'])} Garbage collection while measuring: "
        f"{conditions['gc']}. All sides made the same decisions: their digests are equal in every "
        "row."
    )
    lines = [f"`{conditions['command']}`", "", paragraph, "", f"{LEGEND}{compared}.", ""]
    for entries in group(measurements):
        lines += _make_scenario(entries)
    if plot is not None:
        lines += [f"![p50 of a step over the number of running requests]({plot.name})", ""]
    return "\n".join(lines)


def make_pipes(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first are right-aligned."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, marks, *rows)]


def format_machine(machine: Mapping[str, Any]) -> str:
    """Return the result of `describe_machine` as text."""
    return (
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, "
        f"{machine['system']}, {machine['date']}; load {machine['load_1min']} when it began."
    )


def _make_scenario(entries: Sequence[Measurement]) -> list[str]:
    """Return the lines of a scenario: a table with a row for each size, and the slopes."""
    first = entries[0]
    suffix = f": {SCENARIOS[first.scenario].summary}" if first.scenario in SCENARIOS else ""
    head = ["running", *(f"{found.engine}, {found.reading}" for found in first.readings)]
    rows = [
        [f"{entry.num_running:,}", *(_show_cell(entry, found) for found in entry.readings)]
        for entry in entries
    ]
    slopes = [get_slope(entries, found.engine, found.reading) for found in first.readings]
    if None not in slopes:
        rows.append(["ns per request, from 64 on", *(f"{slope:,.0f}" for slope in slopes)])
    if first.scenario == TRACE:
        cells = [
            f"{_show_ratio(get_ratio(first, found, 'mean'))}{get_seconds(first, found):.2f} s"
            for found in first.readings
        ]
        rows.append([f"all {first.num_steps:,} steps", *cells])
    return [f"**{first.scenario}**{suffix}.", "", *make_pipes(head, rows), ""]


def _show_cell(entry: Measurement, found: Reading) -> str:
    times = f"{show_time(found.step.p50)} / {show_time(found.step.p99)}"
    return f"{_show_ratio(get_ratio(entry, found))}{times}"


def _show_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"**{ratio:.1f}x** "


def draw_plot(path: Path, measurements: Sequence[Measurement]) -> None:
    """The p50 of a step over the number of running requests, one panel per scenario.

    A colour for each engine, the yardstick in black; what is materialised is dashed. The ending of
    `path` says what kind of picture: .svg or .png.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib = importlib.import_module("matplotlib")  # heavy, and needed for pictures only
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "blockstep"  # the same bytes for the same figures
    pyplot = importlib.import_module("matplotlib.pyplot")
    panels = group(measurements)
    columns = min(len(panels), 3 if len(panels) != 4 else 2)
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows + 0.4), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axis, entries in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, entries)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=min(len(names), 3))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_panel(axis: Any, entries: Sequence[Measurement]) -> None:
    sizes = [entry.num_running for entry in entries]
    ours = dict.fromkeys(f.engine for f in entries[0].readings if f.engine != YARDSTICK)
    colours = {YARDSTICK: "black"} | {name: f"C{index}" for index, name in enumerate(ours)}
    for index, found in enumerate(entries[0].readings):
        axis.plot(
            sizes,
            [entry.readings[index].step.p50 for entry in entries],
            "--" if found.reading == "materialised" else "-",
            color=colours[found.engine],
            marker="o",
            markersize=3,
            label=f"{found.engine}, {found.reading}",
        )
    axis.set(title=entries[0].scenario, xscale="log", yscale="log")
    axis.set(xlabel="running requests", ylabel="microseconds a step, p50")
    axis.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axis.set_xticks([], minor=True)
    axis.grid(visible=True, alpha=0.3)
