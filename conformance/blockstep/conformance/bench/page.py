"""Page: measurements as a part of the documentation, and as a plot.

One row for each size, one column for each engine and reading: what a reader looks for is how they
compare. Schedule and commit apart, and memory, stand in the terminal's table and in the JSON.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockstep.conformance.bench.measure import Measurement, Reading, get_slope, group
from blockstep.conformance.bench.report import (
    YARDSTICK,
    get_ratio,
    get_seconds,
    get_yardstick,
    show_time,
)
from blockstep.conformance.bench.scenarios import SCENARIOS, TRACE

LEGEND = "A step is schedule and commit: p50 / p99 in microseconds of processor time"
RATIO = f", and in bold how many p50 of this column fit into that of {YARDSTICK}"


def make_markdown(
    measurements: Sequence[Measurement], conditions: Mapping[str, Any], plot: Path | None
) -> str:
    """A part of a page: command, machine, a table for each scenario, plot."""
    legend = LEGEND + (RATIO if any(map(get_yardstick, measurements)) else "")
    lines = [f"`{conditions['command']}`", "", _say_conditions(conditions), "", f"{legend}.", ""]
    for entries in group(measurements):
        lines += [*_make_scenario(entries), ""]
    if plot is not None:
        lines += [f"![p50 of a step over the number of running requests]({plot.name})", ""]
    return "\n".join(lines)


def make_pipes(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown; numbers stand to the right of what is first."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, marks, *rows)]


def say_machine(machine: Mapping[str, Any]) -> str:
    """What `describe_machine` found, as a sentence."""
    return (
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, "
        f"{machine['system']}, {machine['date']}; load {machine['load_1min']} when it began."
    )


def _say_conditions(conditions: Mapping[str, Any]) -> str:
    return (
        f"{say_machine(conditions['machine'])} Garbage collection while measuring: "
        f"{conditions['gc']}. All sides made the same decisions: their digests are equal in every "
        "row."
    )


def _make_scenario(entries: Sequence[Measurement]) -> list[str]:
    """What it is, a row for each size, and what a running request more costs, or all steps."""
    first = entries[0]
    told = f": {SCENARIOS[first.scenario].summary}" if first.scenario in SCENARIOS else ""
    head = ["running", *(f"{found.engine}, {found.reading}" for found in first.readings)]
    rows = [
        [f"{entry.num_running:,}", *(_show_cell(entry, found) for found in entry.readings)]
        for entry in entries
    ]
    slopes = [get_slope(entries, found.engine, found.reading) for found in first.readings]
    if None not in slopes:
        rows.append(["ns per request, from 64 on", *(f"{slope:,.0f}" for slope in slopes)])
    if first.scenario == TRACE:
        seconds = [f"{get_seconds(first, found):.2f} s" for found in first.readings]
        ratios = [_show_ratio(get_ratio(first, found, "mean")) for found in first.readings]
        cells = map("".join, zip(ratios, seconds, strict=True))
        rows.append([f"all {first.num_steps:,} steps", *cells])
    return [f"**{first.scenario}**{told}.", "", *make_pipes(head, rows)]


def _show_cell(entry: Measurement, found: Reading) -> str:
    times = f"{show_time(found.step.p50)} / {show_time(found.step.p99)}"
    return f"{_show_ratio(get_ratio(entry, found))}{times}"


def _show_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"**{ratio:.1f}x** "


STYLES = {"materialised": "--"}
"""By reading; the others are drawn through."""


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
            STYLES.get(found.reading, "-"),
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
