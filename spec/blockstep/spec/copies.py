"""Copies: fast construction and replacement for values with many fields. Each event makes
several."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["replace", "set_class", "wide_dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as wide_dataclass
    from dataclasses import replace

    def set_class(value: object, value_class: type) -> None:
        """Give a value another class with the same slots."""
else:
    from dataclasses import dataclass, fields
    from dataclasses import replace as replace_narrow
    from functools import partial, wraps

    set_class = object.__dict__["__class__"].__set__

    def wide_dataclass(*, frozen, slots):
        """Return a decorator like `dataclass`, for many fields: construction takes a third of the
        time.

        The constructor of a frozen dataclass sets each field by `object`, which is slow. Here a
        value has its base class while its fields are set, which has the slots and is not frozen. A
        type checker sees the standard `dataclass`, which it knows. Equality compares fields without
        making tuples of them, which takes two thirds of the time. Not for fields that have a
        factory. Source: architecture D2.
        """
        return partial(_make_wide_class, frozen=frozen, slots=slots)

    def _make_wide_class(cls, **params):
        names = tuple(cls.__annotations__)
        open_class = type(cls.__name__, (), {"__slots__": names})
        no_slots = {"__dict__", "__weakref__"}
        body = {name: made for name, made in cls.__dict__.items() if name not in no_slots}
        value_class = dataclass(**params)(type(cls.__name__, (open_class,), body))
        known = {"open_class": open_class, "value_class": value_class, "set_class": set_class}
        compared = [field.name for field in fields(value_class) if field.compare]
        same = [
            f"(self.{name} is other.{name} or self.{name} == other.{name})" for name in compared
        ]
        lines = [
            f"def __init__(self, {', '.join(names)}):",
            "    set_class(self, open_class)",
            *[f"    self.{name} = {name}" for name in names],
            "    self.__class__ = value_class",
            "def _get_changed(self, changes):",
            "    copy = open_class()",
            *[f"    copy.{name} = self.{name}" for name in names],
            "    for name in changes:",
            "        setattr(copy, name, changes[name])",
            "    copy.__class__ = value_class",
            "    return copy",
            "def __eq__(self, other):",
            "    if other.__class__ is not self.__class__:",
            "        return NotImplemented",
            f"    return {' and '.join(same)}",
        ]
        exec("\n".join(lines), known)  # noqa: S102 of names of fields, as `dataclass` does
        init = known["__init__"]
        init.__defaults__ = value_class.__init__.__defaults__
        value_class.__init__ = wraps(value_class.__init__)(init)
        value_class.__eq__ = wraps(value_class.__eq__)(known["__eq__"])
        value_class._get_changed = known["_get_changed"]
        return value_class

    def replace(value, /, **changes):
        """Return a copy of `value` with some fields changed. Source: architecture D2.

        Like `dataclasses.replace`, which is slow for many fields. A type checker sees that one,
        which it knows.

        Raises:
            TypeError: `value` has no such field.
        """
        try:
            return value._get_changed(changes)
        except AttributeError as error:
            if not hasattr(value, "_get_changed"):
                return replace_narrow(value, **changes)
            known = type(value).__match_args__
            wrong = next(name for name in changes if name not in known)
            raise TypeError(f"{type(value).__name__} has no field {wrong!r}") from error
