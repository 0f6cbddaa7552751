"""The core names no feature, and no strict rule names a release (architecture D5, D11)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec" / "blockstep" / "spec"
CORE = sorted((SPEC / "core").glob("*.py"))
STRICT = [*CORE, *sorted((SPEC / "features").rglob("*.py"))]
HOOKS = "hooks.py"
"""Says at which moments features take part, and so names what they do there."""
NUM_LINES_MAX = 2_900
FEATURE_LINES_MAX = {
    "encoder": 770, "groups": 700, "kv_transfer": 1_055, "structured_output": 560, "sessions": 420,
}  # fmt: skip
"""The most lines of a feature, in all of its modules; 350 for the others. May only fall."""

FEATURE_WORDS = frozenset(
    (
        *("adapter", "lora", "encoder", "item", "grammar", "mask", "reasoning", "session"),
        *("streaming", "resumable", "resting", "store", "connector", "transfer", "offer", "load"),
        *("external", "parked", "pin", "pinned", "job", "fork", "branch", "swap", "swapped"),
        *("tier", "saved", "offload", "mamba", "recurrent", "window", "salt", "embed"),
        *("watermark", "pressure", "zeroed", "cross", "repetition"),
    )
)
RELEASE_WORDS = frozenset(("quirk", "profile"))


def list_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the words of names, docstrings and comments of a module, each with its line.

    Sources of a rule, which name functions of upstream, and methods of maps are left out.
    """
    text = re.sub(r"\.items\(\)|`[^`]*`", "", text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            continue
        for offset, line in enumerate(token.string.split("\n")):
            for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", line):
                yield token.start[0] + offset, word.lower().removesuffix("s")


def find_words(text: str, words: frozenset[str]) -> list[str]:
    """Return where a module has one of these words: line and word."""
    return [f"{line}: {word}" for line, word in list_words(text) if word in words]


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.name)
def test_the_core_names_no_feature(file: Path) -> None:
    if file.name != HOOKS:
        assert find_words(file.read_text(), FEATURE_WORDS) == []


@pytest.mark.parametrize("file", STRICT, ids=lambda file: str(file.relative_to(SPEC)))
def test_no_strict_rule_names_a_release(file: Path) -> None:
    assert find_words(file.read_text(), RELEASE_WORDS) == []


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.name)
def test_the_core_reads_no_field_of_a_feature(file: Path) -> None:
    """A field of a config or a request belongs to the core, or to a feature that reads it."""
    fields = {"structured_output", "adapter", "cache_salt", "prompt_embeds", "job_id"}
    fields |= {"kv_connector", "enable_forks", "groups", "max_loras", "encoder_cache_size"}
    nodes = ast.walk(ast.parse(file.read_text()))
    assert not {node.attr for node in nodes if isinstance(node, ast.Attribute)} & fields


def test_words_are_found() -> None:
    text = (
        '"""A store is asked."""\n\n\ndef f(numLoads, my_pins):\n    return g().items()  # quirks\n'
    )
    assert find_words(text, FEATURE_WORDS) == ["1: store", "4: load", "4: pin"]
    assert find_words(text, RELEASE_WORDS) == ["5: quirk"]


def count_lines(files: list[Path]) -> int:
    """Return the number of lines of some modules."""
    return sum(len(file.read_text().splitlines()) for file in files)


def test_the_core_is_small() -> None:
    assert count_lines(CORE) <= NUM_LINES_MAX


def test_each_feature_is_within_its_limit() -> None:
    for path in (SPEC / "features").iterdir():
        files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
        assert count_lines(files) <= FEATURE_LINES_MAX.get(path.stem, 350), path.stem
