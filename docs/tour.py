"""The tour of the specification: the core in reading order, then the features."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from types import FunctionType, ModuleType

from blockstep.spec import core
from blockstep.spec.core.feature import Feature
from blockstep.spec.features import FEATURES

HOOK = re.compile(r"hooks\.(\w+)")
NAME = re.compile(r"`(\w+)`")
SOURCE = re.compile(r"\s*Source: .*", re.DOTALL)


def list_order() -> list[str]:
    """Return the names of the modules of the core in the order in which `core` names them."""
    return NAME.findall(core.__doc__ or "")


def make_tour() -> str:
    """Return the page: the entry, each module of the core with its functions, and the features."""
    parts: list[str] = []
    for name in ("transition", *[f"core.{name}" for name in list_order()]):
        parts += describe_module(name, import_module(f"blockstep.spec.{name}"))
    parts.append("## Features\n\nIn the order in which they take part at every moment.\n")
    return "\n".join([*parts, *map(describe_feature, FEATURES), ""])


def describe_feature(feature: Feature) -> str:
    """Return the line of a feature: its moments, its events, and the functions of the core that it
    replaces."""
    moments = [one.name for one in fields(feature.hooks) if getattr(feature.hooks, one.name)]
    line = f"- {feature.name}: " + (", ".join(f"`{moment}`" for moment in moments) or "no moment")
    events = ", ".join(f"`{kind.__name__}`" for kind in feature.events)
    line += f"; events {events}" if events else ""
    replaced = ", ".join(f"`{one.__name__}`" for one in feature.instead)
    return line + (f"; in the place of {replaced}." if replaced else ".")


def describe_module(name: str, module: ModuleType) -> Iterator[str]:
    """Yield the section of a module: what it says of itself, and its functions in order."""
    title, _, rest = inspect.cleandoc(module.__doc__ or "").partition("\n\n")
    yield f"## {name}\n"
    yield " ".join(title.split()) + "\n"
    for paragraph in filter(None, rest.split("\n\n")):
        yield f"```\n{paragraph}\n```\n" if paragraph.startswith("  ") else f"{paragraph}\n"
    yield from [describe_function(one) for one in list_functions(module)]
    yield ""


def list_functions(module: ModuleType) -> list[FunctionType]:
    """Return the functions that a module defines, in the order of its lines."""
    own = [one for one in vars(module).values() if isinstance(one, FunctionType)]
    own = [one for one in own if one.__module__ == module.__name__ and one.__doc__]
    return sorted(own, key=lambda one: one.__code__.co_firstlineno)


def describe_function(function: FunctionType) -> str:
    """Return the line of a function: what it returns, and the moments at which it asks features."""
    summary = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]
    summary = " ".join(SOURCE.sub("", summary).split())
    hooks = dict.fromkeys(HOOK.findall(inspect.getsource(function)))
    moments = ", ".join(f"`{hook}`" for hook in hooks)
    return f"- `{function.__name__}`: {summary}" + (f" Features: {moments}." if hooks else "")
