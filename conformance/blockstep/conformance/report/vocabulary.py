"""Vocabulary: the classes and constants of engines and programs, with their docstrings.

`blockstep explain vocabulary` prints all of them as a page, and `make docs` puts the page into the
documentation.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import iter_modules

from blockstep.conformance.protocol import findings
from blockstep.conformance.protocol.sources import cite
from blockstep.spec import vocabulary

_WORDS = "blockstep.spec.vocabulary."
_FIRST = [f"{_WORDS}{room}" for room in ("config", "request", "events", "observations", "snapshot")]
_ROOMS = tuple(
    dict.fromkeys(
        [
            *_FIRST,
            *[module.name for module in iter_modules(vocabulary.__path__, _WORDS)],
            "blockstep.conformance.engine",
            "blockstep.conformance.protocol.program",
        ]
    )
)
HEAD = """# Vocabulary

What goes into an engine, what comes out, what a state looks like, and what a program is made of.
`import` it as `from blockstep.spec import vocabulary`; the words of engines are in
`blockstep.conformance.engine`, those of programs in `blockstep.conformance.protocol.program`.
Property numbers are those of [properties](properties.md), sources are listed in
[sources](sources.md).

`blockstep explain vocabulary` prints this page; `blockstep explain CachedRow` prints a part.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """Field, member of an enumeration, or method of a class."""

    name: str
    type: str
    default: str
    text: str


@dataclass(frozen=True, slots=True)
class Word:
    """Class or constant of the vocabulary; a constant has no parts."""

    name: str
    room: str
    text: str
    parts: tuple[Part, ...] = ()


@cache
def get_finding_kinds() -> dict[str, str]:
    """Return the meaning of each kind of finding."""
    tree = ast.parse(inspect.getsource(findings))
    (kinds,) = (word for word in _read_words(tree.body, "") if word.name == "FindingKind")
    return {part.name: part.text for part in kinds.parts}


@cache
def get_words() -> dict[str, Word]:
    """Return all words by name, in the order of their modules."""
    found: dict[str, Word] = {}
    for room in _ROOMS:
        tree = ast.parse(inspect.getsource(importlib.import_module(room)))
        found |= {word.name: word for word in _read_words(tree.body, room)}
    return found


_HIDDEN = {
    *("ALL_CAPABILITIES", "BrokenRule", "EQUIVALENCES", "EVENT_TYPES", "Link", "NO_TRAITS", "WIDTH")
}
"""Names that are useful only to readers of the code."""


def _read_words(body: Sequence[ast.stmt], room: str) -> Iterator[Word]:
    for node, text in _pairs(body):
        match node:
            case ast.ClassDef(name=name) if name[0] != "_":
                doc = ast.get_docstring(node)
                yield Word(name, room, cite(doc or ""), tuple(_read_parts(node)))
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value and name[0] != "_":
                if name not in _HIDDEN:
                    yield Word(name, room, f"`{ast.unparse(value)}` {text}".strip())
            case ast.Assign(targets=[ast.Name(id=name)]) if text and name not in _HIDDEN:
                yield Word(name, room, text)


def _read_parts(owner: ast.ClassDef) -> Iterator[Part]:
    for node, text in _pairs(owner.body):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value):
                default = "" if value is None else ast.unparse(value)
                yield Part(name, ast.unparse(kind), default, text)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str() as value)):
                yield Part(value, "", name, text)  # of an enumeration
            case ast.FunctionDef(name=name) if name[0] != "_":
                doc = " ".join((ast.get_docstring(node) or "").split())
                is_property = any(ast.unparse(it) == "property" for it in node.decorator_list)
                shown = "" if node.returns is None else ast.unparse(node.returns)
                arguments = ", ".join(each.arg for each in node.args.args if each.arg != "self")
                yield Part(name if is_property else f"{name}({arguments})", shown, "", cite(doc))


def _pairs(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement with the docstring below it, in one line."""
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        match after:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield node, cite(" ".join(text.split()))
            case _:
                yield node, ""


# For people.


def explain_word(word: Word) -> str:
    """Return a word and its parts as plain text."""
    lines = [f"{word.name} ({word.room})", "", word.text, ""]
    for part in word.parts:
        kind = f": {part.type}" if part.type else ""
        default = f" = {part.default}" if part.default and part.type else ""
        lines += [f"  {part.name}{kind}{default}", *([f"      {part.text}"] if part.text else [])]
    return "\n".join(lines).rstrip() + "\n"


def make_page() -> str:
    """Return all words as a page of the documentation."""
    lines, room = [HEAD], ""
    for word in get_words().values():
        if word.room != room:
            room = word.room
            title = (inspect.getdoc(importlib.import_module(room)) or "").split("\n")[0]
            lines += [f"## {title.rstrip('.')}", "", f"Module `{room}`.", ""]
        lines += [f"### {word.name}", "", _escape(word.text), ""]
        if word.parts:
            is_enum = not any(part.type for part in word.parts)
            heads = ("value", "name") if is_enum else ("field", "type", "default")
            lines += [f"| {' | '.join((*heads, 'meaning'))} |", "|---" * (len(heads) + 1) + "|"]
            lines += [_row(part, is_enum) for part in word.parts]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(part: Part, is_enum: bool) -> str:
    cells = (part.name, part.default) if is_enum else (part.name, part.type, part.default)
    code = [f"`{cell}`".replace("|", "\\|") if cell else "" for cell in cells]
    return f"| {' | '.join((*code, _escape(part.text)))} |"


def _escape(text: str) -> str:
    """Return the text escaped for Markdown, outside of code and of indented examples."""
    return text.replace("|", "\\|").replace("<", "\\<")
