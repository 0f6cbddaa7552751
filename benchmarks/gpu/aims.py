"""Aims: every figure that is aimed at on an H100 or H200, and whether it is met.

A value is looked up in the figures of a part: by key in an object, and by `name` in a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on one figure."""

    name: str
    part: str
    path: tuple[str, ...]
    """Path of the figure in the results, from the name of the command on."""
    bound: float
    unit: str
    is_least: bool = True
    """Whether the figure must be at least the bound; otherwise at most."""
    by: tuple[str, ...] = ()
    """Path of the figure by which the first one is divided, if any."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An aim and what was measured."""

    aim: Aim
    value: float | None

    @property
    def word(self) -> str:
        """`met`, `missed` or `not measured`."""
        if self.value is None:
            return "not measured"
        is_met = self.value >= self.aim.bound if self.aim.is_least else self.value <= self.aim.bound
        return "met" if is_met else "missed"


def _attention() -> list[Aim]:
    """Return the aims of the cases of `benchmarks/attention.py`."""
    shares = (
        ("decode 64 x 4096", 90.0),
        ("decode 256 x 1024", 90.0),
        ("decode 16 x 32768", 90.0),
        ("decode 40 x 8192", 90.0),
        ("decode 8 x 4096", 75.0),
        ("decode 1 x 32768", 75.0),
        ("decode 31 x 256 + 100000", 75.0),
    )
    prefills = ("prefill 4 x 2048", "prefill 1 x 8192", "prefill 512 behind 8192")

    def make(case: str, figure: str, bound: float, unit: str, is_least: bool = True) -> Aim:
        return Aim(case, "attention", ("attention", "cases", case, figure), bound, unit, is_least)

    return [
        *(make(case, "percent_of_copy", bound, "% of copy") for case, bound in shares),
        make("decode 1 x 500", "us", 6.0, "us", is_least=False),
        *(make(case, "percent_of_sdpa", 60.0, "% of SDPA") for case in prefills),
    ]


def _engine() -> list[Aim]:
    """Return the aims of the fastest way, and of the fastest with the device's scheduler."""

    def where(running: int, figure: str, best: str = "best") -> tuple[str, ...]:
        return ("engine", best, f"{running}", figure)

    def device(figure: str) -> tuple[str, ...]:
        return where(64, figure, "best_device")

    bound, busy = "percent_of_bound", "busy_percent"
    return [
        Aim("engine at 64", "engine", where(64, bound), 60.0, "% of bound"),
        Aim("engine at 1", "engine", where(1, bound), 70.0, "% of bound"),
        Aim("GPU busy at 64", "engine", where(64, busy), 95.0, "% of step"),
        Aim("GPU busy at 1", "engine", where(1, busy), 95.0, "% of step"),
        Aim("scheduler not hidden at 64", "engine", device("exposed_percent"), 1.0, "% of step",
            is_least=False),
        Aim("device by host at 64", "engine", device("host_by_device"), 1.0, "times as fast"),
        Aim("tokens of device as host's", "engine", device("num_alike"), 64.0, "of 64"),
    ]  # fmt: skip


AIMS: Final = (
    *_attention(),
    Aim(
        "device step at 64", "device", ("device", "64", "device", "p50_us"), 10.0, "us",
        is_least=False,
    ),
    Aim(
        "device step at 1024", "device", ("device", "1024", "device", "p50_us"), 20.0, "us",
        is_least=False,
    ),
    *_engine(),
    Aim(
        "greedy rejection", "kernels",
        ("kernels", "cases", "rejection_sample greedy 64 x 4", "us"), 1.2, "x argmax's time",
        is_least=False,
        by=("kernels", "cases", "rejection_sample greedy 64 x 4", "peers", "argmax"),
    ),
)  # fmt: skip


def look_up(figures: Any, path: Sequence[str]) -> float | None:
    """Return the number at `path`; None if there is none."""
    for key in path:
        if isinstance(figures, Mapping):
            figures = figures.get(key)
        elif isinstance(figures, list):
            named = (one for one in figures if isinstance(one, Mapping))
            figures = next((one for one in named if one.get("name") == key), None)
        else:
            return None
    is_number = isinstance(figures, int | float) and not isinstance(figures, bool)
    return float(figures) if is_number else None


def judge(figures: Mapping[str, Any], aims: Iterable[Aim] = AIMS) -> list[Verdict]:
    """Return a verdict on each aim; `figures` are by part and command."""
    verdicts = []
    for aim in aims:
        value = look_up(figures.get(aim.part), aim.path)
        if value is not None and aim.by:
            divisor = look_up(figures.get(aim.part), aim.by)
            value = value / divisor if divisor else None
        verdicts.append(Verdict(aim, value))
    return verdicts


def describe(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON."""
    return {**asdict(verdict.aim), "value": verdict.value, "verdict": verdict.word}


def make_table(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each verdict, those missed last, and a count."""
    order = ("not measured", "met", "missed")
    lines = []
    for verdict in sorted(verdicts, key=lambda one: order.index(one.word)):
        aim = verdict.aim
        value = "-" if verdict.value is None else f"{verdict.value:,.2f}"
        sign = ">=" if aim.is_least else "<="
        lines.append(
            f"{verdict.word:<13} {aim.name:<28} {value:>10} {sign} {aim.bound:<7,g} {aim.unit}"
        )
    counts = ", ".join(
        f"{sum(one.word == word for one in verdicts)} {word}" for word in reversed(order)
    )
    return "\n".join([*lines, f"aims: {counts}"])
