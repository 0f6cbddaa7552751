"""Page on coverage: lines and branches that a run of `check` did not reach, with hand-written
reasons.

An unexecuted line and a branch that was not taken are the same to a reader: a way through the code
that `check` does not take. Each is identified by its function, its line of code and its target, so
that a reason stays valid when lines are added above.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks._pages import find_functions, get_innermost, make_table, quote_code

UNEXPLAINED: Final = "UNEXPLAINED"
NOT_EXECUTED: Final = "is not executed"
AWAY: Final = "leaves the function"

WHOLE_MODULES: Final[Mapping[str, str]] = {
    "spec/vocabulary/": "the words that both sides share; they decide nothing",
    "spec/beside/tiers.py": "the levels of a store, a state machine that no scheduler calls; the "
    "tests of `impl.tiers` and the laws ask it",
    "spec/invariants.py": "predicates that the tests ask of states, as those of features are; "
    "`check` has its properties",
}
"""Not looked at, and why."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """One line that was not executed, or one branch that was not taken."""

    line: int
    function: str
    code: str
    """The line, without its indentation."""
    to: str
    """`NOT_EXECUTED`; or the line that the branch leads to, or `AWAY`."""


@dataclass(frozen=True, slots=True)
class Module:
    """Lines and branches of one module that were reached."""

    name: str
    num_lines: int
    num_lines_reached: int
    num_branches: int
    num_branches_reached: int
    unreached: tuple[Unreached, ...]


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason why a line or branch is not reached."""

    module: str
    function: str
    """Or a class, for all of its methods."""
    why: str
    code: str = ""
    """"" for every line of the function."""
    to: str = ""
    """"" for every branch of this line."""

    def is_about(self, module: str, one: Unreached) -> bool:
        """Return whether the reason is about this entry."""
        is_here = self.module == module and f"{one.function}.".startswith(f"{self.function}.")
        return is_here and self.code in ("", one.code) and self.to in ("", one.to)


def read_reasons(file: Path) -> list[Reason]:
    """Return the hand-written reasons."""
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("unreached", [])
    return [Reason(**entry) for entry in entries]


def find_module(tracer: Any, file: Path, name: str) -> Module:
    """Return the result of coverage.py for one file.

    Branches of a line that is not executed are not listed, and lines that follow from one branch
    not taken are one entry, its first.
    """
    analysis = tracer._analyze(str(file))  # the public `analysis2` knows no branches
    numbers = analysis.numbers
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    functions = find_functions(text)

    def describe(line: int, to: str) -> Unreached:
        return Unreached(line, get_innermost(line, functions), lines[line - 1].strip(), to)

    found: list[Unreached] = []
    missing = set(analysis.missing)
    for start, to in _get_arcs(analysis):
        if start not in missing:
            found.append(describe(start, lines[to - 1].strip() if to > 0 else AWAY))
    led_to = {to for start, to in _get_arcs(analysis) if start not in missing}
    follows = {line for line in missing if line in led_to or line - 1 in missing}
    found += [describe(line, NOT_EXECUTED) for line in sorted(missing - follows)]
    return Module(
        name,
        numbers.n_statements,
        numbers.n_statements - numbers.n_missing,
        numbers.n_branches,
        numbers.n_branches - numbers.n_missing_branches,
        tuple(sorted(found, key=lambda one: (one.line, one.to))),
    )


def _get_arcs(analysis: Any) -> list[tuple[int, int]]:
    """(from, to) of the branches not taken; `to` is negative where one leaves the function."""
    arcs = analysis.missing_branch_arcs()
    return sorted((start, to) for start, ends in arcs.items() for to in ends)


def get_reason(module: str, one: Unreached, reasons: Sequence[Reason]) -> Reason | None:
    """Return the first reason that fits, or None."""
    return next((reason for reason in reasons if reason.is_about(module, one)), None)


def get_unexplained(
    modules: Sequence[Module], reasons: Sequence[Reason]
) -> list[tuple[str, Unreached]]:
    """(module, what) of everything that no reason fits."""
    return [
        (module.name, one)
        for module in modules
        for one in module.unreached
        if get_reason(module.name, one, reasons) is None
    ]


def to_json(
    modules: Sequence[Module], num_events: Mapping[str, int], run: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a run reached, as JSON: the run itself, its events, and every module."""
    return {
        "run": dict(run),
        "events": dict(num_events),
        "modules": [
            {
                "module": module.name,
                "lines": [module.num_lines_reached, module.num_lines],
                "branches": [module.num_branches_reached, module.num_branches],
                "unreached": [
                    {"line": one.line, "function": one.function, "code": one.code, "to": one.to}
                    for one in module.unreached
                ],
            }
            for module in modules
        ],
    }


def from_json(results: Mapping[str, Any]) -> list[Module]:
    """Return the modules that `to_json` wrote."""
    return [
        Module(
            name=one["module"],
            num_lines=one["lines"][1],
            num_lines_reached=one["lines"][0],
            num_branches=one["branches"][1],
            num_branches_reached=one["branches"][0],
            unreached=tuple(Unreached(**way) for way in one["unreached"]),
        )
        for one in results["modules"]
    ]


def render_page(results: Mapping[str, Any], reasons: Sequence[Reason]) -> str:
    """Return the page's tables, from the results of a run and the hand-written reasons."""
    modules, run = from_json(results), results["run"]
    names = ", ".join(f"{name} {run[name]}" for name in ("blockstep", "commit", "python"))
    played = "; ".join(f"{what}: {count:,} events" for what, count in results["events"].items())
    text = f"Run: `{run['command']}` on {run['day']} with {names}, coverage.py {run['coverage']}. "
    text += f"Played: {played}.\n\n"
    text += make_table(
        ("module", "lines", "reached", "branches", "reached", "without a reason"),
        [*(_row(module, reasons) for module in modules), _total(modules, reasons)],
    )
    whole = "; ".join(f"`{name}`: {why}" for name, why in WHOLE_MODULES.items())
    text += f"\nNot counted: {whole}.\n\n## Not reached\n\n"
    rows: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        for one in module.unreached:
            reason = get_reason(module.name, one, reasons)
            why = reason.why if reason else f"**{UNEXPLAINED}**"
            rows.setdefault((module.name, why), []).append(_name_way(one))
    text += make_table(
        ("module", "ways not taken", "why"),
        [(f"`{name}`", "; ".join(ways), why) for (name, why), ways in rows.items()],
    )
    for reason in reasons:
        if not any(
            reason.is_about(module.name, one) for module in modules for one in module.unreached
        ):
            what = quote_code(reason.code or reason.function)
            text += f"\nExplains nothing any more: `{reason.module}`, {what}.\n"
    return text


def _row(module: Module, reasons: Sequence[Reason]) -> tuple[str, ...]:
    numbers = (
        module.num_lines,
        module.num_lines_reached,
        module.num_branches,
        module.num_branches_reached,
        len(get_unexplained([module], reasons)),
    )
    return f"`{module.name}`", *map(str, numbers)


def _total(modules: Sequence[Module], reasons: Sequence[Reason]) -> tuple[str, ...]:
    rows = [_row(module, reasons) for module in modules]
    return "**all**", *(str(sum(int(row[column]) for row in rows)) for column in range(1, 6))


def _name_way(one: Unreached) -> str:
    to = one.to if one.to in (NOT_EXECUTED, AWAY) else f"continues to {quote_code(one.to)}"
    return f"`{one.function or 'module'}`: {quote_code(one.code)} {to}"
