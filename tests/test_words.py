"""The lint of the English: each rule finds a text that breaks it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HOUSE = Path(__file__).resolve().parents[1]


def load_lint() -> ModuleType:
    """Import `.ci/words.py`, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("words_lint", HOUSE / ".ci" / "words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LINT = load_lint()


def find_rules(text: str) -> list[str]:
    return [hit.rule for hit in LINT.find_hits(LINT.read_python(text, "spec/blockstep/spec/a.py"))]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('"""Whoever waits is told."""', ["who", "is told", "inverted"]),
        ('"""The blocks of them."""', ["of it"]),
        ('"""Of some rows."""', ["inverted"]),
        ('"""For each row, the blocks that it holds."""', []),
        ('"""The request that was passed over."""', ["passed over: say skipped request"]),
        ('"""The user who asks."""', []),
        ('"""`nobody` is a name."""', []),
        ('"""Nobody, in words that are right. words: allow"""', []),
        ("x = 'nobody has one here'", ["nobody"]),
        ("x = f'nobody has {x} blocks'", ["nobody"]),
        ("x = 'nobody'", []),
        ('class A:\n    x: int\n    """Taken in at once."""', ["admission"]),
    ],
)
def test_a_text_that_breaks_a_rule_is_found(text: str, rules: list[str]) -> None:
    found = find_rules(text)
    assert len(found) == len(rules)
    assert all(rule in name for rule, name in zip(rules, found, strict=True))


def test_an_unclear_name_is_found() -> None:
    text = (
        "class RowTold:\n    def tell(self, who):\n        self.whole = said = retold = who\n"
        "        return [saying for nobody_x in ()]\n"
    )
    texts = LINT.read_names(text, "spec/blockstep/spec/a.py")
    found = [hit.excerpt for hit in LINT.find_hits(texts)]
    assert sorted(found) == ["Row_Told", "nobody_x", "said", "tell", "who"]


def test_a_page_is_read_in_paragraphs_without_its_code() -> None:
    page = "# A\n\nOne.\n\n```\nnobody\n```\n\nTwo lines\nof nobody.\n"
    texts = list(LINT.read_page(page, "docs/a.md"))
    assert [(text.line, text.text) for text in texts][-1] == (9, "Two lines\nof nobody.\n")
    (hit,) = LINT.find_hits(texts)
    assert (hit.path, hit.line, hit.rule) == ("docs/a.md", 10, "nobody")


def test_a_hit_fails_and_is_printed_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "a.md"
    page.parent.mkdir()
    page.write_text("Nobody knows.\n")
    monkeypatch.setattr(LINT, "ROOT", tmp_path)
    for path, code in (("", 1), ("docs", 1), ("spec", 0)):
        monkeypatch.setattr(sys, "argv", ["words.py", path])
        assert LINT.main() == code
        assert capsys.readouterr().out.startswith("docs/a.md:1: [nobody]" if code else "")
    page.write_text("It is known.\n")
    monkeypatch.setattr(sys, "argv", ["words.py"])
    assert LINT.main() == 0
