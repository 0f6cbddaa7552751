"""The graph of a very small world, for people (DOT, SVG) and for programs (JSON)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from html import escape

from blockstep.conformance.explore.shard import sketch
from blockstep.conformance.explore.tables import format_event
from blockstep.conformance.explore.walk import Walked
from blockstep.spec.profiles import initial_state

STATES_MAX = 300
"""The most states of a graph; a larger one is not readable."""

_WIDTH, _GAP, _LINE = 112, 76, 14
"""Width of a box, gap between columns, height of a line: pixels."""


@dataclass(frozen=True, slots=True)
class Node:
    """One state; its number is its place in the order of the walk."""

    depth: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """States by number, and the events between them."""

    nodes: tuple[Node, ...]
    ways: dict[tuple[int, int], tuple[str, ...]]
    """Events by source and target; those that change nothing are left out."""


def get_graph(walked: Walked) -> Graph:
    """Return the graph of a walk that kept its edges."""
    first = sketch(initial_state(walked.task.world.config))
    nodes = [Node(0, tuple(first.split("\n")))]
    numbers = {edge.source: 0 for edge in walked.edges[:1]}
    ways: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for edge in walked.edges:
        source = numbers[edge.source]
        if edge.target not in numbers:
            numbers[edge.target] = len(nodes)
            nodes.append(Node(nodes[source].depth + 1, tuple(edge.sketch.split("\n"))))
        if edge.source != edge.target:
            ways[source, numbers[edge.target]][format_event(edge.event)] = None
    return Graph(tuple(nodes), {ends: tuple(events) for ends, events in ways.items()})


def to_json(graph: Graph) -> dict[str, object]:
    """Return the graph as JSON (docs/reference/json.md)."""
    return {
        "states": [{"number": n, **asdict(node)} for n, node in enumerate(graph.nodes)],
        "transitions": [
            {"source": source, "target": target, "events": events}
            for (source, target), events in graph.ways.items()
        ],
    }


def to_dot(graph: Graph) -> str:
    """Return the graph for Graphviz."""
    lines = ["digraph world {", "  rankdir=LR; node [shape=box, fontname=monospace];"]
    for number, node in enumerate(graph.nodes):
        label = "\\n".join(node.lines).replace('"', "'")
        lines.append(f'  s{number} [label="{label}"];')
    for (source, target), events in graph.ways.items():
        label = "\\n".join(map(_short, events)).replace('"', "'")
        lines.append(f'  s{source} -> s{target} [label="{label}"];')
    return "\n".join([*lines, "}"]) + "\n"


def to_svg(graph: Graph) -> str:
    """Return the graph as SVG: columns by depth; edges back are drawn below, dashed."""
    places: list[tuple[int, int]] = []
    columns: dict[int, int] = defaultdict(int)
    height = 4 * _LINE
    for node in graph.nodes:
        row = columns[node.depth]
        columns[node.depth] += 1
        places.append((10 + node.depth * (_WIDTH + _GAP), 30 + row * (height + 3 * _LINE)))
    bottom = max(y for _, y in places) + height
    parts: list[str] = []
    num_back = 0
    for (source, target), events in graph.ways.items():
        (x, y), (to_x, to_y) = places[source], places[target]
        text = " / ".join(dict.fromkeys(map(_short, events)))
        if to_x > x:
            x, y, to_y = x + _WIDTH, y + height // 2, to_y + height // 2
            middle = (x + to_x) // 2
            parts.append(f'<path d="M{x} {y} C{middle} {y} {middle} {to_y} {to_x} {to_y}"/>')
            at_x, at_y = middle, (y + to_y) // 2 - 5
        elif to_x == x:
            x += _WIDTH // 2
            y, to_y = (y, to_y + height) if to_y < y else (y + height, to_y)
            parts.append(f'<path d="M{x} {y} V{to_y}"/>')
            at_x, at_y = x + 30, (y + to_y) // 2 + 4
        else:
            num_back += 1
            low = bottom + 22 * num_back
            x, to_x = x + _WIDTH // 2 + 6, to_x + _WIDTH // 2 - 6
            parts.append(
                f'<path class="back" d="M{x} {y + height} V{low} H{to_x} V{to_y + height}"/>'
            )
            at_x, at_y = (x + to_x) // 2, low - 4
        parts.append(f'<text class="way" x="{at_x}" y="{at_y}">{escape(text)}</text>')
    for (x, y), node in zip(places, graph.nodes, strict=True):
        parts.append(f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{height}" rx="6"/>')
        for index, line in enumerate(node.lines):
            at_y = y + height // 2 + 5 + int((index - (len(node.lines) - 1) / 2) * _LINE)
            parts.append(f'<text x="{x + _WIDTH // 2}" y="{at_y}">{escape(line)}</text>')
    right = max(x for x, _ in places) + _WIDTH + 10
    low = bottom + 22 * num_back + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {low}"'
        f' width="{right}" font-family="monospace" font-size="12" text-anchor="middle">\n'
        "<style>rect{fill:#eef3fb;stroke:#345}path{fill:none;stroke:#678;marker-end:url(#a)}"
        ".back{stroke-dasharray:4 3}.way{fill:#345;font-size:10px}"
        "svg{background:#fff}</style>\n"
        '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0 L8 4 L0 8 Z" style="fill:#678;stroke:none"/>'
        "</marker></defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _short(event: str) -> str:
    """Return as much of an event as a picture shows."""
    words = event.split()
    return " ".join(words[: {"submit": 2, "commit": 1}.get(words[0])])
