"""Sources: the documents that the specification follows, named in all texts that users see.

Docstrings cite them by number (`seed 001`); users do not have them, and know them by the names of
docs/reference/sources.md.
"""

from __future__ import annotations

import re
from typing import Any

SOURCES = {
    "000": "the essay on vLLM V1",
    "001": "the walk-through of vLLM V1",
    "002": "the block manager with forks and tiers",
    "003": "prefix caching by example",
    "004": "the older walk-through of vLLM V1",
}
"""Documents that the specification follows, by the number in docstrings."""


def cite(text: str) -> str:
    """Return the text with the specification's sources named, not numbered."""

    def name(found: re.Match[str]) -> str:
        return SOURCES[found["number"]]

    return re.sub(r"seed\s+(?P<number>00[0-4])", name, text)


def cite_all(tree: Any) -> Any:
    """Return a JSON value with the sources named in all its texts."""
    match tree:
        case str():
            return cite(tree)
        case dict():
            return {key: cite_all(value) for key, value in tree.items()}
        case list():
            return [cite_all(value) for value in tree]
        case _:
            return tree
