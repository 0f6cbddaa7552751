"""Law: a sentence about the specification that holds for all integers, and mistakes that break it.

A law is a function of this shape, which CrossHair runs with symbolic arguments:

    def check_sentence(num_tokens: int, block_size: int) -> bool:
        assert 0 <= num_tokens and 1 <= block_size          assumptions: leading asserts
        num_blocks = compute_num_blocks(...)                the specification's own function
        assert num_tokens <= num_blocks * block_size        guarantees
        return True

Twins keep a law honest. A twin is the same law with one function exchanged for a mistaken one, and
must be refuted: a law that no mistake breaks says nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from blockstep.spec.rules import Rules
from blockstep.spec.strict import STRICT_RULES as STRICT

P = ParamSpec("P")
R = TypeVar("R")

Claim = Callable[..., bool]
PLACES = ("blockstep.spec", "blockstep.conformance.prove")
"""Packages whose modules may have imported a function by name, so that a twin replaces it there."""


@dataclass(frozen=True, slots=True)
class Twin:
    """One function exchanged for a mistaken one."""

    right: object = field(repr=False)
    wrong: object = field(repr=False)
    name: str
    """The mistake, as a sentence."""
    attribute: str
    """What it replaces."""
    owner: type | ModuleType | None = None
    """The one place where it is replaced; None: wherever the function was imported by name."""
    theirs: str = ""
    """Where the mistake is vLLM 0.19.1's own rule, in our words: its upstream number."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """With the mistake in every place where the right one was."""
        rules = self._rules()
        places: list[tuple[object, str, object, object]] = [
            *((owner, self.attribute, self.right, self.wrong) for owner in self._owners()),
            *((owner, "STRICT_RULES", STRICT, rules) for owner in _importers(STRICT)),
        ]
        for owner, attribute, _, wrong in places:
            setattr(owner, attribute, wrong)
        try:
            yield
        finally:
            for owner, attribute, right, _ in places:
                setattr(owner, attribute, right)

    def _rules(self) -> Rules:
        """The strict rules with the mistake in the place of the right one, if they have it."""
        wrong: dict[str, Any] = {
            part.name: self.wrong
            for part in fields(STRICT)
            if getattr(STRICT, part.name) is self.right
        }
        return replace(STRICT, **wrong)

    def _owners(self) -> list[object]:
        if self.owner is not None:
            return [self.owner]
        found = _importers(self.right, self.attribute)
        assert found, f"nobody uses {self.attribute}, which {self.name} replaces"
        return found


def _importers(value: object, attribute: str = "STRICT_RULES") -> list[object]:
    """The modules in which a value has this name."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith(PLACES) and vars(module).get(attribute) is value
    ]


def instead(right: Callable[P, R], wrong: Callable[P, R], theirs: str = "") -> Twin:
    """The mistake `wrong` in the place of the specification's function `right`."""
    return Twin(right, wrong, sentence_of(wrong), right.__name__, theirs=theirs)


def instead_in(owner: type | ModuleType, attribute: str, wrong: Any, theirs: str = "") -> Twin:
    """The mistake `wrong` in one place only: in one module, or a class or what it extends."""
    places = (owner,) if isinstance(owner, ModuleType) else owner.__mro__
    home = next(place for place in places if attribute in vars(place))
    function: Any = wrong.fget if isinstance(wrong, property) else wrong
    name = sentence_of(function)
    return Twin(vars(home)[attribute], wrong, name, attribute, home, theirs)


def sentence_of(function: Callable[..., object]) -> str:
    """The name of a function, as a sentence."""
    return function.__name__.removeprefix("check_").replace("_", " ")


@dataclass(frozen=True, slots=True)
class Law:
    """A sentence that must hold for all arguments."""

    room: str
    check: Claim = field(repr=False)
    property_ids: tuple[str, ...]
    witness: tuple[int, ...]
    """Arguments that satisfy the assumptions, so that the law is about something."""
    twins: tuple[Twin, ...]
    is_slow: bool = False
    """Whether it is left out of the default subset."""

    @property
    def name(self) -> str:
        """Its room and its sentence: `slots.blocks_hold_the_tokens`."""
        return f"{self.room}.{self.check.__name__.removeprefix('check_')}"

    @property
    def sentence(self) -> str:
        """What holds."""
        return sentence_of(self.check)


class Room:
    """The laws of one theme."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.laws: list[Law] = []

    def law(
        self, property_ids: str, witness: tuple[int, ...], *twins: Twin, is_slow: bool = False
    ) -> Callable[[Callable[P, bool]], Callable[P, bool]]:
        """Make a law of a function whose name is `check_` and a sentence."""

        def keep(check: Callable[P, bool]) -> Callable[P, bool]:
            ids = tuple(property_ids.split())
            self.laws.append(Law(self.name, check, ids, witness, twins, is_slow))
            return check

        return keep
