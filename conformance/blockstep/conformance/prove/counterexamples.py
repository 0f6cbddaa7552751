"""The result of a law for concrete integers, and the smallest integers that break it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from functools import cache
from itertools import chain, combinations, dropwhile, islice
from types import TracebackType

from blockstep.conformance.prove.law import Claim

NUM_TRIED_MAX = 100_000
"""The most argument tuples that are tried to make sure that none is smaller."""
NUM_HELD_MAX = 3_000
"""The most of them that may satisfy the assumptions: a law about whole plans takes a millisecond.
"""

Arguments = tuple[int, ...]


class Outcome(Enum):
    """The result of a law for concrete arguments."""

    HOLDS = "holds"
    NOT_ASSUMED = "not assumed"
    """The arguments do not satisfy the assumptions."""
    FAILS = "fails"
    """A guarantee is broken, or a function raised."""


def try_law(check: Claim, arguments: Arguments) -> Outcome:
    """Run a law in plain Python."""
    try:
        check(*arguments)
    except AssertionError as error:
        line = _line_within(check, error.__traceback__)
        return Outcome.FAILS if line >= find_first_line(check) else Outcome.NOT_ASSUMED
    except Exception:
        return Outcome.FAILS
    return Outcome.HOLDS


def _line_within(check: Claim, trace: TracebackType | None) -> int:
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code is check.__code__:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


@cache
def find_first_line(check: Claim) -> int:
    """Return the line of the first statement that is not an assumption.

    Raises:
        ValueError: it has not the shape of a law (see `law`); the words say why.
    """
    lines, start = inspect.getsourcelines(check)
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise ValueError("it must be a function of a module, written with def")
    body = [part for part in definition.body if not _is_docstring(part)]
    conclusion = list(dropwhile(lambda part: isinstance(part, ast.Assert), body))
    if len(conclusion) == len(body):
        raise ValueError("it must start with its assumptions: asserts")
    rest = [node for part in conclusion for node in ast.walk(part)]
    if not any(isinstance(node, ast.Assert) for node in rest):
        raise ValueError("no guarantee: all leading asserts are assumptions")
    if any(isinstance(node, ast.Return) for node in rest):
        raise ValueError("it must not return before its end: put the condition into an assumption")
    return start + conclusion[0].lineno - 1


def _is_docstring(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def find_smallest(check: Claim, failing: Arguments) -> Arguments:
    """Return arguments that break the law: those of the least sum, if as many can be tried.

    First each argument is lowered as long as the law stays broken. Then all smaller arguments are
    tried in order of their sum.
    """
    lowered = _lower(check, failing)
    smaller = (
        arguments
        for total in range(sum(map(abs, lowered)) + 1)
        for arguments in _all_of_size(total, lowered)
    )
    num_held = 0
    for arguments in islice(smaller, NUM_TRIED_MAX):
        outcome = try_law(check, arguments)
        if outcome is Outcome.FAILS:
            return arguments
        num_held += outcome is Outcome.HOLDS
        if num_held == NUM_HELD_MAX:
            break
    return lowered


def _lower(check: Claim, failing: Arguments) -> Arguments:
    best: Arguments | None = failing
    while best is not None:
        failing = best
        broken_by = (one for one in _smaller(best) if try_law(check, one) is Outcome.FAILS)
        best = next(broken_by, None)
    return failing


def _smaller(arguments: Arguments) -> Iterator[Arguments]:
    """Yield the arguments with one or two of them lowered, by large steps first, two by the same
    step.
    """
    numbers = [at for at, value in enumerate(arguments) if not isinstance(value, bool)]
    for places in chain(combinations(numbers, 1), combinations(numbers, 2)):
        step = min(arguments[at] for at in places)
        while step > 0:
            yield tuple(
                value - step if at in places else value for at, value in enumerate(arguments)
            )
            step //= 2


def _all_of_size(total: int, like: Arguments) -> Iterator[Arguments]:
    """Yield all non-negative arguments of this sum; booleans at the places where `like` has
    them.
    """
    if not like:
        if total == 0:
            yield ()
        return
    for first in (False, True) if isinstance(like[0], bool) else range(total + 1):
        if first <= total:
            for rest in _all_of_size(total - first, like[1:]):
                yield (first, *rest)
