"""The core names no feature, and no strict rule names a release (architecture D5, D11)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import FunctionType

import pytest

from blockstep.spec.core.rules import Rules
from blockstep.spec.features import FEATURES

SPEC = Path(__file__).resolve().parents[2] / "spec" / "blockstep" / "spec"
CORE = sorted((SPEC / "core").glob("*.py"))
STRICT = [*CORE, *sorted((SPEC / "features").rglob("*.py"))]
HOOKS = "hooks.py"
"""It lists the hooks of features, so it names what features do."""
NUM_LINES_MAX = 2_900
FEATURE_LINES_MAX = {
    "encoder": 550, "groups": 700, "kv_transfer": 700, "structured_output": 420, "sessions": 420,
}  # fmt: skip
"""The most lines of a feature, in all of its modules; 350 for the others. May only fall.

What is no part of a step is not counted: its invariants, if they are a module of their own, and the
functions of `Feature.events`, `shows` and `list_held`.
"""

FEATURE_WORDS = frozenset(
    (
        *("adapter", "lora", "encoder", "item", "grammar", "mask", "reasoning", "session"),
        *("streaming", "resumable", "resting", "store", "connector", "transfer", "offer", "load"),
        *("external", "parked", "pin", "pinned", "job", "fork", "branch", "swap", "swapped"),
        *("tier", "saved", "offload", "mamba", "recurrent", "window", "salt", "embed"),
        *("watermark", "pressure", "zeroed", "cross", "repetition", "cadence", "interval"),
    )
)
RELEASE_WORDS = frozenset(("quirk", "profile"))


def list_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the words in names, docstrings and comments of a module, with their lines.

    Sources of a rule, which name functions of upstream, and calls of `items()` are left out.
    """
    text = re.sub(r"\.items\(\)|`[^`]*`", "", text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            continue
        for offset, line in enumerate(token.string.split("\n")):
            for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", line):
                yield token.start[0] + offset, word.lower().removesuffix("s")


def find_words(text: str, words: frozenset[str]) -> list[str]:
    """Return line and word of each place where a module has one of these words."""
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


def test_words_of_features_and_releases_are_found() -> None:
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


def list_outside_of_steps() -> dict[str, set[str]]:
    """Return, by feature, its functions that are not called in a step."""
    found: dict[str, set[str]] = {}
    for feature in FEATURES:
        tables = (feature.events, feature.shows, feature.shows_of_request)
        functions = [one for table in tables for one in table.values()]
        for one in (*functions, feature.list_held):
            if isinstance(one, FunctionType):
                found.setdefault(one.__module__.split(".")[3], set()).add(one.__name__)
    return found


def count_feature_lines(path: Path, left_out: set[str]) -> int:
    """Return the lines of a feature without its invariants and the functions in `left_out`."""
    files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    num_lines = count_lines([file for file in files if file.name != "invariants.py"])
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in left_out:
                assert node.end_lineno is not None
                num_lines -= node.end_lineno - node.lineno + 1 + 2  # and the empty lines before
    return num_lines


def test_each_feature_is_within_its_limit() -> None:
    left_out = list_outside_of_steps()
    assert left_out["kv_transfer"] > {"process_kv_offer", "process_transfers_reported"}
    for path in (SPEC / "features").iterdir():
        num_lines = count_feature_lines(path, left_out.get(path.stem, set()))
        assert num_lines <= FEATURE_LINES_MAX.get(path.stem, 350), (path.stem, num_lines)


# Functions and fields that only a release needs.


def list_functions(files: list[Path]) -> dict[str, ast.FunctionDef]:
    """Return the functions of some modules by name."""
    return {
        node.name: node
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def list_replaced_by_features(files: list[Path]) -> set[str]:
    """Return the names of functions that a feature replaces."""
    return {
        ast.unparse(key).rpartition(".")[2]
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "instead"
        for key in getattr(node.value, "keys", ())
    }


def list_replaced_by_releases() -> set[str]:
    """Return the names of functions that a release replaces."""
    return {
        ast.unparse(node.args[0]).rpartition(".")[2]
        for file in sorted((SPEC / "releases").glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "replacing"
    }


def get_idleness(function: ast.FunctionDef) -> str:
    """Return why a function does no work of its own, or "".

    It does nothing, returns a constant or an argument as it is, or drops an argument.
    """
    *_, last = function.body
    others = [node for node in function.body if isinstance(node, ast.Delete)]
    names = [argument.arg for argument in function.args.args]
    body = [
        node
        for node in function.body
        if node not in others
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not isinstance(node, ast.Pass)
    ]
    if not body:
        return "does nothing"
    if len(body) == 1 and isinstance(last, ast.Return):
        found = [node for node in ast.walk(last) if isinstance(node, ast.Name | ast.Call)]
        if not found:
            return "returns a constant"
        if isinstance(last.value, ast.Name) and last.value.id in names:
            return "returns an argument"
    return "drops an argument" if others else ""


def test_rules_have_no_boolean() -> None:
    """A release replaces a function; strict code never asks for a release."""
    types = {field.name: str(field.type) for field in fields(Rules)}
    assert "hooks" in types
    assert not {name: kind for name, kind in types.items() if "bool" in kind}


def test_no_strict_function_exists_only_to_be_replaced_by_a_release() -> None:
    """A function that a feature replaces may be simple: it is the case without the feature."""
    functions = list_functions(STRICT)
    names = list_replaced_by_releases() - list_replaced_by_features(STRICT)
    assert len(names & functions.keys()) > 60, "the functions are found"
    idle = {name: get_idleness(functions[name]) for name in names & functions.keys()}
    assert {name: why for name, why in idle.items() if why} == {}


IDLE = (
    ("def f(step): ...", "does nothing"),
    ('def f(step):\n    """Do."""\n    del step', "does nothing"),
    ("def f(step):\n    return True", "returns a constant"),
    ("def f(step):\n    del step\n    return ((),)", "returns a constant"),
    ("def f(asked, joined):\n    del asked\n    return joined", "returns an argument"),
    ("def f(asked, joined):\n    del asked\n    return joined + 1", "drops an argument"),
    ("def f(step):\n    return step.rows", ""),
    ("def f(step):\n    step.rows.clear()\n    return None", ""),
)


@pytest.mark.parametrize(("text", "why"), IDLE)
def test_an_idle_function_is_found(text: str, why: str) -> None:
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    assert get_idleness(function) == why


def list_fields(files: list[Path]) -> dict[str, list[str]]:
    """Return the fields of the classes in some modules."""
    return {
        kind.name: [
            node.target.id
            for node in kind.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        for file in files
        for kind in ast.walk(ast.parse(file.read_text()))
        if isinstance(kind, ast.ClassDef)
    }


def list_positional(files: list[Path], fields: dict[str, list[str]]) -> set[str]:
    """Return the fields that some modules set by their position."""
    return {
        name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in fields
        for name in fields[ast.unparse(node.func)][: len(node.args)]
    }


def list_keywords(files: list[Path]) -> set[str]:
    """Return the names that calls in some modules give to their arguments."""
    return {
        str(node.arg)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.keyword)
    }


def test_no_field_of_a_strict_value_is_set_only_by_a_release() -> None:
    """A release keeps its own values in a `Part` or a `Note`."""
    fields = list_fields(STRICT)
    every = {name for names in fields.values() for name in names}
    assert {"num_computed_tokens", "size"} <= every, "the fields are found"
    only = list_keywords(sorted((SPEC / "releases").glob("*.py"))) - list_keywords(STRICT)
    only -= list_positional(STRICT, fields) | {"changes"}  # which names the quirks of rules
    assert only & every == set()


# Docstrings.


def find_upstream(text: str) -> list[str]:
    """Return the words in docstrings and comments that name upstream, except in sources."""
    text = re.sub(r"(?s)Source:\s.*?(?=\n\s*\n|\"\"\")|upstream\s+#\d+(,\s+#\d+)*", "", text)
    return re.findall(r"(?i)\bupstream\b|\bvLLM\b|\b0\.\d\d\.\d\b", text)


@pytest.mark.parametrize("file", STRICT, ids=lambda file: str(file.relative_to(SPEC)))
def test_no_strict_docstring_explains_a_release(file: Path) -> None:
    assert find_upstream(file.read_text()) == []


def test_docstrings_that_explain_upstream_are_found() -> None:
    assert find_upstream('"""Upstream asks. Source: vLLM 0.19.1\n    `f`; P6."""') == ["Upstream"]
    assert find_upstream('"""It waits (upstream #48245).\n\n    As in vLLM 0.33.0."""') == [
        "vLLM", "0.33.0",
    ]  # fmt: skip
