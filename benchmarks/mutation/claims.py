"""Claims: do the tests that a class of survivors names catch each of its mutants?

"Not played by `check`; tests/spec/test_masks.py catches it" is a claim about every mutant of the
class. Here each of them runs the tests that its class names, in a process of its own: the mutated
module is imported instead of the real one, and a test must fail.
"""

from __future__ import annotations

import importlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.mutation.mutants import (
    Source,
    find_mutants,
    find_sources,
    is_change,
    make_mutated_text,
    mark_change,
)
from benchmarks.mutation.runner import import_mutated, run_forked
from benchmarks.mutation.survivors import Explanation, Verdicts

TEST_SECONDS: Final = 120.0
"""Processor time limit of all tests of one mutant; a mutant that needs more counts as caught."""
_OPTIONS: Final = (
    *("-x", "-q", "--assert=plain", "-p", "no:cacheprovider"),
    *("-W", "ignore:the compiled engine runs as plain Python:RuntimeWarning"),
)
"""Options of pytest: imported modules are not rewritten, and a mutant is never compiled."""
_TEST: Final = re.compile(r"(?<![\w/])(?:tests/[\w/]+/)?test_\w+\.py")


@dataclass(frozen=True, slots=True)
class Claim:
    """A survivor, and the tests that should catch it."""

    survivor: Mapping[str, Any]
    tests: tuple[str, ...]
    """Files, relative to the repository."""


def list_tests(why: str) -> tuple[str, ...]:
    """Return the test files that a text names; one without a folder is in the folder of the one
    before.
    """
    found: list[str] = []
    for name in _TEST.findall(why):
        folder = Path(found[-1]).parent if found and "/" not in name else Path()
        found.append(str(folder / name))
    return tuple(found)


def list_claims(verdicts: Verdicts, only: Sequence[str] = ()) -> list[Claim]:
    """Return the claims about survivors of modules whose names begin with one of `only`, if any."""
    return [
        Claim(survivor, tests)
        for survivor, said in verdicts.explained
        if said is not None and survivor["module"].startswith(tuple(only) or "")
        if (tests := list_tests(_get_reason(said)))
    ]


def _get_reason(said: Explanation) -> str:
    return said.why if said.verdict != "equivalent" else ""


def find_broken_claims(
    claims: Sequence[Claim], house: Path, jobs: int, wall_seconds: int = 600
) -> Iterator[str]:
    """Yield a line for each claim that does not hold, and for tests that fail without a mutant.

    A survivor is also reported if its module has changed and its place no longer exists.
    """
    for name in ("torch", "pytest"):
        importlib.import_module(name)  # as each test process would do
    sources = {source.module: source for source in find_sources()}
    texts = {
        module: _find_texts(sources[module], [one for one in claims if _module(one) == module])
        for module in sorted(set(map(_module, claims)) & sources.keys())
    }
    works: list[Callable[[], dict[str, Any]]] = []
    said: list[str] = []
    for tests in sorted({claim.tests for claim in claims}):
        modules = {_module(one) for one in claims if one.tests == tests}
        for source in (sources[module] for module in sorted(modules & texts.keys())):
            works.append(partial(_play, source, source.text, tests, house))
            said.append(f"UNSOUND without a mutant of {source.module}: {' '.join(tests)}")
    num_sound = len(works)
    for claim in claims:
        place = (claim.survivor["function"], claim.survivor["change"])
        what = f"{_module(claim)} {place[0]}\n  {place[1]}\n  {' '.join(claim.tests)}"
        found = texts.get(_module(claim), {}).get(place)
        if found is None:
            yield f"GONE {what}"
            continue
        line = claim.survivor["line"]
        mutated = found[min(found, key=lambda there: abs(there - line))]
        works.append(partial(_play, sources[_module(claim)], mutated, claim.tests, house))
        said.append(f"NOT CAUGHT {what}")
    for index, result in run_forked(works, jobs, wall_seconds):
        is_caught = isinstance(result, signal.Signals) or result is None or result["code"] != 0
        if is_caught == (index < num_sound):
            yield said[index]


def _module(claim: Claim) -> str:
    return str(claim.survivor["module"])


def _find_texts(source: Source, claims: Sequence[Claim]) -> dict[tuple[str, str], dict[int, str]]:
    """Return mutated sources by function and change, which are stable if lines move, and by
    line.
    """
    functions = {claim.survivor["function"] for claim in claims}
    found: dict[tuple[str, str], dict[int, str]] = {}
    for mutant in find_mutants(source)[0]:
        if mutant.function not in functions:
            continue
        mutated = make_mutated_text(source.text, mutant.operator, mutant.occurrence)
        if is_change(source.text, mutated):
            change = mark_change(source.text, mutated)
            found.setdefault((mutant.function, change), {})[mutant.line] = mutated
    return found


def _play(source: Source, text: str, tests: Sequence[str], house: Path) -> dict[str, Any]:
    """Return pytest's exit code with a module of this source. It needs a process of its own."""
    signal.setitimer(signal.ITIMER_PROF, TEST_SECONDS)
    try:
        import_mutated(source.import_name, str(source.file), text)
    except Exception:
        return {"code": 1}
    pytest: Any = importlib.import_module("pytest")
    files = [str(house / test) for test in tests]
    # a test that this process imported before uses classes of modules that are forgotten now
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)) in files:
            del sys.modules[name]
    return {"code": int(pytest.main([*_OPTIONS, *files]))}
