"""Rewrite: turns the text of a kernel into a Python function that numpy runs."""

from __future__ import annotations

import ast
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Final

from blockstep.kernels.numpied import values
from blockstep.kernels.numpied.memory import ATOMICS
from blockstep.kernels.numpied.values import FUNCTIONS


class RefusedError(Exception):
    """A kernel that cannot be run by numpy; the message says where, why, and what to write
    instead."""


_STATEMENTS: Final = (ast.Pass, ast.Expr, ast.Assert, ast.Return, ast.If, ast.While, ast.For)
_EXPRESSIONS: Final = (
    *(ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Attribute),
    *(ast.Subscript, ast.Slice, ast.Tuple, ast.IfExp, ast.keyword),
)
_WHY: Final[dict[type[ast.AST], str]] = {
    ast.Break: "break: put a flag into the condition of the loop",
    ast.Continue: "continue: put the rest of the loop under an if",
    ast.BoolOp: "and, or: both sides are evaluated when compiled; write & or |, or nest",
    ast.Not: "not: write == 0, or ~ of a comparison",
    ast.Div: "/: these are kernels of integers; write //",
}
_OPERATORS: Final = {ast.FloorDiv: "_divide", ast.Mod: "_modulo", ast.RShift: "_shift_right"}
_GROWING: Final = (ast.Add, ast.Sub, ast.Mult, ast.LShift)


def rewrite(tree: ast.Module, file: str, known: AbstractSet[str] = frozenset()) -> ast.Module:
    """Return the module's functions under `@triton.jit` and its constants; the rest is removed.

    Line numbers stay those of the source, so that a traceback shows the kernel. `known` are the
    names of kernels in other files.

    Raises:
        RefusedError: Python would run it differently from Triton, or it is not supported.
    """
    body: list[ast.stmt] = []
    own = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and _is_kernel(statement):
            body.append(_Kernel(statement, file, known | own).rewritten())
        elif isinstance(statement, ast.Assign):
            statement.value = _call("_constant", statement.value)
            body.append(statement)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            body.append(statement)
    tree.body = body
    return ast.fix_missing_locations(tree)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(one).startswith("triton.jit") for one in function.decorator_list)


def _call(name: str, *args: ast.expr, **named: ast.expr) -> ast.Call:
    keywords = [ast.keyword(key, value) for key, value in named.items()]
    call = ast.Call(ast.Name(name, ast.Load()), list(args), keywords)
    return ast.copy_location(call, args[0]) if args else call


class _Kernel(ast.NodeTransformer):
    """Rewrites one function."""

    def __init__(self, function: ast.FunctionDef, file: str, known: AbstractSet[str]) -> None:
        self.function, self.file, self.known = function, file, known
        self.tensors = {argument.arg for argument in function.args.args}
        """Arguments that are not assigned to: their fields may be loaded from."""

    def rewritten(self) -> ast.FunctionDef:
        """Return the function without anything specific to Triton."""
        function = self.function
        for node in ast.walk(function):
            self._refuse(node)
        function.decorator_list, function.returns = [], None
        for argument in function.args.args:
            argument.annotation = None
        function.body = [new for old in function.body for new in self._statement(old)]
        return function

    def refused(self, node: ast.AST, why: str) -> RefusedError:
        """Return the error about a node."""
        return RefusedError(f"{self.file}:{getattr(node, 'lineno', '?')}: {why}")

    def _refuse(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr_context | ast.arguments | ast.arg | ast.cmpop):
            return
        operator: Any = getattr(node, "op", node)
        for kind in (type(node), type(operator)):
            if kind in _WHY:
                raise self.refused(node, _WHY[kind])
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            raise self.refused(node, "a chain of comparisons: write & between")
        is_loop = isinstance(node, ast.While | ast.For)
        if is_loop and any(isinstance(inner, ast.Return) for inner in ast.walk(node)):
            raise self.refused(node, "return in a loop: use a flag")
        if is_loop and getattr(node, "orelse", None):
            raise self.refused(node, "else of a loop: use a flag")
        known = (*_STATEMENTS, ast.Assign, ast.AugAssign, ast.FunctionDef, *_EXPRESSIONS)
        operators = (ast.operator, ast.unaryop)
        if not isinstance(node, (*known, *operators)):
            raise self.refused(node, f"{type(node).__name__} is not supported")

    # statements

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.Assign | ast.AugAssign):
            return self._assign(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return []
        if isinstance(node, ast.If | ast.While | ast.For):
            node.body = [new for old in node.body for new in self._statement(old)] or [ast.Pass()]
            node.orelse = [new for old in node.orelse for new in self._statement(old)]
            if isinstance(node, ast.For):
                node.iter = self._range(node.iter)
            else:
                node.test = self.visit(node.test)
            return [node]
        return [self.visit(node)]

    def _range(self, node: ast.expr) -> ast.expr:
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or name not in ("range", "tl.range", "tl.static_range"):
            raise self.refused(node, "a for loop runs over range or tl.static_range")
        if node.keywords:
            raise self.refused(node, f"{node.keywords[0].arg}: a loop is run as it is written")
        return _call("range", *[self.visit(argument) for argument in node.args])

    def _assign(self, node: ast.Assign | ast.AugAssign) -> list[ast.stmt]:
        """Rewrite an assignment: vectors are never changed in place, and scalars wrap at 32
        bits."""
        target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        for name in names:
            if not isinstance(name, ast.Name):
                raise self.refused(node, f"{ast.unparse(name)} = ...: assign to a name")
            self.tensors.discard(name.id)
        value = node.value
        if isinstance(node, ast.AugAssign):
            here = ast.Name(ast.unparse(target), ast.Load())
            value = ast.copy_location(ast.BinOp(here, node.op, value), node)
        grows = isinstance(value, ast.BinOp) and any(
            isinstance(part, ast.BinOp) and isinstance(part.op, _GROWING)
            for part in ast.walk(value)
        )
        made: list[ast.stmt] = [ast.copy_location(ast.Assign([target], self.visit(value)), node)]
        if grows and isinstance(target, ast.Name):
            text = (
                f"if {target.id}.__class__ is int and not -0x80000000 <= {target.id} < 0x80000000:"
            )
            cut = ast.parse(f"{text} {target.id} = _wrap({target.id})").body[0]
            made.append(ast.copy_location(cut, node))
            for part in ast.walk(cut):
                ast.copy_location(part, node)
        return made

    # expressions

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Allow whole numbers, bools, and the `None` of an index."""
        if isinstance(node.value, float | complex | bytes):
            raise self.refused(node, f"{node.value!r}: these are kernels of integers")
        if type(node.value) is int and not -(1 << 31) <= node.value < 1 << 31:
            return ast.copy_location(_call("_narrow", node), node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Rewrite division, which rounds as in C."""
        left, right = self.visit(node.left), self.visit(node.right)
        name = _OPERATORS.get(type(node.op))
        if name is not None:
            return _call(name, left, right)
        node.left, node.right = left, right
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        """Rewrite `~`: of a bool it is one bit."""
        node.operand = self.visit(node.operand)
        return _call("_invert", node.operand) if isinstance(node.op, ast.Invert) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Rewrite a call of `triton.language`, of another kernel, or `x.to(type)`."""
        function = node.func
        is_tl = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "tl"
        if is_tl and isinstance(function, ast.Attribute):
            return self._language(node, function.attr)
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        if isinstance(function, ast.Attribute):
            if function.attr != "to":
                raise self.refused(node, f".{function.attr}() is not supported")
            return _call("_to", self.visit(function.value), *node.args)
        if not isinstance(function, ast.Name) or function.id not in self.known:
            raise self.refused(node, f"{ast.unparse(function)}() is not supported")
        return node

    def _language(self, node: ast.Call, name: str) -> ast.expr:
        if name in ("load", "store") or name in ATOMICS:
            return self._access(node, name)
        if name == "debug_barrier":
            return ast.copy_location(_call("_barrier"), node)
        if name not in FUNCTIONS:
            raise self.refused(node, f"tl.{name} is not supported")
        args = [self.visit(argument) for argument in node.args]
        named = {str(k.arg): self.visit(k.value) for k in node.keywords}
        return ast.copy_location(_call(f"_tl_{name}", *args, **named), node)

    def _access(self, node: ast.Call, name: str) -> ast.expr:
        """Rewrite `tensor + offset`: the tensor is the left-most leaf, an argument or a field of
        one."""
        base, offset = self._split(node.args[0])
        owner = base.value if isinstance(base, ast.Attribute) else base
        if not isinstance(owner, ast.Name) or owner.id not in self.tensors:
            raise self.refused(
                node, f"tl.{name} at {ast.unparse(base)}: write tensor + offset, of an argument"
            )
        known = {"mask", "other", "sem", "scope"}
        wrong = [keyword.arg for keyword in node.keywords if keyword.arg not in known]
        if wrong:
            raise self.refused(node, f"tl.{name}({wrong[0]}=) is not supported")
        place = ast.Constant(0) if offset is None else self.visit(offset)
        args = [base, place, *[self.visit(argument) for argument in node.args[1:]]]
        named = {str(k.arg): self.visit(k.value) for k in node.keywords}
        if name in ATOMICS:
            args.insert(0, ast.Constant(name.removeprefix("atomic_")))
            return ast.copy_location(_call("_atomic", *args, **named), node)
        return ast.copy_location(_call(f"_{name}", *args, **named), node)

    def _split(self, node: ast.expr) -> tuple[ast.expr, ast.expr | None]:
        """Return the left-most leaf of a chain of + and -, and what is added to it."""
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
            return node, None
        base, rest = self._split(node.left)
        if rest is None and isinstance(node.op, ast.Add):
            return base, node.right
        rest = ast.copy_location(ast.Constant(0), node) if rest is None else rest
        return base, ast.copy_location(ast.BinOp(rest, node.op, node.right), node)


def make_space(memory: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions that rewritten kernels call."""
    own = {
        "_divide": values.divide, "_modulo": values.modulo, "_shift_right": values.shift_right,
        "_invert": values.invert, "_to": values.to, "_wrap": values.wrap,
        "_narrow": values.narrow, "_constant": values.narrow,
        "_load": memory.load, "_store": memory.store, "_atomic": memory.atomic,
        "_barrier": memory.barrier,
    }  # fmt: skip
    return {**own, **{f"_tl_{name}": function for name, function in FUNCTIONS.items()}}
