"""One-point changes of Python functions, found in their syntax trees.

A change is a mutant: one operator, constant, condition or statement of one function is replaced.
Laws are held to them here, and the specification, the engines and the property checks by
`benchmarks.mutation`. Docstrings, annotations, assertions, decorators, default values and the
wording of findings are left out, since no behaviour depends on them.

A line that ends with `# no-mutate: reason`, or follows a line that is only this comment, has no
changes: no program can tell them from the original. `# no-mutate clause: reason` leaves out the
changes of this kind only.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType

MARK = re.compile(r"#\s*no-mutate\b *(?P<kind>\w*)(:[ \t]*(?P<reason>.*))?$")
COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""Each comparison as it is written, and its replacement."""
SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "|",
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
WORDS = frozenset(
    {
        *("Complaint", "unequal", "differing", "difference", "Difference", "violated", "Finding"),
        *("shown", "show", "_describe_stop", "_complain", "_complain_slot", "_complain_shared"),
        *("_describe_transfer", "_describe_history", "_describe_return", "_complain_read", "join"),
    }
)
"""Calls whose arguments are wording, which does not change what a check finds."""
KINDS = ("comparison", "condition", "clause", "arithmetic", "constant", "call", "statement")


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a source text."""

    kind: str
    """One of `KINDS`."""
    function: str
    """Qualified name of the outermost function around the change."""
    number: int
    """The number of the change within its function, from 1."""
    lines: tuple[int, int]
    """First and last line of the changed statement, without its body."""
    start: int
    end: int
    """The replaced part of the text, as offsets in characters."""
    new: str

    def apply(self, text: str) -> str:
        """Return the text with the change."""
        return text[: self.start] + self.new + text[self.end :]

    def show(self, text: str) -> str:
        """Return the change in one line: `if {total > limit => total >= limit}:`."""
        first = text.rfind("\n", 0, self.start) + 1
        last = text.find("\n", self.end)
        old = text[self.start : self.end]
        marked = f"{text[first : self.start]}{{{old} => {self.new}}}{text[self.end : last]}"
        return " ".join(marked.split())


@cache
def find_changes(text: str) -> tuple[Change, ...]:
    """Return all changes of the functions of a module, in the order of the source.

    Raises:
        ValueError: a mark has no reason.
    """
    return tuple(_Finder(text).find())


def find_marks(text: str) -> dict[int, tuple[str, str]]:
    """Return (kind of change or "", reason) of each marked line; a comment on its own line marks
    the next line of code.

    Raises:
        ValueError: a mark has no reason, or names an unknown kind.
    """
    found: dict[int, tuple[str, str]] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        mark = MARK.search(line)
        if mark is None:
            continue
        if not mark["reason"] or mark["kind"] not in ("", *KINDS):
            raise ValueError(
                f"line {number}: a mark is `# no-mutate: reason` or `# no-mutate KIND: reason`, "
                f"with a kind of {', '.join(KINDS)}"
            )
        place = number
        while lines[place - 1].lstrip().startswith("#") and place < len(lines):
            place += 1
        found[place] = mark["kind"], mark["reason"]
    return found


class _Finder:
    """A source with its tree and the positions of its parts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.marked = find_marks(text)
        self.parent: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self._lines = text.splitlines()
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def find(self) -> Iterator[Change]:
        counts: Counter[str] = Counter()
        for node in self._walk(self.tree):
            for kind, changed, new in self._change(node):
                function, lines = self._function_of(changed), self._lines_of(changed)
                if not function or self._is_marked(kind, lines):
                    continue
                counts[function] += 1
                start, end = self._span(changed)
                yield Change(kind, function, counts[function], lines, start, end, new)

    def _is_marked(self, kind: str, lines: tuple[int, int]) -> bool:
        marks = [self.marked.get(line) for line in range(lines[0], lines[1] + 1)]
        return any(mark is not None and mark[0] in ("", kind) for mark in marks)

    def _walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that may be changed, outer ones first."""
        yield node
        left_out = {id(part) for part in _skipped(node)}
        for child in ast.iter_child_nodes(node):
            if id(child) not in left_out:
                yield from self._walk(child)

    def _change(self, node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
        """Yield (kind, changed node, new text) of one node."""
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for index, sign in enumerate(ops):
                    signs = [COMPARED[type(one)][0] for one in ops]
                    signs[index] = COMPARED[type(sign)][1]
                    pairs = zip(signs, map(self._operand, others), strict=True)
                    new = f"({self._operand(left)} {' '.join(map(' '.join, pairs))})"
                    yield "comparison", node, new
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                if not isinstance(test, ast.Compare | ast.UnaryOp):
                    yield "condition", test, f"(not ({self._get(test)}))"
            case ast.comprehension(ifs=tests):
                for test in tests:
                    yield "clause", test, "True"
            case ast.BoolOp(op=op, values=values):
                yield from self._change_clauses(node, op, values)
            case ast.BinOp(left=ast.Tuple() | ast.List()):
                pass
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in SIGNS:
                new = f"({self._operand(left)} {SIGNS[type(sign)]} {self._operand(right)})"
                yield "arithmetic", node, new
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield "arithmetic", node, f"({self._get(operand)})"
            case ast.Constant(value=bool(value)):
                yield "constant", node, str(not value)
            case ast.Constant(value=int(number)):
                yield "constant", node, str(number + 1)
            case ast.Name(id=name) if name in CALLED:
                yield "call", node, CALLED[name]
            case ast.Call(func=ast.Name(id="replace"), args=args, keywords=keywords):
                for left_out in keywords if len(keywords) > 1 else ():
                    kept = [self._get(one) for one in args]
                    kept += [self._get_keyword(one) for one in keywords if one is not left_out]
                    yield "clause", node, f"replace({', '.join(kept)})"
            case ast.List(elts=[ast.Call(), *_] as made):
                for one in made:
                    yield "clause", one, "*()"
            case ast.stmt():
                yield from self._change_statement(node)

    def _change_clauses(
        self, node: ast.BoolOp, op: ast.boolop, values: list[ast.expr]
    ) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
        """Yield the change of `and` and `or`, and a change without each clause."""
        word, other = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
        clauses = [f"({self._get(one)})" for one in values]
        yield "condition", node, f"({f' {other} '.join(clauses)})"
        for index in range(len(clauses)):
            kept = clauses[:index] + clauses[index + 1 :]
            yield "clause", node, f"({f' {word} '.join(kept)})"

    def _change_statement(self, node: ast.stmt) -> Iterator[tuple[str, ast.stmt, str]]:
        """Yield the removal of a statement that has an effect."""
        match node:
            case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
                yield "statement", node, "yield from ()"
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
                yield "statement", node, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield "statement", node, "pass"
            case ast.Return(value=ast.Call() as call) if _name_of(call) in WORDS:
                yield "statement", node, "return None"
            case ast.Continue():
                yield "statement", node, "break"
            case ast.Break():
                yield "statement", node, "continue"

    def _get(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self.text[start:end]

    def _operand(self, node: ast.expr) -> str:
        text = self._get(node)
        is_plain = isinstance(node, ast.Name | ast.Constant | ast.Attribute | ast.Call)
        return text if is_plain else f"({text})"

    def _get_keyword(self, node: ast.keyword) -> str:
        value = self._get(node.value)
        return f"{node.arg}={value}" if node.arg else f"**{value}"

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Return the offset in characters; a tree counts columns in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _function_of(self, node: ast.AST) -> str:
        names: list[str] = []
        at: ast.AST | None = node
        while at is not None:
            if isinstance(at, ast.FunctionDef):
                names = [at.name]
            elif isinstance(at, ast.ClassDef):
                names = [at.name, *names] if names else []
            at = self.parent.get(at)
        return ".".join(names)

    def _lines_of(self, node: ast.AST) -> tuple[int, int]:
        at = node
        while not isinstance(at, ast.stmt):
            at = self.parent[at]
        body = getattr(at, "body", None)
        last = max(body[0].lineno - 1, at.lineno) if body else at.end_lineno or at.lineno
        return at.lineno, last


def _skipped(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node in which nothing is changed."""
    match node:
        case ast.Expr(value=ast.Constant() as text):
            yield text
        case ast.Assert(test=test, msg=message):
            yield test
            if message is not None:
                yield message
        case ast.JoinedStr(values=parts):
            yield from parts
        case ast.Raise(exc=ast.expr() as error):
            yield error
        case ast.arg(annotation=ast.expr() as annotation):
            yield annotation
        case ast.arguments(defaults=defaults, kw_defaults=named):
            yield from (one for one in (*defaults, *named) if one is not None)
        case ast.keyword(arg="strict", value=value):
            yield value
        case ast.FunctionDef(returns=returns, decorator_list=decorators):
            yield from decorators
            if returns is not None:
                yield returns
        case ast.AnnAssign(annotation=annotation):
            yield annotation
        case ast.Call(func=ast.Name(id="Rejected"), args=args, keywords=keywords):
            yield from args[1:]
            yield from keywords
        case ast.Call(args=args, keywords=keywords) if _name_of(node) in WORDS:
            yield from args
            yield from keywords


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


# The change of a running function.


class CannotPlantError(Exception):
    """The function of a change cannot be exchanged."""


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of the functions and methods of a module, outermost ones only."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 2:  # CO_NEWLOCALS: a function; a class body has none
                yield inner
            else:
                yield from list_codes(inner)


def plant(change: Change, text: str, file: str) -> Callable[[], None]:
    """Make a change in this process, in every function that runs the code; returns the undoing.

    Nothing is imported again: the code object of the function is exchanged, and caches are emptied.

    Raises:
        CannotPlantError: no running function has this code.
        SyntaxError: the changed text is not valid Python.
    """
    made = {one.co_qualname: one for one in _compile(change.apply(text), file)}
    code = made[change.function]
    found = find_holders(file, change.function)
    if not found:
        raise CannotPlantError(f"no function runs the code of {change.function} in {file}")
    if any(code.co_freevars != one.__code__.co_freevars for one in found):
        raise CannotPlantError(f"{change.function} closes over other names")
    before = [(one, one.__code__) for one in found]

    def undo() -> None:
        for function, old in before:
            function.__code__ = old
        _empty_caches()

    for function in found:
        function.__code__ = code
    _empty_caches()
    return undo


@contextmanager
def planted(change: Change, text: str, file: str) -> Iterator[None]:
    """Run the body of a `with` statement with the change."""
    undo = plant(change, text, file)
    try:
        yield
    finally:
        undo()


def _compile(text: str, file: str) -> Iterator[CodeType]:
    return list_codes(compile(text, file, "exec", dont_inherit=True))


_HOLDERS: dict[tuple[str, str], list[FunctionType]] = {}


def find_holders(file: str, name: str) -> list[FunctionType]:
    """Return the functions that run the code of this name in a file."""
    if (file, name) not in _HOLDERS:
        gc.unfreeze()  # a forked process hides objects of its parent from the collector
        _HOLDERS[file, name] = [
            one
            for one in gc.get_objects()
            if type(one) is FunctionType  # `isinstance` makes some objects of torch warn
            and one.__code__.co_filename == file
            and one.__code__.co_qualname == name
        ]
    return _HOLDERS[file, name]


def _empty_caches() -> None:
    """Empty the caches of the modules of this project, which may hold results of another code."""
    for name, module in list(sys.modules.items()):
        if name.startswith("blockstep."):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None) if callable(value) else None
                if clear is not None and getattr(value, "__module__", "") == name:
                    clear()
