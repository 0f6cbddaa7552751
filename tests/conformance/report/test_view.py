"""`--view`: the page of a finding shows its blocks, and no text of an engine runs in it."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from episodes_support import find_failing
from typer.testing import CliRunner, Result

from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.program import Answer, Program
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.report.view import BLOCKS_MAX, make_page
from blockstep.conformance.search.engine_wrappers import hide_state
from blockstep.conformance.search.film import Picture, make_film
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

HOSTILE = "</td></pre><script>alert(1)</script><img src=x onerror=alert(1)>&\"'"
PROGRAM = Program(
    v.Config(num_blocks=5, block_size=1),
    (
        v.Submit(v.Request("A", (1, 2), 2)),
        v.Schedule(),
        Answer(),
        v.Submit(v.Request("B", (1, 2), 1)),
        v.Schedule(),
        v.Abort(("A",)),
    ),
)


class Raising(SpecEngine):
    """It cannot abort."""

    def apply(self, event: v.Event) -> v.Observation:
        if isinstance(event, v.Abort):
            raise KeyError("A")
        return super().apply(event)


class Page(HTMLParser):
    """The tags of a page with their attributes, and the cells of its table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[tuple[str, str]]] = []
        """The class and the text of each cell, by row."""
        self.is_in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        self.is_in_cell = tag in {"td", "th"} or (tag == "br" and self.is_in_cell)
        if tag in {"td", "th"}:
            self.rows[-1].append((dict(attrs).get("class") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        self.is_in_cell = self.is_in_cell and tag not in {"td", "th"}

    def handle_data(self, data: str) -> None:
        if self.is_in_cell:
            kind, text = self.rows[-1][-1]
            self.rows[-1][-1] = (kind, text + data)


def blockstep(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})


def test_holders_of_blocks_are_read_from_snapshots_or_plans() -> None:
    seen = make_film(CheckOptions(), SpecEngine, PROGRAM)
    assert [picture.action.split()[0] for picture in seen] == [
        *("submit", "schedule", "commit", "submit", "schedule", "abort")
    ]
    assert seen[1].holders == {1: ("A",), 2: ("A",)}
    assert seen[4].holders[1] == ("A", "B"), "the hit is shared"
    assert set(seen[5].holders) & seen[5].free == set()
    assert seen[4].cached
    by_plans = make_film(CheckOptions(), hide_state(SpecEngine), PROGRAM)
    assert [it.holders for it in by_plans[:5]] == [it.holders for it in seen[:5]]
    assert by_plans[5].holders == by_plans[4].holders, "the next plan names the aborted request"
    assert not any(picture.free for picture in by_plans)


def test_a_page_has_a_row_for_each_block_and_a_column_for_each_action() -> None:
    film = make_film(CheckOptions(), SpecEngine, PROGRAM)
    page = Page(make_page("blockstep check: VIOLATION\n  more", film))
    head, *rows = page.rows
    assert len(head) == 1 + len(PROGRAM.actions)
    assert [row[0][1] for row in rows] == ["1", "2", "3", "4"]
    assert rows[0][5] == ("o0 cached", "A B")
    assert all(row[-1][0].endswith("last") for row in rows)
    assert not any("lost" in kind for row in rows for kind, _ in row)


def test_a_block_that_is_neither_held_nor_free_is_marked() -> None:
    film = [Picture("abort A", {1: ("A",)}, frozenset({1, 3})), Picture("x", {}, frozenset({3}))]
    rows = Page(make_page("", film)).rows[1:]
    assert [row[0][1] for row in rows] == ["1", "3"]
    assert rows[0][1][0] == "o0 free lost"
    assert rows[0][2][0] == "lost last"
    assert rows[1][2][0] == "free last"


def test_text_of_an_engine_is_escaped_in_the_page() -> None:
    page, plain = (
        Page(make_page(f"VIOLATION of {name}\n{name}", [Picture(name, {1: (name, "B")})]))
        for name in (HOSTILE, "A")
    )
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "link", "iframe", "a"})
    names = {name for _, attributes in page.tags for name in attributes}
    assert not any(name.startswith("on") or name in {"href", "src", "style"} for name in names)
    assert page.rows[1][1][1] == f"{HOSTILE} B"
    assert ("meta", "default-src 'none'; style-src 'unsafe-inline'") in [
        (tag, attributes.get("content")) for tag, attributes in page.tags
    ]


def test_a_large_pool_is_cut() -> None:
    film = [Picture("x", dict.fromkeys(range(1, BLOCKS_MAX + 6), ("A",)))]
    text = make_page("", film)
    assert len(Page(text).rows) == 1 + BLOCKS_MAX
    assert "and 5 blocks more" in text


def test_a_check_writes_the_page_of_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "finding.html"
    drawn = ("--preset", "tiny", "--episode", find_failing(), "--view")
    result = blockstep("check", "--engine", "museum:leak-on-abort", *drawn, path)
    assert result.exit_code == 1
    page = Page(path.read_text())
    assert "VIOLATION at event 3" in path.read_text()
    assert "lost" in page.rows[1][-1][0], "the block that leaks"
    sound = blockstep("check", "--engine", "spec", *drawn, tmp_path / "none.html")
    assert (sound.exit_code, "nothing to write: nothing failed" in sound.stderr) == (0, True)
    assert not (tmp_path / "none.html").exists()


def test_the_page_of_a_fault_ends_at_the_fault() -> None:
    program = replace(PROGRAM, actions=(*PROGRAM.actions, v.Schedule()))
    film = make_film(CheckOptions(), Raising, program)
    assert len(film) == len(PROGRAM.actions), "it ends at the finding"
