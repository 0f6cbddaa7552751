"""Parts: values that a feature or a release keeps in a state, a request or a row, and that the core
carries without reading them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from blockstep.spec.copies import replace
from blockstep.spec.frozen_map import FrozenMap

T = TypeVar("T")
Parts: TypeAlias = FrozenMap[str, Any]
"""Values by the name of their part, without those that equal `Part.absent`."""
NO_PARTS: Final[Parts] = FrozenMap()


class Holder(Protocol):
    """An object that has parts."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """The values of its parts."""


class Planned(Protocol):
    """A step while it is planned."""

    parts: dict[str, Any]
    notes: dict[str, Any]


class FrozenHolder(Protocol):
    """A frozen dataclass that has parts."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def parts(self) -> Parts:
        """The values of its parts."""


H = TypeVar("H", bound=FrozenHolder)


class Named(Generic[T]):
    """A value that has a name, and is `absent` where it is not stored."""

    __slots__ = ("absent", "name")

    def __init__(self, name: str, absent: T) -> None:
        self.name: Final = name
        self.absent: Final = absent


class Part(Named[T]):
    """One value of holders of one kind.

    A value that equals `absent` is not stored, so that states are equal, and hashed alike, whether
    a feature was never used or is back at its initial value.
    """

    __slots__ = ()

    def of(self, holder: Holder) -> T:
        """Return the value in `holder`, `absent` if there is none. Source: architecture D11."""
        parts = holder.parts
        found: T = self.absent if parts is NO_PARTS else parts.get(self.name, self.absent)
        return found

    def put(self, holder: H, value: T) -> H:
        """Return a copy of `holder` with this value. Source: architecture D11."""
        parts = holder.parts
        if value is parts.get(self.name, self.absent):
            return holder
        is_absent = value == self.absent
        parts = parts.without(self.name) if is_absent else parts.having(self.name, value)
        return replace(holder, parts=parts)

    def set(self, holder: Planned, value: T) -> None:
        """Set the value in a step that is planned. Source: architecture D11."""
        if value == self.absent:
            holder.parts.pop(self.name, None)
        else:
            holder.parts[self.name] = value


class Note(Named[T]):
    """One value that is remembered while a step is planned; it never gets into a state."""

    __slots__ = ()

    def of(self, step: Planned) -> T:
        """Return the value in `step`, `absent` if there is none. Source: architecture D11."""
        found: T = step.notes.get(self.name, self.absent)
        return found

    def set(self, step: Planned, value: T) -> None:
        """Set the value in `step`. Source: architecture D11."""
        step.notes[self.name] = value
