"""The lint of the English finds what it forbids, and counts by package."""

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


def test_a_page_is_read_in_paragraphs_without_its_code() -> None:
    page = "# A\n\nOne.\n\n```\nnobody\n```\n\nTwo lines\nof nobody.\n"
    texts = list(LINT.read_page(page, "docs/a.md"))
    assert [(text.line, text.text) for text in texts][-1] == (9, "Two lines\nof nobody.\n")
    (hit,) = LINT.find_hits(texts)
    assert (hit.path, hit.line, hit.rule) == ("docs/a.md", 10, "nobody")


def test_hits_are_counted_by_package() -> None:
    assert LINT.get_package("spec/blockstep/spec/step/plans.py") == "spec/step"
    assert LINT.get_package("docs/how-to/a.md") == "docs/how-to"
    assert LINT.get_package("README.md") == "README.md"


def test_more_hits_than_allowed_fail_and_fewer_lower_the_allowance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = tmp_path / "words.toml"
    page = tmp_path / "docs" / "a.md"
    page.parent.mkdir()
    page.write_text("Nobody knows, and nobody asks.\n")
    monkeypatch.setattr(LINT, "ROOT", tmp_path)
    monkeypatch.setattr(LINT, "ALLOWED", allowed)
    monkeypatch.setattr(sys, "argv", ["words.py"])
    allowed.write_text("docs = 1\n")
    assert LINT.main() == 1
    assert "docs: 2 hits, 1 allowed" in capsys.readouterr().out
    allowed.write_text("docs = 2\nspec = 4\n")
    assert LINT.main() == 0
    page.write_text("Nobody knows.\n")
    monkeypatch.setattr(sys, "argv", ["words.py", "--update"])
    assert LINT.main() == 0
    assert allowed.read_text() == '"docs" = 1\n'
