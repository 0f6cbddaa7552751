"""The specification is pure (architecture D2), and every rule names its source.

This is a lint of our own, since general linters do not know that a set has no order to rely on. It
reads syntax trees only; `IMPURE` and `PURE` below test it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

SPEC = Path(__file__).resolve().parents[2] / "spec" / "blockstep" / "spec"
FILES = sorted(SPEC.rglob("*.py"))
VOCABULARY = SPEC / "vocabulary"
RELEASES = SPEC / "releases"
KEYS = VOCABULARY / "keys.py"
INVARIANTS = SPEC / "invariants.py"
"""Asks the same of every request, so it may go through a map in any order."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOWED_IMPORTS = words(
    "__future__ abc bisect collections collections.abc dataclasses enum functools heapq itertools "
    "math operator types typing"
)
MEMOS = words("cache cached_property lru_cache")
SIDE_EFFECTS = words(
    "__import__ breakpoint compile delattr eval exec exit globals input locals open print quit "
    "setattr vars"
)
MUTABLE_CALLS = words(
    "bytearray Counter count cycle defaultdict deque dict iter list OrderedDict set"
)
MUTATORS = words(
    "add append appendleft clear discard extend insert pop popitem popleft remove setdefault sort "
    "update"
)
SETS = r"(?:\w+\.)*(?:set|frozenset|Set|FrozenSet|AbstractSet|MutableSet)(?:\W|$)"
SETS_AND_MAPS = rf"{SETS}|FrozenMap(?:\W|$)"
"""Annotations of what has no order that a rule may follow: of a FrozenMap equality ignores it."""
STILL_UNORDERED = words(
    "copy difference intersection items keys symmetric_difference to_dict union values"
)
ORDER_FREE = words("all any frozenset len max min set sorted sum")
ORDER_BOUND = words(
    "accumulate chain combinations deque enumerate extend filter fromkeys from_iterable islice "
    "iter join list map next OrderedDict permutations product reduce reversed starmap tuple zip"
)
CATCH_ALLS = words("AssertionError BaseException Exception")
SOURCE = re.compile(r"seed 00\d|upstream #\d+|\bP\d+\b|\bproperties\b|vLLM|architecture D\d")

Scope: TypeAlias = ast.Module | ast.FunctionDef


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name, or "" for any other expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=func):
            return name_of(func)
        case _:
            return ""


def is_annotated(annotation: ast.expr | None, unordered: str) -> bool:
    if annotation is None:
        return False
    return re.match(unordered, ast.unparse(annotation).strip("'\"")) is not None


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of one scope, with nested blocks, without other scopes."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for block in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, block, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from statements(handler.body)


@cache
def get_fields(source: str, unordered: str) -> tuple[set[str], set[str]]:
    """Names of fields and functions that a module declares: the unordered ones, the others.

    It is remembered, since each module of the specification is asked for the others' fields.
    """
    declared: list[tuple[str, ast.expr | None]] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(body=body):
                fields = [field for field in body if isinstance(field, ast.AnnAssign)]
                declared += [(name_of(field.target), field.annotation) for field in fields]
            case ast.FunctionDef(name=name, returns=returns):
                declared.append((name, returns))
    without_order = {name for name, annotation in declared if is_annotated(annotation, unordered)}
    return without_order, {name for name, _ in declared} - without_order


MAY_SET = frozenset({"__init__", "__new__", "_share"})
"""Functions that may fill in a frozen object. `BlockKey._share` changes no value: it lets equal
chains be one chain."""


class Purity(ast.NodeVisitor):
    """Collects what is impure in one module, as "line: reason"."""

    def __init__(self, file: Path, unordered: str, unordered_fields: set[str]) -> None:
        self.file = file
        self.unordered = unordered
        self.unordered_fields = unordered_fields
        self.flaws: list[str] = []
        self.functions: list[str] = []
        self.unordered_names: list[set[str]] = []
        self.order_free: set[ast.expr] = set()

    def flaw(self, node: ast.AST, reason: str) -> None:
        self.flaws.append(f"{getattr(node, 'lineno', 1)}: {reason}")

    # Values without an order, and code that depends on their order

    def is_unordered(self, node: ast.expr) -> bool:
        match node:
            case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
                return True
            case ast.Call(func=ast.Attribute(value=owner, attr=method)) if (
                method in STILL_UNORDERED
            ):
                return self.is_unordered(owner)
            case ast.Call(func=func):
                return name_of(func) in self.unordered_fields
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() | ast.BitXor() | ast.Sub()):
                keys = isinstance(left, ast.Call) and name_of(left) in {"items", "keys"}
                return keys or self.is_unordered(left) or self.is_unordered(node.right)
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_unordered(body) or self.is_unordered(orelse)
            case ast.NamedExpr(value=value):
                return self.is_unordered(value)
            case ast.Name(id=name):
                return any(name in names for names in self.unordered_names)
            case ast.Attribute(attr=attribute):
                return attribute in self.unordered_fields
            case _:
                return False

    def enter(self, scope: Scope) -> None:
        """Learn which names of `scope` are sets; twice, as one may be made from another."""
        names: set[str] = set()
        self.unordered_names.append(names)
        if isinstance(scope, ast.FunctionDef):
            every = (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)
            names |= {arg.arg for arg in every if is_annotated(arg.annotation, self.unordered)}
        for statement in [*statements(scope.body)] * 2:
            match statement:
                case ast.Assign(targets=targets, value=value) if self.is_unordered(value):
                    names |= {name_of(target) for target in targets}
                case ast.AnnAssign(target=target) if is_annotated(
                    statement.annotation, self.unordered
                ):
                    names.add(name_of(target))

    def follows_order(self, node: ast.expr, of: ast.expr) -> None:
        if self.is_unordered(of):
            self.flaw(node, "depends on the order of a set or map; say sorted(...)")

    def visit_For(self, node: ast.For) -> None:
        self.follows_order(node.iter, of=node.iter)
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        self.follows_order(node, of=node.value)
        self.generic_visit(node)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self.follows_order(node, of=node.value)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets):
            self.follows_order(node.value, of=node.value)
        self.generic_visit(node)

    def check_comprehension(self, node: ast.ListComp | ast.DictComp | ast.GeneratorExp) -> None:
        if node not in self.order_free:
            for generator in node.generators:
                self.follows_order(generator.iter, of=generator.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self.check_comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self.check_comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self.check_comprehension(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = name_of(node.func)
        keyed = any(keyword.arg == "key" for keyword in node.keywords)
        if name in ORDER_FREE and not keyed:
            self.order_free.update(node.args)
        elif name in ORDER_BOUND or name in ORDER_FREE:
            for argument in node.args:
                self.follows_order(node, of=argument)
        if name == "popitem":
            self.flaw(node, "popitem() takes whatever comes last")
        if isinstance(node.func, ast.Attribute) and name == "pop" and not node.args:
            self.follows_order(node, of=node.func.value)
        self.generic_visit(node)

    # Imports, names, numbers.

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.check_import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.check_import(node, "." * node.level + (node.module or ""))
        for alias in node.names:
            if node.module == "functools" and alias.name in MEMOS:
                self.flaw(node, f"{alias.name} keeps state between calls")

    def check_import(self, node: ast.stmt, module: str) -> None:
        ours = module == "blockstep.spec" or module.startswith("blockstep.spec.")
        if not ours and module not in ALLOWED_IMPORTS:
            self.flaw(node, f"import of {module}: not on the spec's list")

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        if node.id in SIDE_EFFECTS:
            self.flaw(node, f"{node.id}() acts on the world, or on names")
        elif node.id == "id":
            self.flaw(node, "id() is an address")
        elif node.id == "hash" and self.file != KEYS and "__hash__" not in self.functions:
            self.flaw(node, "hash() differs between runs; only __hash__ may use it")
        elif node.id == "float":
            self.flaw(node, "a decision is made with integers")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in MEMOS and name_of(node.value) == "functools":
            self.flaw(node, f"{node.attr} keeps state between calls")
        elif node.attr == "__dict__":
            self.flaw(node, "__dict__ goes behind a frozen dataclass")
        elif node.attr == "__setattr__" and not {*self.functions} & MAY_SET:
            self.flaw(node, "__setattr__ goes behind a frozen dataclass")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, float):
            self.flaw(node, "a decision is made with integers")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.check_division(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.check_division(node)

    def check_division(self, node: ast.BinOp | ast.AugAssign) -> None:
        if isinstance(node.op, ast.Div):
            self.flaw(node, "a decision is made with integers")
        self.generic_visit(node)

    # State and control.

    def visit_Module(self, node: ast.Module) -> None:
        self.enter(node)
        self.check_globals(node.body)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.check_globals(node.body)
        self.generic_visit(node)

    def check_globals(self, body: list[ast.stmt]) -> None:
        for statement in statements(body):
            match statement:
                case ast.Assign(targets=targets, value=value):
                    constant = all(name_of(target) == "__all__" for target in targets)
                case ast.AnnAssign(annotation=annotation, value=ast.expr() as value):
                    constant = "Mapping[" in ast.unparse(annotation)
                case _:
                    continue
            literal = isinstance(
                value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
            )
            call = isinstance(value, ast.Call) and name_of(value) in MUTABLE_CALLS
            if (literal or call) and not constant:
                self.flaw(
                    statement, "mutable state outside a function; a tuple or a Mapping will do"
                )

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node.name)
        self.enter(node)
        self.generic_visit(node)
        self.unordered_names.pop()
        self.functions.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.flaw(node, "nothing here waits")

    def visit_Global(self, node: ast.Global) -> None:
        self.flaw(node, "state outside a function")

    def visit_Assert(self, node: ast.Assert) -> None:
        for inner in ast.walk(node.test):
            match inner:
                case ast.NamedExpr() | ast.Call(func=ast.Name(id="next")):
                    changes = True
                case ast.Call(func=ast.Attribute(attr=method)):
                    changes = method in MUTATORS
                case _:
                    changes = False
            if changes:
                self.flaw(node, "an assert changes something; python -O would change the answer")
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(kind is None or name_of(kind) in CATCH_ALLS for kind in caught):
            self.flaw(node, "would hide a failed assertion: there is no third outcome")
        self.generic_visit(node)


def impurities(source: str, file: Path = SPEC / "snippet.py", *others: str) -> list[str]:
    """Return the impure expressions in `source`.

    `others` are modules whose declared sets and maps `source` may use.
    """
    unordered = SETS if file == INVARIANTS else SETS_AND_MAPS
    fields: set[str] = set()
    for other in others:
        fields |= get_fields(other, unordered)[0]
    without_order, with_order = get_fields(source, unordered)
    purity = Purity(file, unordered, (fields - with_order) | without_order)
    purity.visit(ast.parse(source))
    return purity.flaws


def unsourced(source: str) -> list[str]:
    """Return the public functions of `source` whose docstring names no source."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and not node.name.startswith("_")
        and not SOURCE.search(" ".join((ast.get_docstring(node) or "").split()))
    ]


def short(file: Path) -> str:
    return file.relative_to(SPEC).as_posix()


PLUMBING = {
    "copies.py": (
        "__dict__ goes behind a frozen dataclass",
        "__dict__ goes behind a frozen dataclass",
        "exec() acts on the world, or on names",
    ),
    "features/__init__.py": ("cache keeps state between calls",),
    "vocabulary/config.py": ("cache keeps state between calls",),
}
"""Impure code that decides nothing, by file.

It makes constructors and copies for the fields of a class, as `dataclasses` does
(`tests/spec/test_copies.py` compares both), and caches the KV group of a config and the rules with
some features, which are functions of an int and of names.
"""


@pytest.mark.parametrize("file", FILES, ids=short)
def test_spec_is_pure(file: Path) -> None:
    others = [other.read_text() for other in FILES]
    flaws = [flaw.split(": ", 1)[1] for flaw in impurities(file.read_text(), file, *others)]
    assert tuple(flaws) == PLUMBING.get(short(file), ())


RULES = [file for file in FILES if not {VOCABULARY, RELEASES} & {*file.parents}]
"""The vocabulary has sources where it is used, and quirks have theirs in their stories."""


@pytest.mark.parametrize("file", RULES, ids=short)
def test_every_rule_names_its_source(file: Path) -> None:
    assert unsourced(file.read_text()) == []


def test_the_checked_files_include_the_keys() -> None:
    assert KEYS in FILES
    assert any(file.name == "block_pool.py" for file in RULES)


IMPURE = {
    "clock": "import time\nnow = time.time()",
    "clock_by_name": "from time import monotonic",
    "date": "from datetime import datetime\ndef f():\n    return datetime.now()",
    "random": "import random",
    "secrets": "import secrets",
    "uuid": "from uuid import uuid4",
    "os": "import os\nflag = os.environ",
    "sys": "import sys",
    "path": "from pathlib import Path",
    "thread": "import threading",
    "socket": "import socket",
    "third_party": "import numpy as np",
    "other_wing": "from blockstep.conformance.engine import Engine",
    "namesake": "import blockstep.specification",
    "relative": "from .vocabulary import Config",
    "import_in_function": "def f():\n    import random\n    return random",
    "open": "def f():\n    return open('x')",
    "print": "def f():\n    print('x')",
    "input": "def f():\n    return input()",
    "eval": "def f():\n    return eval('1')",
    "id": "def f(x):\n    return id(x)",
    "id_as_key": "def f(xs):\n    return sorted(xs, key=id)",
    "hash": "def f(x):\n    return hash(x)",
    "for_over_literal": "def f():\n    for x in {1, 2}:\n        pass",
    "for_over_call": "def f(xs):\n    for x in set(xs):\n        pass",
    "for_over_name": "def f(xs):\n    s = frozenset(xs)\n    for x in s:\n        pass",
    "for_over_argument": "def f(s: set[int]):\n    for x in s:\n        pass",
    "for_over_field": "class C:\n    s: frozenset[int]\ndef f(c):\n    for x in c.s:\n        pass",
    "for_over_result": "def g() -> set[int]: ...\ndef f():\n    for x in g():\n        pass",
    "for_over_union": "def f(a, b):\n    for x in set(a) | b:\n        pass",
    "for_over_common_keys": "def f(a, b):\n    for x in a.keys() & b:\n        pass",
    "for_over_made_from": "def f(a):\n    t = set(a)\n    for x in t - {1}:\n        pass",
    "for_over_name_from_name": "def f(a):\n    s = set(a)\n    t = s\n    return [x for x in t]",
    "for_over_map": "class C:\n    m: FrozenMap[int, int]\ndef f(c):\n    return [*c.m]",
    "for_over_map_items": "def f(m: FrozenMap[int, int]):\n    return list(m.items())",
    "for_over_map_copy": "def f(m: FrozenMap[int, int]):\n    d = m.to_dict()\n    return [*d]",
    "set_to_list": "def f(xs):\n    return list({x for x in xs})",
    "set_to_tuple": "def f(xs):\n    return tuple(x for x in set(xs))",
    "set_to_dict": "def f(xs):\n    return {x: 1 for x in set(xs)}",
    "set_unpacked": "def f(xs):\n    return (*set(xs),)",
    "set_taken_apart": "def f(xs):\n    a, b = set(xs)\n    return a",
    "set_joined": "def f(xs):\n    return ','.join(set(xs))",
    "set_pop": "def f(xs):\n    s = set(xs)\n    return s.pop()",
    "set_first": "def f(xs):\n    return next(iter(set(xs)))",
    "set_sorted_by_key": "def f(xs):\n    return sorted(set(xs), key=len)",
    "set_max_by_key": "def f(xs):\n    return max(set(xs), key=len)",
    "popitem": "def f(d):\n    return d.popitem()",
    "global_dict": "REGISTRY = {}",
    "global_list": "SEEN: list[int] = []",
    "global_counter": "from itertools import count\nNEXT = count()",
    "global_under_if": "if True:\n    SEEN = set()",
    "class_list": "class C:\n    seen = []",
    "global_statement": "N = 0\ndef f():\n    global N\n    N = 1",
    "memo": "from functools import lru_cache",
    "memo_by_module": "import functools\n@functools.cache\ndef f():\n    return 1",
    "assert_pops": "def f(xs):\n    assert xs.pop() == 1",
    "assert_names": "def f(x):\n    assert (y := x) > 0\n    return y",
    "assert_takes": "def f(it):\n    assert next(it)",
    "catches_all": "def f():\n    try:\n        g()\n    except Exception:\n        pass",
    "catches_bare": "def f():\n    try:\n        g()\n    except:\n        pass",
    "catches_assertion": "def f():\n    try:\n        g()\n    except (KeyError, AssertionError):\n"
    "        pass",
    "thaws": "def f(x):\n    object.__setattr__(x, 'a', 1)",
    "float": "RATIO = 0.95",
    "division": "def f(a, b):\n    return a / b",
    "division_in_place": "def f(a):\n    a /= 2\n    return a",
    "coroutine": "async def f():\n    pass",
}

PURE = {
    "imports": "from __future__ import annotations\nimport collections.abc\nimport math",
    "own_import": "from blockstep.spec.vocabulary import Config\nimport blockstep.spec.core.slots",
    "sorted_set": "def f(xs):\n    for x in sorted({x for x in xs}):\n        pass",
    "membership": "def f(xs, y):\n    return y in {x for x in xs}",
    "order_free": "def f(xs):\n    s = set(xs)\n    return sum(x for x in s), max(s), len(s)",
    "set_from_set": "def f(xs):\n    return {x + 1 for x in set(xs)}",
    "map_by_key": "def f(m: FrozenMap[int, int]):\n    d = m.to_dict()\n    return d[1]",
    "map_sorted": "def f(m: FrozenMap[int, int]):\n    return sorted(m.items())",
    "map_pop": "def f(m: FrozenMap[int, int]):\n    d = m.to_dict()\n    return d.pop(1)",
    "list_pop": "def f(xs):\n    ys = list(xs)\n    return ys.pop()",
    "name_in_other_scope": "def f(xs):\n    s = set(xs)\n    return len(s)\n"
    "def g(xs):\n    s = list(xs)\n    return s[0], [x for x in s]",
    "local_dict": "def f():\n    seen = {}\n    seen[1] = 2\n    return seen",
    "constants": "from collections.abc import Mapping\nA = (1, 2)\nB: Mapping[int, int] = {1: 2}\n"
    "C = frozenset({1})\n__all__ = ['A']",
    "own_hash": "class C:\n    def __hash__(self):\n        return hash(1)",
    "freezes": "class C:\n    def __init__(self):\n        object.__setattr__(self, 'a', 1)",
    "floor": "def f(a, b):\n    return -(-a // b)",
    "expected_error": "def f():\n    try:\n        g()\n    except KeyError:\n        pass",
    "assertion": "def f(x):\n    assert x > 0, 'the capacity check came first'",
    "difference_of_ints": "def f(a, b):\n    for x in range(a - b):\n        pass",
}


@pytest.mark.parametrize("snippet", IMPURE.values(), ids=IMPURE)
def test_impure_code_is_caught(snippet: str) -> None:
    assert impurities(snippet)


@pytest.mark.parametrize("snippet", PURE.values(), ids=PURE)
def test_pure_code_passes(snippet: str) -> None:
    assert impurities(snippet) == []


def test_hash_is_allowed_where_keys_are_made() -> None:
    snippet = "def f(x):\n    return hash(x)"
    assert impurities(snippet, KEYS) == []


def test_sets_declared_in_another_module_are_known() -> None:
    snippet = "def f(c):\n    return tuple(c.members)"
    assert impurities(snippet) == []
    assert impurities(snippet, KEYS, "class C:\n    members: frozenset[int]")


def test_an_invariant_may_go_through_a_map_but_not_a_set() -> None:
    assert impurities("def f(m: FrozenMap[int, int]):\n    return [*m]", INVARIANTS) == []
    assert impurities("def f(s: set[int]):\n    return [*s]", INVARIANTS)


SOURCED = (
    'seed 001 "Touch"', "seed\n    003 section 2", "upstream #43569", "P4", "vLLM 0.19.1, when run",
    "architecture D5", "see the properties",
)  # fmt: skip


@pytest.mark.parametrize("source", SOURCED)
def test_a_rule_with_its_source_passes(source: str) -> None:
    assert unsourced(f'def take():\n    """Take a block.\n\n    Source: {source}.\n    """') == []


@pytest.mark.parametrize("docstring", ["", '"""Take a block."""', '"""Take a block, see #12."""'])
def test_a_rule_without_a_source_is_caught(docstring: str) -> None:
    assert unsourced(f"def take():\n    {docstring}\n    return 1") == ["take"]


def test_private_helpers_need_no_source() -> None:
    assert unsourced("def _helper():\n    return 1") == []
