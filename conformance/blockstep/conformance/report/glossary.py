"""Glossary: the terms of the project, read from the page `glossary.md` in this folder.

The page is part of the package, so that `blockstep explain` has it without a checkout; the
documentation includes the same file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

_CELL = re.compile(r"(?<!\\)\|")
_PHRASE = re.compile(r'"([^"]+)"')


@dataclass(frozen=True, slots=True)
class Term:
    """A row of the glossary."""

    title: str
    """First cell, without marks: `preemption, victim`."""
    meaning: str
    replaces: tuple[str, ...]
    """Phrases that are not to be used for the same thing; `*` means letters or a word."""
    vllm: str
    """Name in vLLM's source; "" if vLLM has none."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the terms that this row explains."""
        return tuple(re.split(r"[,;] ", re.sub(r" \(.*\)", "", self.title)))

    def explain(self) -> str:
        """Return the row as lines of text."""
        lines = [f"term {self.title}", "", self.meaning, ""]
        if self.vllm:
            lines.append(f"  in vLLM: {self.vllm}")
        if self.replaces:
            lines.append(f"  say it instead of: {', '.join(self.replaces)}")
        return "\n".join(lines).rstrip() + "\n"


@cache
def read_page() -> str:
    """Return the glossary as Markdown."""
    return resources.files(__package__).joinpath("glossary.md").read_text(encoding="utf-8")


@cache
def get_terms() -> tuple[Term, ...]:
    """Return the rows of the glossary, in the order of the page."""
    return tuple(parse_terms(read_page()))


def parse_terms(page: str) -> Iterator[Term]:
    """Yield the rows of a glossary's tables: `| **term** | meaning | phrases | vLLM |`.

    Raises ValueError for a row that has not four cells.
    """
    for line in page.splitlines():
        if not line.startswith("| **"):
            continue
        cells = [cell.strip() for cell in _CELL.split(line)[1:-1]]
        if len(cells) != 4:
            raise ValueError(f"a row of the glossary has four cells, this one {len(cells)}: {line}")
        title, meaning, phrases, vllm = cells
        yield Term(
            title.replace("*", ""),
            meaning.replace("\\|", "|"),
            tuple(_PHRASE.findall(phrases)),
            "" if vllm == "-" else vllm.replace("`", ""),
        )
