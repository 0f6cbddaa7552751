"""Copies: values of many fields, and the same with other ones. Each event makes several."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["replace", "wide_dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as wide_dataclass
    from dataclasses import replace
else:
    from dataclasses import dataclass, make_dataclass
    from functools import partial, wraps

    def wide_dataclass(*, frozen, slots):
        """As `dataclass`, for many fields: its constructor takes half of the time or less.

        That of a frozen dataclass has `object` set each field, which is slow. Here a value is of
        another class while its fields are set, with the same slots and not frozen. A type checker
        is shown the other, which it knows. Not for fields that have a factory.
        Source: architecture D2.
        """
        return partial(_make_wide_class, frozen=frozen, slots=slots)

    def _make_wide_class(cls, **params):
        value_class = dataclass(**params)(cls)

        def freeze(self):
            self.__class__ = value_class

        open_class = make_dataclass(
            cls.__name__,
            value_class.__match_args__,
            namespace={"__post_init__": freeze},
            slots=True,
        )
        fill = open_class.__init__
        fill.__defaults__ = value_class.__init__.__defaults__

        @wraps(value_class.__init__)
        def __init__(self, *args, **kwargs):  # noqa: N807 it becomes one
            object.__setattr__(self, "__class__", open_class)
            fill(self, *args, **kwargs)

        value_class.__init__ = __init__
        return value_class

    def replace(value, /, **changes):
        """A copy of `value` with some fields changed. Source: architecture D2.

        As `dataclasses.replace`, in half of its time: every field of a state is an argument of its
        constructor, so nothing needs to be asked of each. A type checker is shown that one, which
        it knows.

        Raises:
            TypeError: `value` has no such field.
        """
        fields = [
            changes.pop(name) if name in changes else getattr(value, name)
            for name in value.__match_args__
        ]
        return type(value)(*fields, **changes)
