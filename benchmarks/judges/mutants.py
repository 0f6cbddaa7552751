"""Mutants of the checks: one thing is removed at a time, found in their source.

Each is an edit of one function, at a place in the source:

    sentence    a check finds nothing; or it is missing in a list of checks (safety, renamed)
    kind        a check is not made for one type of event
    complaint   one finding of a check is not made
    wiring      one finding of the lock-step is not made, one call of a check is left out,
                a bound is wider, a comparison of states ignores more or less
    voice       one finding of the worker is not made
    fine        a boundary is moved, a condition negated, a clause left out ... (`changes`)
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.judges.changes import find_changes

import blockstep.conformance.judge
from blockstep.spec import vocabulary as v

WING = Path(blockstep.conformance.judge.__file__ or "").parents[1]

KINDS = ("sentence", "kind", "complaint", "wiring", "voice", "fine")
SENTENCES = ("judge/properties/",)
VOICES = ("judge/worker/", "judge/dataplane/worker.py")
WIRING = (
    *("judge/answers.py", "judge/properties/__init__.py", "judge/properties/sentence.py"),
    *("lockstep/", "search/check.py"),
)
NO_JUDGES = ("lockstep/score.py", "lockstep/sides.py")
"""The modules of `blockstep score`, which counts and finds nothing."""
FINE = ("judge/properties/", "judge/answers.py", "judge/worker/", "lockstep/safety.py",
        "lockstep/liveness.py")  # fmt: skip
"""Prefixes of the modules in which each class of mutants is searched."""
ANNOTATED = ("judge/", "lockstep/", "protocol/")
"""Prefixes of the modules whose annotations say that a function returns findings."""

ONE = {"Finding", "Complaint"}
"""Names of the finding types; a function annotated with one makes a finding."""
NEUTRAL_OF = {"see": '""', "release_canary": "1"}
"""The values of functions that find nothing, where the annotation does not say them."""

NOT_JUDGES = frozenset({"engine", "spec", "tables", "answers"})
"""Attributes of a run whose methods have the same names as those of a check."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A range of a source, by offsets in characters, and its replacement."""

    start: int
    end: int
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One thing that is removed."""

    kind: str
    """`sentence`, `kind`, `complaint`, `wiring`, `voice` or `fine`."""
    name: str
    """The name, which is stable as long as the function is: `pool.every_block_is_free_or_held 1`.
    """
    module: str
    """The module within the conformance package: `judge/properties/pool.py`."""
    function: str
    """Qualified name of the outermost function around the change."""
    lines: tuple[int, int]
    """First and last line of the statement that is changed."""
    edit: Edit | None = None
    listed: tuple[str, str] = ("", "")
    """A check, and the list or type of event from which it is removed, if there is no edit."""

    @property
    def title(self) -> str:
        """The text that `--only` compares, and that is printed."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Source:
    """A module of the conformance package."""

    module: str
    text: str

    @property
    def file(self) -> Path:
        """The path of the file."""
        return WING / self.module


def read_sources() -> dict[str, Source]:
    """Return all modules that contain or call checks, by name."""
    rooms = (*SENTENCES, *VOICES, *WIRING, *ANNOTATED)
    names = [file.relative_to(WING).as_posix() for file in sorted(WING.rglob("*.py"))]
    return {
        name: Source(name, (WING / name).read_text(encoding="utf-8"))
        for name in names
        if name.startswith(rooms)
    }


def find_all(sources: Mapping[str, Source], fine: bool = False) -> list[Mutant]:
    """Return the mutants of all classes; those of `fine` only if requested."""
    neutral = find_neutral(sources.values())
    found: list[Mutant] = []
    for source in sources.values():
        found += find_mutants(source, neutral, fine)
    return found


def find_mutants(source: Source, neutral: Mapping[str, str], fine: bool = False) -> list[Mutant]:
    """Return the mutants of one module."""
    name = source.module
    if not name.startswith((*SENTENCES, *VOICES, *WIRING, *FINE)):
        return []
    text = Text(source.text)
    found: list[Mutant] = []
    is_wiring = name.startswith(WIRING) and name not in NO_JUDGES
    if name.startswith(SENTENCES):
        found += _sentences(name, text)
        found += [] if is_wiring else _calls("complaint", name, text, neutral)
    if name.startswith(VOICES):
        found += _calls("voice", name, text, neutral)
    if is_wiring:
        asked = neutral if name.startswith(ANNOTATED) else NEUTRAL_OF
        found += _calls("wiring", name, text, asked)
        found += _bounds(name, text)
        found += _ignored(name, text)
    if fine and name.startswith(FINE):
        found += _fine(name, text)
    return found


class Text:
    """A source with its tree and the positions of its parts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.parent: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._lines = text.splitlines()

    def offset(self, line: int, column: int) -> int:
        """Return the offset in characters; a tree counts columns in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def edit(self, node: ast.expr | ast.stmt, new: str) -> Edit:
        """Return the edit that replaces a node by `new`."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.offset(node.lineno, node.col_offset)
        return Edit(start, self.offset(node.end_lineno, node.end_col_offset), new)

    def get(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        edit = self.edit(node, "")
        return self.text[edit.start : edit.end]

    def function_of(self, node: ast.AST) -> str:
        """Return the qualified name of the outermost function around a node; "" at module level."""
        names: list[str] = []
        at: ast.AST | None = node
        while at is not None:
            if isinstance(at, ast.FunctionDef):
                names = [at.name]
            elif isinstance(at, ast.ClassDef):
                names = [at.name, *names] if names else []
            at = self.parent.get(at)
        return ".".join(names)

    def lines_of(self, node: ast.AST) -> tuple[int, int]:
        """Return the lines of the statement around a node; without the body, if it has one."""
        at = node
        while not isinstance(at, ast.stmt):
            at = self.parent[at]
        body = getattr(at, "body", None)
        last = max(body[0].lineno - 1, at.lineno) if body else at.end_lineno or at.lineno
        return at.lineno, last


# Values of functions that find nothing.


def find_neutral(sources: Sequence[Source] | Any) -> dict[str, str]:
    """Return for each function that returns findings the value that it returns without any; "" for
    one that makes a single finding.
    """
    neutral: dict[str, str] = dict.fromkeys(ONE, "")
    for source in sources:
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                said = _neutral_of(ast.unparse(node.returns))
                if said is not None:
                    neutral.setdefault(
                        node.name, said
                    )  # a check's own function comes before others
    return {**neutral, **{name: said for name, said in NEUTRAL_OF.items() if said}}


def _neutral_of(annotation: str) -> str | None:
    told = annotation.strip("'\"")
    if told in ONE:
        return ""
    if not any(word in told for word in (*ONE, "Difference")) or told == "Difference":
        return None
    if told.endswith("| None"):
        return "None"
    if told.startswith("list["):
        return "[]"
    if told.startswith(("Iterator[", "Iterable[", "Complaints")) or told.endswith(", ...]"):
        return "()"
    return "([], '')" if told == "tuple[list[Finding], str]" else None


# Checks, findings, calls and worker findings.


def _sentences(module: str, text: Text) -> Iterator[Mutant]:
    """Yield mutants in which a check finds nothing."""
    for node in text.tree.body:
        if isinstance(node, ast.FunctionDef):
            number = get_property(node)
            if number is not None:
                first = node.body[1] if ast.get_docstring(node) else node.body[0]
                start = text.offset(first.lineno, first.col_offset)
                silent = Edit(start, start, f"return ()\n{' ' * first.col_offset}")
                lines = text.lines_of(first)
                yield Mutant("sentence", f"{number} {node.name} off", module, node.name, lines,
                             silent)  # fmt: skip


def get_property(node: ast.FunctionDef) -> str | None:
    """Return the property of a check; None if the function is not a check."""
    for one in node.decorator_list:
        match one:
            case ast.Call(func=ast.Name(id="sentence"), args=[ast.Constant(value=str(number)), *_]):
                return number
    return None


def _calls(kind: str, module: str, text: Text, neutral: Mapping[str, str]) -> Iterator[Mutant]:
    """Yield mutants without one finding, or without one call of a function that makes some."""
    counts: Counter[str] = Counter()
    stem = get_stem(module)
    calls = [node for node in ast.walk(text.tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function, called = text.function_of(node), _called(node)
        is_voice = called.startswith("_complain")
        is_meant = is_voice or (called in neutral and not _is_of_another(node))
        if not function or not is_meant:
            continue
        edit = _silence(text, node, neutral.get(called, ""))
        if edit is None:
            continue
        says = _says(node) if is_voice or called in {"violated", "Finding"} else ""
        label = f"{stem}.{function}"
        if kind == "wiring":
            label = f"{stem} {says}" if says else f"{called} in {label}"
        elif says:
            label = says
        counts[label] += 1
        name = f"{label} {counts[label]}"
        yield Mutant(kind, name, module, function, text.lines_of(node), edit)


def get_stem(module: str) -> str:
    """Return a module as names of mutants show it: `pool`, `worker`, `lockstep.driver`."""
    path = Path(module)
    return path.parent.name if path.stem == "__init__" else path.stem


def _called(node: ast.Call) -> str:
    func = node.func
    return func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")


def _is_of_another(node: ast.Call) -> bool:
    """Whether a method of that name belongs to an object that checks nothing."""
    match node.func:
        case ast.Attribute(value=ast.Attribute(attr=owner)):
            return owner in NOT_JUDGES
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return True
    return False


def _says(node: ast.Call) -> str:
    """Return property and check, if both are string constants."""
    words = [
        one.value
        for one in node.args[:3]
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
    return " ".join([word for word in words if word][:2]) if len(words) >= 2 else ""


def _silence(text: Text, node: ast.Call, nothing: str) -> Edit | None:
    """Return the edit that keeps a call from finding anything: the call is replaced by `nothing` if
    it returns findings; if it makes one, the code that takes it is changed.
    """
    if nothing:
        return text.edit(node, nothing)
    match text.parent[node]:
        case ast.Expr() as statement:
            return text.edit(statement, "None")
        case ast.Yield() as made:
            return text.edit(made, "(yield from ())")
        case ast.List() | ast.Tuple():
            return text.edit(node, "*()")
        case ast.ListComp() as made:
            return text.edit(made, "[]")
        case ast.GeneratorExp() as made:
            return text.edit(made, "iter(())")
        case ast.Return() if text.function_of(node):
            return _skip_branch(text, node)
        case ast.Call() as outer if _called(outer) == "append":
            return text.edit(outer, "None")
        case _:
            return _skip_branch(text, node)


def _skip_branch(text: Text, node: ast.AST) -> Edit | None:
    """Return the edit that never takes the innermost `if` around a node."""
    at = node
    while not isinstance(at, ast.FunctionDef):
        above = text.parent[at]
        if isinstance(above, ast.If) and at in above.body:
            return text.edit(above.test, f"(False and ({text.get(above.test)}))")
        at = above
    return None


# Bounds, and comparisons of states.


def _bounds(module: str, text: Text) -> Iterator[Mutant]:
    """Yield mutants with a bound twice as wide, and without a bound."""
    for node in ast.walk(text.tree):
        if isinstance(node, ast.Return) and node.value is not None:
            function = text.function_of(node)
            if function.endswith("_bound"):
                wide = {"doubled": f"2 * ({text.get(node.value)})", "without end": "10**9"}
                for how, new in wide.items():
                    yield Mutant("wiring", f"{function} {how}", module, function,
                                 text.lines_of(node), text.edit(node.value, new))  # fmt: skip


def _ignored(module: str, text: Text) -> Iterator[Mutant]:
    """Yield mutants of the comparison of states that ignore one field less or one more."""
    for node in ast.walk(text.tree):
        function = text.function_of(node)
        if not (isinstance(node, ast.Call) and "what_matters" in function):
            continue
        given = [one for one in node.keywords if one.arg]
        if _called(node) != "replace" or not given:
            continue
        lines, edit = text.lines_of(node), text.edit(node, "")
        for one in given:
            if "replace" in text.get(one.value):
                continue  # the fields ignored in its parts are mutants of their own
            left = ", ".join(text.get(arg) for arg in node.args)
            kept = [f"{other.arg}={text.get(other.value)}" for other in given if other is not one]
            new = f"replace({', '.join([left, *kept])})"
            name = f"{function} heeds {one.arg}"
            yield Mutant("wiring", name, module, function, lines, Edit(edit.start, edit.end, new))
        names = {one.arg for one in given}
        for field in _fields_beside(names):
            inside = text.get(node)[:-1].rstrip().rstrip(",")  # without the bracket at its end
            more = Edit(edit.start, edit.end, f"{inside}, {field}=None)")
            yield Mutant("wiring", f"{function} ignores {field}", module, function, lines, more)


def _fields_beside(names: set[str | None]) -> list[str]:
    """Return the other fields of the vocabulary record that has these."""
    records = [one for one in vars(v).values() if isinstance(one, type) and is_dataclass(one)]
    for record in records:
        found = [field.name for field in fields(record)]
        if names <= set(found) and record.__name__.endswith("Snapshot"):
            return [name for name in found if name not in names]
    return []


# Finer changes.


def _fine(module: str, text: Text) -> Iterator[Mutant]:
    counts: Counter[str] = Counter()
    for node, new in find_changes(text.tree, text.get):
        function = text.function_of(node)
        if function:
            label = f"{get_stem(module)}.{function}"
            counts[label] += 1
            lines = text.lines_of(node)
            yield Mutant("fine", f"{label} {counts[label]}", module, function, lines,
                         text.edit(node, new))  # fmt: skip


def get_function(source: Source, name: str) -> str:
    """Return the text of a function or method by its qualified name; "" if there is none."""
    return _list_functions(source.text).get(name, "")


@cache
def _list_functions(text: str) -> dict[str, str]:
    tree, found = ast.parse(text), {}
    holders: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    for prefix, holder in holders:
        for node in holder.body:
            if isinstance(node, ast.ClassDef):
                holders.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.FunctionDef):
                found[f"{prefix}{node.name}"] = ast.get_source_segment(text, node) or ""
    return found


def make_text(text: str, edit: Edit) -> str:
    """Return the source with the change."""
    return text[: edit.start] + edit.new + text[edit.end :]


def mark(text: str, mutant: Mutant) -> str:
    """Return the change on one line: `if {total > limit => total >= limit}:`."""
    if mutant.edit is None:
        return f"{{{mutant.listed[0]} => }} of {mutant.listed[1]}"
    edit = mutant.edit
    start = text.rfind("\n", 0, edit.start) + 1
    end = text.find("\n", edit.end)
    before, old, after = text[start : edit.start], text[edit.start : edit.end], text[edit.end : end]
    marked = f"{before}{{{old} => {edit.new.strip()}}}{after}"
    return " ".join(marked.split())
