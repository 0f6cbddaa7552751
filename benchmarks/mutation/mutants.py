"""Mutants: which small changes are made to which modules, and which are left out, and why.

The changes are cosmic-ray's: its operators find the places in a syntax tree and make the change.
This module only decides which of them are relevant for scheduling and memory.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

Place: TypeAlias = tuple[int, int]
"""Line from 1, column from 0 in characters."""

WINGS = ("impl", "impl/compiled", "impl/host", "spec")
"""Packages that are mutated, with all modules in them."""

WHOLE_MODULES: Mapping[str, str] = {
    "impl/compiled/jit.py": "it hands functions to a compiler; mutants are played without one",
    "impl/fastest.py": "it picks an engine; it decides nothing",
    "impl/engine/": "the model side: `check` plays the scheduler",
    "impl/serving/": "what stands around an engine, and reads it: `check` plays the engine",
    "impl/tiers/announced.py": "what a store is told to wait for: `check` plays the scheduler",
    "impl/tiers/costs.py": "what a setting is computed from, before anything is played",
    "impl/tiers/files.py": "bytes on a disk: `check` plays the scheduler",
    "impl/tiers/store.py": "the bytes behind `order`: `check` plays the scheduler",
    "spec/invariants.py": "predicates that the tests ask of states; `check` does not run them",
    "spec/oracle.py": "a wrapper for everyday use; it decides nothing",
    "spec/profiles.py": "names of releases and of their deviations; it decides nothing",
    "spec/releases/": "what releases do otherwise: only `strict` is played",
    "spec/vocabulary/": "both sides share it: a change to it changes both",
}
"""Modules and packages left out as a whole, with the reason."""

RULES: Mapping[str, str] = {
    "docstring": "nobody reads it at run time",
    "annotation": "types, which nobody reads at run time",
    "wording": "f-strings, and what follows the code in `Rejected(...)`: wording is not compared",
    "assertion": "an `assert` checks, it does not decide; weakened, it lets pass what never comes",
    "compiler": "`@compiled`, `@entry` and `@making_arrays` hand a function to a compiler; mutants "
    "are played without one",
    "identity": "`is` and `is not` are exchanged with each other only: on None, enums and small "
    "numbers they say what `==` and `!=` say",
    "far arithmetic": "`+ - * // %` are replaced among themselves, and so are the signs of sets; a "
    "shift or a power in the place of a sum is the same test again, and each sign would have "
    "eleven of them",
}
"""Changes that are not made, with the reason."""

_FAMILIES = (
    frozenset({"Add", "Sub", "Mul", "FloorDiv", "Mod"}),
    frozenset({"BitOr", "BitAnd", "BitXor"}),
)
_COMPILERS = frozenset({"compiled", "entry", "making_arrays"})
_IDENTITY = frozenset({"Is", "IsNot"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: an operator, and the number of its place in the module."""

    module: str
    """The module as the page names it: `impl/host/pool.py`."""
    operator: str
    occurrence: int
    line: int
    function: str
    """Qualified name of the enclosing function or class; "" at module level."""


@dataclass(frozen=True, slots=True)
class Source:
    """A module that can be mutated."""

    module: str
    import_name: str
    file: Path

    @property
    def text(self) -> str:
        """The source."""
        return self.file.read_text(encoding="utf-8")


def find_sources(only: Sequence[str] = ()) -> list[Source]:
    """Return the modules to mutate, whose names begin with one of `only`.

    Raises:
        LookupError: no module has such a name.
    """
    found: list[Source] = []
    for house in ("impl", "spec"):
        spec = importlib.util.find_spec(f"blockstep.{house}")
        assert spec is not None, house
        assert spec.origin is not None, house
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            module = f"{house}/{file.relative_to(folder).as_posix()}"
            if file.name != "__init__.py" and not module.startswith(tuple(WHOLE_MODULES)):
                import_name = f"blockstep.{module.removesuffix('.py').replace('/', '.')}"
                found.append(Source(module, import_name, file))
    chosen = [one for one in found if not only or one.module.startswith(tuple(only))]
    if not chosen:
        names = ", ".join(one.module for one in found)
        raise LookupError(f"no module begins with {' or '.join(only)}; there are {names}")
    return chosen


def get_wing(module: str) -> str:
    """Return the innermost of the mutated packages that contains a module; "" if none does."""
    return max((wing for wing in WINGS if module.startswith(f"{wing}/")), key=len, default="")


def is_in(module: str, place: str) -> bool:
    """Whether `place` is this module or its package."""
    return place in (module, get_wing(module))


def find_mutants(source: Source) -> tuple[list[Mutant], Counter[str]]:
    """Return all mutants of a module, and the number left out by each of `RULES`."""
    text = source.text
    spans = list(find_excluded_spans(text))
    functions = find_functions(text)
    mutants: list[Mutant] = []
    excluded: Counter[str] = Counter()
    for operator, occurrence, place in find_places(text):
        rule = get_excluding_rule(operator, place, spans)
        if rule is not None:
            excluded[rule] += 1
            continue
        function = get_innermost(place, functions)
        mutants.append(Mutant(source.module, operator, occurrence, place[0], function))
    return mutants, excluded


def find_places(text: str) -> Iterator[tuple[str, int, Place]]:
    """Yield (operator, occurrence, place) of everything that cosmic-ray would change."""
    tools = import_cosmic_ray("ast")
    nodes = list(tools.ast_nodes(tools.get_ast(text)))
    for name, operator in get_operators().items():
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(places):
            yield name, occurrence, place


def import_cosmic_ray(module: str) -> Any:
    """Return a module of cosmic-ray, which is installed by `make mutation` only."""
    return importlib.import_module(f"cosmic_ray.{module}")


@cache
def get_operators() -> dict[str, Any]:
    """Return cosmic-ray's operators by name, without those that need arguments."""
    plugins = import_cosmic_ray("plugins")
    classes = {
        name.partition("/")[2]: plugins.get_operator(name) for name in plugins.operator_names()
    }
    return {name: made() for name, made in sorted(classes.items()) if not made.arguments()}


def make_mutated_text(text: str, operator: str, occurrence: int) -> str:
    """Return the source with one change."""
    mutating = import_cosmic_ray("mutating")
    mutated = mutating.mutate_code(text, get_operators()[operator], occurrence)
    assert isinstance(mutated, str), f"{operator} has no place {occurrence}"
    return mutated


def is_change(text: str, mutated: str) -> bool:
    """Whether `mutated` is a Python program that differs from `text`."""
    try:
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def mark_change(text: str, mutated: str) -> str:
    """Return the changed lines as one, with the change marked: `if count {== => <=} 0:`."""
    lines = list(difflib.ndiff(text.splitlines(), mutated.splitlines()))
    old, new = (
        _WORD.findall(" ".join(line[2:].strip() for line in lines if line.startswith(sign)))
        for sign in ("- ", "+ ")
    )
    first = _count_equal(old, new)
    last = _count_equal(old[first:][::-1], new[first:][::-1])
    before, rest = "".join(old[:first]), "".join(old[first:])
    was, now = ("".join(words[first : len(words) - last]) for words in (old, new))
    space = rest[: len(rest) - len(rest.lstrip())]
    change = f"{space}{{{was.strip()} => {now.strip()}}}"
    return before + change + rest[max(len(was), len(space)) :]


_WORD = re.compile(r"\s*(?:\w+|[=!<>]=|//|\S)")


def _count_equal(old: Sequence[str], new: Sequence[str]) -> int:
    """Return how many words are equal at the beginning of both."""
    pairs = zip(old, new, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].strip() == pair[1].strip(), pairs))


# Changes that are left out.


def get_excluding_rule(
    operator: str, place: Place, spans: Sequence[tuple[str, Place, Place]]
) -> str | None:
    """Return the name of the rule that leaves this change out, or None."""
    for rule, start, end in spans:
        if start <= place < end:
            return rule
    kind, _, signs = operator.partition("Operator_")
    pair = frozenset(signs.split("_"))
    if kind == "ReplaceComparison" and len(pair & _IDENTITY) == 1:
        return "identity"
    if kind == "ReplaceBinary" and not any(pair <= family for family in _FAMILIES):
        return "far arithmetic"
    return None


def find_excluded_spans(text: str) -> Iterator[tuple[str, Place, Place]]:
    """Yield (rule, from, to) of the ranges of source that are not mutated."""
    lines = text.splitlines()
    for rule, node in _find_excluded_nodes(ast.parse(text)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = _place(lines, node.lineno, node.col_offset)
        yield rule, start, _place(lines, node.end_lineno, node.end_col_offset)
    for number, line in enumerate(lines, 1):
        if line.startswith("@") and line[1:].partition("(")[0] in _COMPILERS:
            yield "compiler", (number, 0), (number + 1, 0)


def _find_excluded_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield "docstring", node
            case ast.arg(annotation=ast.expr() as annotation):
                yield "annotation", annotation
            case ast.FunctionDef(returns=ast.expr() as annotation):
                yield "annotation", annotation
            case ast.AnnAssign(annotation=annotation):
                yield "annotation", annotation
                if ast.unparse(annotation) == "TypeAlias" and node.value is not None:
                    yield "annotation", node.value
            case ast.JoinedStr():
                yield "wording", node
            case ast.Call(func=ast.Name(id="Rejected"), args=args, keywords=keywords):
                yield from (("wording", argument) for argument in args[1:])
                yield from (("wording", keyword.value) for keyword in keywords)
            case ast.Assert():
                yield "assertion", node


def _place(lines: Sequence[str], line: int, offset: int) -> Place:
    """Return a place with its column in characters, as cosmic-ray counts; syntax trees count
    bytes.
    """
    return line, len(lines[line - 1].encode()[:offset].decode())


# The place of a change.


def find_functions(text: str) -> list[tuple[str, Place, Place]]:
    """Return (qualified name, from, to) of every function and class, outer ones first."""
    found: list[tuple[str, Place, Place]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}" if prefix else child.name
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                assert child.end_lineno is not None
                found.append((name, (first, 0), (child.end_lineno + 1, 0)))
            visit(child, name)

    visit(ast.parse(text), "")
    return found


def get_innermost(place: Place, spans: Sequence[tuple[str, Place, Place]]) -> str:
    """Return the name of the last span that contains `place`; "" if none does."""
    return next((name for name, start, end in reversed(spans) if start <= place < end), "")
