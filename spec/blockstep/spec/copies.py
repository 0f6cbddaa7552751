"""Copies: a value with other fields. Each event makes several, of values that have many fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["replace"]

if TYPE_CHECKING:
    from dataclasses import replace
else:

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
