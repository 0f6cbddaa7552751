"""Laws: statements about the specification that hold for all integers.

A law is a function of this shape, which CrossHair runs with symbolic arguments:

    def check_sentence(num_tokens: int, block_size: int) -> None:
        assert 0 <= num_tokens and 1 <= block_size          assumptions: leading asserts
        num_blocks = compute_num_blocks(...)                the specification's own function
        assert num_tokens <= num_blocks * block_size        guarantees

Mutants show that a law can fail: one-point changes of the functions that it calls, found in their
syntax trees (`mutants`). A law that no mutant breaks says nothing. A mistake is written by hand
only where no such change says the same: a rule of a release, or another policy. It takes those
parameters of the replaced function that it needs. It calls `right()` for the right result, and
`right(budget=0)` for the result with another argument and all others as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from blockstep.conformance.protocol.changed_spec import Right, fit_parameters
from blockstep.spec import features
from blockstep.spec.core.rules import STRICT_RULES

__all__ = ["Law", "LawModule", "Right", "WrongRule", "instead"]

R = TypeVar("R")

Claim = Callable[..., object]
PLACES = ("blockstep.spec", "blockstep.conformance.prove")
"""Packages whose modules may have imported a function by name, so that a mistake replaces it there.
"""


@dataclass(frozen=True, slots=True)
class WrongRule:
    """A mistake: one function replaced by a wrong one."""

    right: Any = field(repr=False)
    wrong: Any = field(repr=False)
    name: str
    """The name of the mistake, in words."""
    attribute: str
    """The name of the replaced function."""
    theirs: str = ""
    """The upstream number, if the mistake is a rule of vLLM 0.19.1; "" otherwise."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Run the body of a `with` statement with the mistake in every module that imported the
        right function by name.
        """
        owners = _importers(self.right, self.attribute)
        assert owners, f"no module uses {self.attribute}, which {self.name} replaces"
        # A hook is called by the function itself, which the rules replace.
        named, rules = vars(features), STRICT_RULES
        named["STRICT_RULES"] = rules.replacing(self.right, self.wrong)
        features.get_feature_rules.cache_clear()
        for owner in owners:
            setattr(owner, self.attribute, self.wrong)
        try:
            yield
        finally:
            named["STRICT_RULES"] = rules
            features.get_feature_rules.cache_clear()
            for owner in owners:
                setattr(owner, self.attribute, self.right)


def _importers(value: object, attribute: str) -> list[ModuleType]:
    """Return the modules in which a value has this name."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith((*PLACES, getattr(value, "__module__", PLACES[0])))
        and vars(module).get(attribute) is value
    ]


def instead(right: Callable[..., R], theirs: str = "") -> Callable[[Callable[..., R]], WrongRule]:
    """Return a decorator that makes a mistake, which replaces `right` wherever it is used."""
    return lambda wrong: WrongRule(
        right, fit_parameters(right, wrong), sentence_of(wrong), right.__name__, theirs=theirs
    )


def sentence_of(function: Callable[..., object]) -> str:
    """Return the name of a function, in words."""
    return function.__name__.removeprefix("check_").replace("_", " ")


@dataclass(frozen=True, slots=True)
class Law:
    """A statement that must hold for all arguments."""

    room: str
    check: Claim = field(repr=False)
    property_ids: tuple[str, ...]
    witness: tuple[int, ...]
    """Arguments that satisfy the assumptions; they show that some do."""
    twins: tuple[WrongRule, ...]
    """Mistakes that no mutant says as well."""
    is_slow: bool = False
    """Whether it is left out of the default selection."""

    @property
    def name(self) -> str:
        """The theme and the statement: `slots.blocks_hold_the_tokens`."""
        return f"{self.room}.{self.check.__name__.removeprefix('check_')}"

    @property
    def sentence(self) -> str:
        """The statement, in words."""
        return sentence_of(self.check)


class LawModule:
    """The laws of one theme."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.laws: list[Law] = []

    def law(
        self, property_ids: str, witness: tuple[int, ...], *twins: WrongRule, is_slow: bool = False
    ) -> Callable[[Claim], Claim]:
        """Return a decorator that registers a law; the function's name is `check_` and the
        statement.
        """

        def keep(check: Claim) -> Claim:
            ids = tuple(property_ids.split())
            self.laws.append(Law(self.name, check, ids, witness, twins, is_slow))
            return check

        return keep
