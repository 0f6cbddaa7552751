"""Law: a sentence about the specification that holds for all integers, and mistakes that break it.

A law is a function of this shape, which CrossHair runs with symbolic arguments:

    def check_sentence(num_tokens: int, block_size: int) -> None:
        assert 0 <= num_tokens and 1 <= block_size          assumptions: leading asserts
        num_blocks = compute_num_blocks(...)                the specification's own function
        assert num_tokens <= num_blocks * block_size        guarantees

Twins keep a law honest. A twin is the same law with one function exchanged for a mistaken one, and
must be refuted: a law that no mistake breaks says nothing. A mistake names those parameters of
what it replaces that it looks at. With `right()` it gets the right answer, with `right(budget=0)`
the right answer to another question: with this budget, all else as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from types import ModuleType
from typing import Any, TypeVar

from blockstep.spec.strict import STRICT_RULES as STRICT

R = TypeVar("R")

Claim = Callable[..., object]
Right = Callable[..., R]
"""What a mistake replaces, with the arguments that were given."""
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
        rules: dict[str, Any] = {
            part.name: self.wrong
            for part in fields(STRICT)
            if getattr(STRICT, part.name) is self.right
        }
        owners = [self.owner] if self.owner else _importers(self.right, self.attribute)
        assert owners, f"nobody uses {self.attribute}, which {self.name} replaces"
        places = [
            *((owner, self.attribute, self.right, self.wrong) for owner in owners),
            *(
                (owner, "STRICT_RULES", STRICT, replace(STRICT, **rules))
                for owner in _importers(STRICT, "STRICT_RULES")
            ),
        ]
        for owner, attribute, _, wrong in places:
            setattr(owner, attribute, wrong)
        try:
            yield
        finally:
            for owner, attribute, right, _ in places:
                setattr(owner, attribute, right)


def _importers(value: object, attribute: str) -> list[type | ModuleType]:
    """The modules in which a value has this name."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith(PLACES) and vars(module).get(attribute) is value
    ]


def instead(right: Callable[..., R], theirs: str = "") -> Callable[[Callable[..., R]], Twin]:
    """Plant a mistake wherever the specification's function `right` is used."""
    return lambda wrong: Twin(
        right, _stand_in(right, wrong), sentence_of(wrong), right.__name__, theirs=theirs
    )


def instead_in(
    owner: type | ModuleType, attribute: str, theirs: str = ""
) -> Callable[[Callable[..., Any]], Twin]:
    """Plant a mistake in one place only: in one module, or a class or what it extends."""
    places = (owner,) if isinstance(owner, ModuleType) else owner.__mro__
    home = next(place for place in places if attribute in vars(place))
    right: Any = vars(home)[attribute]

    def plant(wrong: Callable[..., Any]) -> Twin:
        stand_in: object
        if isinstance(right, property):
            assert right.fget is not None
            stand_in = property(_stand_in(right.fget, wrong))
        else:
            stand_in = _stand_in(right, wrong)
        return Twin(right, stand_in, sentence_of(wrong), attribute, home, theirs)

    return plant


def _stand_in(right: Callable[..., R], wrong: Callable[..., R]) -> Callable[..., R]:
    """The mistake as a function that takes whatever `right` takes."""
    parameters = inspect.signature(right).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    wanted = tuple(inspect.signature(wrong).parameters)

    @wraps(wrong)
    def stand_in(*values: Any, **named: Any) -> R:
        given: dict[str, Any] = {**defaults, **named}
        given.update(zip(parameters, values, strict=False))
        given["right"] = partial(right, **given)
        return wrong(*[given[name] for name in wanted])

    return stand_in


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
    ) -> Callable[[Claim], Claim]:
        """Make a law of a function whose name is `check_` and a sentence."""

        def keep(check: Claim) -> Claim:
            ids = tuple(property_ids.split())
            self.laws.append(Law(self.name, check, ids, witness, twins, is_slow))
            return check

        return keep
