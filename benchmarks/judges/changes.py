"""Finer changes, of the kinds that `benchmarks.mutation` takes from cosmic-ray.

They are made here on the syntax tree, so that `make judges` needs no more than the tests do.
Docstrings, annotations, assertions and the wording of findings are left out, since no test checks
them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "|",
}
WORDS = frozenset(
    {
        *("Complaint", "unequal", "differing", "difference", "Difference", "violated", "Finding"),
        *("shown", "show", "_told", "_complain", "_complain_slot", "_complain_shared", "_tell"),
        *("_tell_history", "_tell_return", "_complain_read", "join"),
    }
)
"""Calls whose arguments are wording, which does not change what a check finds."""

Get = Callable[[ast.expr | ast.stmt], str]


def find_changes(tree: ast.Module, get: Get) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield (node that is changed, new text), in the order of the source."""
    skipped = {id(inner) for node in ast.walk(tree) for inner in _skipped(node)}

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if id(node) not in skipped:
            yield node
            for child in ast.iter_child_nodes(node):
                yield from walk(child)

    for node in walk(tree):
        for changed, new in _changes(node, get):
            if changed is not node or new != get(changed):
                yield changed, new


def _skipped(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node in which nothing is changed."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())) | ast.Assert() | ast.JoinedStr():
            yield node
        case ast.arg(annotation=ast.expr() as annotation):
            yield annotation
        case ast.FunctionDef(returns=returns, decorator_list=decorators, args=args):
            yield from decorators
            yield from args.defaults
            if returns is not None:
                yield returns
        case ast.AnnAssign(annotation=annotation):
            yield annotation
        case ast.Call(func=func, args=args, keywords=keywords):
            name = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
            if name in WORDS:
                yield from args
                yield from keywords


def _changes(node: ast.AST, get: Get) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for index, sign in enumerate(ops):
                signs = [_SIGN_OF[type(one)] for one in ops]
                signs[index] = COMPARED[type(sign)]
                pairs = zip(signs, map(get, others), strict=True)
                yield node, f"({get(left)} {' '.join(map(' '.join, pairs))})"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare) or len(test.ops) > 1:
                yield test, f"(not ({get(test)}))"
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield test, "True"
        case ast.BoolOp(op=op, values=values):
            word, other, none = "and", "or", "True"
            if isinstance(op, ast.Or):
                word, other, none = "or", "and", "False"
            clauses = [f"({get(one)})" for one in values]
            yield node, f"({f' {other} '.join(clauses)})"
            for index in range(len(clauses)):
                left_out = [*clauses[:index], none, *clauses[index + 1 :]]
                yield node, f"({f' {word} '.join(left_out)})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SIGNS:
            yield node, f"({get(left)} {SIGNS[type(operator)]} {get(right)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(number)):
            yield node, str(number + 1)
        case ast.Name(id="min" | "max" as name):
            yield node, {"min": "max", "max": "min"}[name]
        case ast.Expr(value=ast.Call() as call) if not _is_wording(call):
            yield node, "None"
        case ast.AugAssign():
            yield node, "None"
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"


_SIGN_OF: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}


def _is_wording(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name in WORDS  # a finding left out is a mutant of its own class
