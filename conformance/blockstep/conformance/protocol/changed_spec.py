"""Changed specification: an engine that decides by the specification with some functions replaced.

A change is the same as that of a quirk: it returns the rules with functions replaced by name
(`Rules.replacing`). The specification calls some functions as `rules[function]` and most of them
directly. So that all can be replaced, they are made once more over namespaces of their own, in
which the name of a replaced function is bound to its replacement. The specification that judges
does not change.

Functions are made without their assertions: a check must see the consequences of a wrong decision,
as in any other engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from dis import get_instructions
from functools import cache, lru_cache, wraps
from inspect import signature
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeVar

from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State, create_state
from blockstep.spec.features import get_config_rules
from blockstep.spec.releases.quirk import Change
from blockstep.spec.transition import Accepted, transition
from blockstep.spec.vocabulary import Config, Event, Observation, Rejected

PACKAGES: Final = tuple(
    f"blockstep.spec.{name}" for name in ("core", "features", "idle", "transition")
)
"""Packages and modules whose functions can be replaced."""
NUM_KEPT: Final = 8
"""The most changed specifications that are kept: mostly episodes of one config follow each other.
"""

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
R = TypeVar("R")
Right = Callable[..., R]
"""The replaced function, with the arguments of the call."""


def fit_parameters(
    right: Callable[..., R], wrong: Callable[..., R], declared: Function | None = None
) -> Callable[..., R]:
    """Return a wrong function with the parameters of the function that it replaces.

    `wrong` takes those parameters that it needs, by their names. It may also take `right`:
    `right()` is the right result, and `right(budget=0)` the result with another argument and all
    others as they are.

    Args:
        right: The function that `right` calls.
        wrong: The function that decides.
        declared: The function with the parameters; by default it is `right`.
    """
    declaration = signature(declared or right)
    parameters = declaration.parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    wanted = tuple(signature(wrong).parameters)

    @wraps(wrong)
    def decide(*values: Any, **named: Any) -> R:
        given: dict[str, Any] = {**defaults, **named}
        given.update(zip(parameters, values, strict=False))

        def call(**others: Any) -> R:
            return right(*{**given, **others}.values())

        return wrong(*[call if name == "right" else given[name] for name in wanted])

    vars(decide)["__signature__"] = declaration
    return decide


@dataclass(frozen=True, slots=True)
class Linked:
    """The functions of the specification, made once more for one change."""

    create_state: Callable[[Config, Rules], State]
    transition: Callable[[State, Event], Accepted | Rejected]
    rules: Rules


class ChangedSpec(SpecEngine):
    """The specification with the change of its class."""

    change: Any
    """A `Change`, as a static method."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._linked: Linked | None = link(self.change, config)
        self.state = self._linked.create_state(config, self._linked.rules)

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the functions, which cannot be pickled."""
        return {**super().__getstate__(), "_linked": None}

    def apply(self, event: Event) -> Observation:
        """Apply one event; a rejection is returned (`Rejected`) and changes nothing."""
        if self._linked is None:
            self._linked = link(self.change, self.state.config)
        result = self._linked.transition(self.state, event)
        if isinstance(result, Rejected):
            return result
        self.state = result.state
        return result.observation


@lru_cache(maxsize=NUM_KEPT)
def link(change: Change, config: Config) -> Linked:
    """Return the functions of the specification with those that `change` replaces exchanged.

    Raises:
        ValueError: a replaced function is not one of the specification's.
    """
    modules = {one: ModuleType(one.__name__) for one in _list_modules()}
    for original, module in modules.items():
        vars(module).update(vars(original))
    spaces = {original.__name__: vars(module) for original, module in modules.items()}
    made: dict[Function, Function] = {}
    made.update({right: _make_again(right, spaces) for right in _list_functions()})
    strict = get_config_rules(config)
    called = dict(made)
    for right, by in strict.replaced.items():
        called[right] = called[made[right]] = made.get(by, by)
    rules: Rules = _LinkedRules(
        changes=frozenset({f"{change.__module__}.{change.__qualname__}"}),
        remake=(_remake_rules, (change, config)),
        replaced=called,
        hooks=strict.hooks,
        shows=strict.shows,
        made=made,
    )
    rules = change(rules, config)
    wrong = _list_wrong(rules, called, made)
    bound: dict[Any, Any] = {**made, **modules}
    for right, by in wrong.items():
        if right not in made:
            owner = _find_owner(right)
            members = {"__slots__": (), right.__name__: by}
            bound[owner] = type(owner.__name__, (bound.get(owner, owner),), members)
        elif right not in strict.replaced:  # else it is called by the rules, for a feature's sake
            bound[right] = by
    for name, (plain, tables) in _list_names().items():
        spaces[name].update({one: bound.get(value, value) for one, value in plain})
        spaces[name].update({one: _exchange(value, bound) for one, value in tables})
    again = {made[right]: by for right, by in wrong.items() if right in made}
    replaced = {right: again.get(by, by) for right, by in rules.replaced.items()}
    return Linked(bound[create_state], bound[transition], replace(rules, replaced=replaced))


def _list_wrong(
    rules: Rules, called: Mapping[Function, Function], made: Mapping[Function, Function]
) -> Mapping[Function, Function]:
    """Return what a change has replaced: the functions of the specification, and by what."""
    again = set(made.values())
    return {
        right: by
        for right, by in rules.replaced.items()
        if called.get(right) is not by and right not in again
    }


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _LinkedRules(Rules):
    """Rules of a changed specification."""

    made: Mapping[Function, Function] = field(default_factory=dict)
    """The function that was made for each function of the specification."""

    def replacing(self, function: F, by: F) -> Rules:
        """Return the rules with `by` in the place of `function`, whichever way it is called."""
        others: dict[Function, Function] = {function: by}
        if function in self.made:
            others[self.made[function]] = by
        return replace(self, replaced={**self.replaced, **others})


def _remake_rules(change: Change, config: Config) -> Rules:
    return link(change, config).rules


def _make_again(right: Function, spaces: Mapping[str, dict[str, Any]]) -> Function:
    """Return a function with the code of `right` that finds its names in the new module."""
    code, space = _get_code(right), spaces[right.__module__]
    by = FunctionType(code, space, right.__name__, right.__defaults__, right.__closure__)
    by.__kwdefaults__ = right.__kwdefaults__
    return by


@cache
def _get_code(function: Function) -> CodeType:
    """Return the code of a function without assertions."""
    code = function.__code__
    if not any(one.opname == "LOAD_ASSERTION_ERROR" for one in get_instructions(code)):
        return code
    return next(one for one in _compile(code.co_filename) if one.co_name == code.co_name)


@cache
def _compile(file: str) -> tuple[CodeType, ...]:
    """Return the code of each function of a module, without assertions."""
    source = Path(file).read_text(encoding="utf-8")
    module = compile(source, file, "exec", dont_inherit=True, optimize=1)
    return tuple(one for one in module.co_consts if isinstance(one, CodeType))


def _find_owner(method: Function) -> type[Any]:
    """Return the class of a method.

    Raises:
        ValueError: it is no method of the specification.
    """
    name, _, _ = method.__qualname__.rpartition(".")
    module = next((one for one in _list_modules() if one.__name__ == method.__module__), None)
    owner = vars(module).get(name) if module else None
    if not isinstance(owner, type):
        raise ValueError(f"{method.__qualname__} is no function of the specification")
    return owner


@cache
def _list_modules() -> tuple[ModuleType, ...]:
    return tuple(module for name, module in sys.modules.items() if name.startswith(PACKAGES))


@cache
def _list_functions() -> tuple[Function, ...]:
    return tuple(
        value
        for module in _list_modules()
        for value in vars(module).values()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
    )


Names = tuple[tuple[str, Any], ...]


@cache
def _list_names() -> Mapping[str, tuple[Names, Names]]:
    """Return, by module, names and values: modules, functions and classes; and tables of functions.

    Hooks of features are not among the tables, since they are called as `rules[hook]`.
    """
    every = dict.fromkeys((*_list_functions(), *_list_modules()))
    found: dict[str, tuple[Names, Names]] = {}
    for module in _list_modules():
        names = [(name, value) for name, value in vars(module).items() if not name.startswith("__")]
        kinds = FunctionType, ModuleType, type
        plain = [one for one in names if isinstance(one[1], kinds) and _is_ours(one[1])]
        tables = [
            one
            for one in names
            if isinstance(one[1], dict) and _exchange(one[1], every) is not one[1]
        ]
        found[module.__name__] = tuple(plain), tuple(tables)
    return found


def _is_ours(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return name.startswith(PACKAGES)


def _exchange(table: dict[Any, Any], bound: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a table whose values have functions as fields, with these functions exchanged."""
    if not table or not all(map(is_dataclass, table.values())):
        return table
    exchanged = {}
    for key, value in table.items():
        members = {one.name: getattr(value, one.name) for one in fields(value)}
        changes = {
            name: bound[member]
            for name, member in members.items()
            if isinstance(member, FunctionType) and member in bound
        }
        exchanged[key] = replace(value, **changes) if changes else value
    return exchanged
