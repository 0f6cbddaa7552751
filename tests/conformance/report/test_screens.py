"""Pages of the documentation and of a finding fit the screen, and run no script, in chromium.

Every page is checked; pictures of four of them are left in docs/_build/screens to be looked at.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockstep.conformance.report.view import make_page
from blockstep.conformance.search.film import Picture

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt install chromium")

DOCS = Path(__file__).resolve().parents[3] / "docs"
SCREENS = DOCS / "_build" / "screens"
SIZES = ((1280, 900), (390, 844))
HOSTILE = "</td></pre><script>alert(1)</script><img src=x onerror=alert(1)>&\"'"
FILM = [
    Picture("submit A prompt=1,2 max_tokens=2", {}, frozenset({1, 2, 3})),
    Picture("schedule", {1: ("A",), 2: ("A",)}, frozenset({3}), frozenset({1})),
    Picture(f"submit {HOSTILE}", {1: ("A", HOSTILE), 2: ("A",)}, frozenset({3}), frozenset({1})),
    Picture("abort A", {1: (HOSTILE,)}, frozenset({3}), frozenset({1})),
]
PICTURES = {"index", "how-to/read-a-finding", "reference/commands"}
GENERATED = {"genindex", "py-modindex", "search"}
"""Pages of Sphinx's own."""

HIDDEN_AT_THE_RIGHT = """() => [...document.querySelectorAll('article *')].filter(element => {
  const box = element.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1) return false;
  for (let outer = element.parentElement; outer && outer.tagName != 'ARTICLE'; ) {
    if (['auto', 'scroll'].includes(getComputedStyle(outer).overflowX)) return false;
    outer = outer.parentElement;
  }
  return true;
}).map(element => element.tagName + ' ' + element.textContent.slice(0, 50))"""
"""The elements beyond the right edge of the screen that no box around them scrolls to."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # A container's root may not have the sandbox; only pages of this test are opened.
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def html() -> Path:
    """The documentation, built from its current sources."""
    built = DOCS / "_build" / "html"
    trees = DOCS / "_build" / "doctrees"
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", trees, DOCS, built]
    subprocess.run([str(it) for it in sphinx], check=True)
    return built


def draw(browser: Any, page_file: Path, name: str | None = None) -> list[str]:
    """Open a page at both sizes, light and dark; return what is wrong with it."""
    wrong: list[str] = []

    def dismiss(dialog: Any) -> None:
        wrong.append("a script ran")
        dialog.dismiss()

    for width, height in SIZES:
        for scheme in ("light", "dark") if name else ("light",):
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.on("dialog", dismiss)
            page.goto(page_file.as_uri())
            is_wider = "document.scrollingElement.scrollWidth > innerWidth"
            if page.evaluate(is_wider):
                wrong.append(f"{page_file.name} is wider than {width} px")
            wrong += (f"{width} px hide {it}" for it in page.evaluate(HIDDEN_AT_THE_RIGHT))
            if name is not None:
                SCREENS.mkdir(parents=True, exist_ok=True)
                page.screenshot(path=SCREENS / f"{name.replace('/', '-')}-{width}-{scheme}.png")
            page.close()
    return wrong


def test_a_timeline_fits_its_screen_and_runs_no_script(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "finding.html"
    path.write_text(make_page(f"blockstep check: VIOLATION of {HOSTILE}\n{HOSTILE}", FILM))
    assert draw(browser, path, "timeline") == []


def test_a_script_that_runs_and_a_wide_page_are_noticed(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(f"<article><pre><b>{'x' * 400}</b></pre></article><script>alert(1)</script>")
    wrong = draw(browser, path)
    assert wrong.count("a script ran") == 2
    assert "bad.html is wider than 390 px" in wrong
    assert any(it.startswith("390 px hide B xxx") for it in wrong)


@pytest.mark.soak
def test_no_page_hides_its_text(browser: Any, html: Path) -> None:
    wrong = {}
    names = (str(path.relative_to(html).with_suffix("")) for path in html.rglob("*.html"))
    for name in sorted(set(names) - GENERATED):
        path = html / f"{name}.html"
        if found := draw(browser, path, name if name in PICTURES else None):
            wrong[name] = found
    assert wrong == {}
