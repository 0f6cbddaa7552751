"""View: a finding as one page of HTML, its blocks in rows and its actions in columns.

The page is complete: it has no script, loads nothing, and forbids both. Strings of an engine or a
program are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from blockstep.conformance.search.film import Picture
from blockstep.spec.vocabulary import BlockId, RequestId

BLOCKS_MAX = 200
"""Most rows: the blocks with the lowest ids that were ever held."""
HUES = (210, 30, 140, 280, 0, 180, 60, 320, 100, 240)
"""Hues of the owners, in order of their first block."""
STYLE = """
:root { color-scheme: light dark; --line: #8886 }
:root { --ink: #111; --paper: #fff; --l: 82%; --bad: #c00 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eee; --paper: #16181d; --l: 32%; --bad: #f66 }
}
body { font: 15px/1.4 system-ui, sans-serif; margin: 1rem }
body { color: var(--ink); background: var(--paper) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px }
td, th { border: 1px solid var(--line); padding: .15rem .4rem }
td, th { text-align: center; white-space: nowrap }
th:first-child { position: sticky; left: 0; background: var(--paper); text-align: right }
thead th { font-weight: normal; vertical-align: bottom; max-width: 12rem; white-space: normal }
.last { border: 2px solid var(--bad) }
.free { color: #888 }
.lost { outline: 2px dashed var(--bad); outline-offset: -3px }
.cached::after { content: " \\25CF" }
pre { overflow-x: auto; font-size: 13px }
"""


def make_page(report: str, film: Sequence[Picture]) -> str:
    """Return the page of a finding: its report as text, and its film if there is one."""
    title = report.partition("\n")[0]
    owners = list(
        dict.fromkeys(name for it in film for held in it.holders.values() for name in held)
    )
    parts = _list_table(film, owners) if film else ()
    body = "\n".join([*parts, f"<pre>{escape(report)}</pre>"])
    return fill_page(title, body, "".join(_list_colours(owners)))


def fill_page(title: str, body: str, more_style: str = "") -> str:
    """Return a page with a title, which is escaped here, and a body, which must be."""
    title = escape(title)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}{more_style}</style></head>",
        f"<body><h1>Blockstep</h1><p>{title}</p>",
        f"{body}</body></html>",
    ]
    return "\n".join(lines) + "\n"


def _list_colours(owners: Sequence[RequestId]) -> Iterator[str]:
    """Yield a CSS class for each owner, by number, since a name may contain anything."""
    for number in range(len(owners)):
        yield f".o{number} {{ background: hsl({HUES[number % len(HUES)]} 60% var(--l)) }}\n"


def _list_table(film: Sequence[Picture], owners: Sequence[RequestId]) -> Iterator[str]:
    shows_state = any(picture.free for picture in film)
    blocks = sorted({block for picture in film for block in (*picture.holders, *picture.free)})
    yield '<div class="wide"><table><thead><tr><th>block</th>'
    for number, picture in enumerate(film, 1):
        yield f"<th{_mark_last(number, film)}>{number}<br>{escape(picture.action)}</th>"
    yield "</tr></thead><tbody>"
    for block in blocks[:BLOCKS_MAX]:
        cells = [
            _make_cell(picture, block, owners, shows_state, _mark_last(number, film))
            for number, picture in enumerate(film, 1)
        ]
        yield f"<tr><th>{block}</th>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if len(blocks) > BLOCKS_MAX:
        yield f"<p>and {len(blocks) - BLOCKS_MAX} blocks more</p>"
    legend = ", ".join(
        f'<span class="o{number}">&nbsp;{escape(name)}&nbsp;</span>'
        for number, name in enumerate(owners)
    )
    more = (
        "; free: in the free queue; &#9679;: published in the prefix cache; "
        "dashed: held by no request and not free, or both"
        if shows_state
        else ", as plans tell it"
    )
    yield f"<p>held by {legend or 'no request'}{more}; the last column is where it fails</p>"


def _mark_last(number: int, film: Sequence[Picture]) -> str:
    return ' class="last"' if number == len(film) else ""


def _make_cell(
    picture: Picture, block: BlockId, owners: Sequence[RequestId], shows_state: bool, last: str
) -> str:
    held, is_free = picture.holders.get(block, ()), block in picture.free
    classes = [f"o{owners.index(held[0])}"] if held else []
    classes += ["free"] if is_free else []
    classes += ["lost"] if shows_state and bool(held) == is_free else []
    classes += ["cached"] if block in picture.cached else []
    classes += ["last"] if last else []
    text = escape(" ".join(held)) or ("free" if is_free else "")
    return f'<td class="{" ".join(classes)}">{text}</td>'
