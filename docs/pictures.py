"""Pictures of the documentation, drawn by code as SVG within the page.

They are 400 units wide, so that a phone shows them at full size, and take their colours from the
theme, so that they are light or dark as the page is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from xml.sax.saxutils import escape

from benchmarks.scheduler import list_step_lines

WIDTH = 400
LINE = 16
"""Height of a line of text."""
STYLE = "max-width: 30rem; width: 100%; height: auto; font: 12px sans-serif"
SURFACE = "var(--color-background-secondary, #f8f9fb)"
BORDER = "var(--color-background-border, #ccc)"
COLOURS = ("#2f7ed8", "#1aadce", "#8bbc21", "#c0392b", "#e67e22")
"""The colours of lines; they differ in lightness, too."""


def draw(name: str, height: int, parts: Sequence[str]) -> str:
    """Return an SVG with a name for screen readers, as a block of a page."""
    head = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" '
        'fill="currentColor"/></marker></defs>'
    )
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}" '
        f'style="{STYLE}" fill="currentColor">{head}{"".join(parts)}</svg>'
    )
    return f"```{{raw}} html\n{svg}\n```\n"


def box(x: int, y: int, width: int, lines: Sequence[str], height: int = 0) -> str:
    """Return a box with lines of text, the first one in bold."""
    height = height or LINE * len(lines) + 12
    texts = "".join(
        text(x + 8, y + LINE * (number + 1), line, bold=number == 0)
        for number, line in enumerate(lines)
    )
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{SURFACE}" '
        f'stroke="{BORDER}"/>{texts}'
    )


def text(x: int, y: int, words: str, bold: bool = False, anchor: str = "start") -> str:
    """Return a line of text."""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def arrow(points: Sequence[tuple[int, int]]) -> str:
    """Return a line through some points with a tip at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.2" '
        'marker-end="url(#tip)"/>'
    )


def draw_loop() -> str:
    """Return the messages of one step, and what each side knows."""
    lanes = {"client": 60, "scheduler": 200, "worker": 340}
    knows = {
        "client": ("client", "its requests", "its outputs"),
        "scheduler": ("scheduler", "queues, blocks", "prefix cache"),
        "worker": ("worker", "the plans only", "the KV memory"),
    }
    messages = (
        ("client", "scheduler", "Submit"),
        ("scheduler", "worker", "Schedule: plan"),
        ("worker", "scheduler", "Commit: tokens"),
        ("scheduler", "client", "Outputs"),
    )
    parts = [box(lanes[lane] - 57, 4, 114, lines) for lane, lines in knows.items()]
    parts += [
        f'<line x1="{x}" y1="64" x2="{x}" y2="246" stroke="{BORDER}"/>' for x in lanes.values()
    ]
    for number, (start, end, label) in enumerate(messages):
        y = 96 + 44 * number
        parts.append(arrow([(lanes[start], y), (lanes[end], y)]))
        parts.append(text((lanes[start] + lanes[end]) // 2, y - 6, label, anchor="middle"))
    return draw("One step: submit, plan, commit, outputs", 250, parts)


def draw_block() -> str:
    """Return the states of a block, and what leads from one to the next."""
    states = (
        ("free, no key", "in the free queue"),
        ("held, being written", "ref count 1, by one request"),
        ("held, published", "full, cached under its key, may be shared"),
        ("free, cached", "in the free queue, can still be hit"),
    )
    steps = ("allocated", "the step that fills it", "last holder frees it")
    parts = [box(40, 4 + 84 * number, 260, lines) for number, lines in enumerate(states)]
    for number, label in enumerate(steps):
        y = 48 + 84 * number
        parts.append(arrow([(150, y), (150, y + 40)]))
        parts.append(text(160, y + 24, label))
    parts.append(arrow([(300, 272), (325, 272), (325, 196), (300, 196)]))
    parts.append(text(330, 238, "hit"))
    parts.append(arrow([(300, 286), (372, 286), (372, 112), (300, 112)]))
    parts.append(text(326, 150, "evicted"))
    parts.append(arrow([(40, 112), (16, 112), (16, 28), (40, 28)]))
    parts.append(text(20, 72, "freed"))
    return draw("The life of a block", 304, parts)


def draw_equivalences() -> str:
    """Return the four equivalences, each inside of the stronger one."""
    nested = (
        ("exact", "block ids, order of the free queue"),
        ("renamed", "block tables, sharing, cached keys"),
        ("plan", "tokens per request and step, outputs"),
        ("safety", "properties of every correct scheduler"),
    )
    parts = [
        box(4 + 18 * number, 4 + 44 * number, 392 - 36 * number, lines, 220 - 62 * number + 18)
        for number, lines in enumerate(nested)
    ]
    return draw("exact includes renamed, plan and safety", 246, parts)


STEPS = {"arrays": "ours, arrays", "materialised": "ours, objects", "protocol": "ours, apply"}
TRT_LLM_US = 1.3
"""Microseconds per request of TensorRT-LLM's C++ scheduler: a figure from elsewhere, not measured
here."""


def draw_steps(lines: Mapping[str, Sequence[tuple[int, float]]] | None = None) -> str:
    """Return the plot of a decode step: microseconds per running request, both axes logarithmic.

    Without lines, those of the newest results. Each ends with its label.
    """
    lines = list_step_lines() if lines is None else lines
    left, right, top, bottom = 40, 290, 12, 260
    numbers, times = (1, 8, 64, 512, 4096), (0.1, 1, 10, 100)

    def place(number: float, time: float) -> tuple[float, float]:
        across = log(number / numbers[0]) / log(numbers[-1] / numbers[0])
        up = log(time / 0.05) / log(200 / 0.05)
        return left + (right - left) * across, bottom - (bottom - top) * up

    parts = [text(left, bottom + 34, "running requests"), text(2, 9, "us per request")]
    for number in numbers:
        x, _ = place(number, 1)
        parts.append(text(round(x), bottom + 16, f"{number:,}", anchor="middle"))
        parts.append(f'<path d="M{x:.1f} {top} V{bottom}" stroke="{BORDER}"/>')
    for time in times:
        _, y = place(1, time)
        parts.append(text(left - 4, round(y) + 4, f"{time:g}", anchor="end"))
        parts.append(f'<path d="M{left} {y:.1f} H{right}" stroke="{BORDER}"/>')
    _, y = place(1, TRT_LLM_US)
    dashes = 'stroke="currentColor" stroke-dasharray="4 3"'
    parts.append(f'<path d="M{left} {y:.1f} H{right}" {dashes}/>')
    ends = [(y, "TensorRT-LLM")]
    for number, (label, points) in enumerate(lines.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in sorted(points)))
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        ends.append((place(*max(points))[1], STEPS.get(label, label)))
    lowest = 0.0
    for y, label in sorted(ends):
        lowest = max(y + 4, lowest + LINE)
        parts.append(text(right + 6, round(lowest), label))
    return draw("Microseconds per running request of a decode step", bottom + 42, parts)


PICTURES = {
    "picture of steps": draw_steps,
    "picture of a step": draw_loop,
    "picture of a block": draw_block,
    "picture of equivalences": draw_equivalences,
}
"""The function that draws a picture, by its name."""
