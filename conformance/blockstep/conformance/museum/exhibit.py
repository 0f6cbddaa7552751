"""Exhibit: one planted defect, and how a page of the museum shows one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Engine = Any
else:
    Engine = object


class Defect(Engine):  # type: ignore[misc]
    """Methods that stand before those of the clean engine, or of one of its parts.

    Typed loosely on purpose: the museum reaches into an engine that it must not import
    (architecture D3).
    """


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One planted defect."""

    name: str
    title: str
    upstream: str
    """Where it happened, or the rule that it breaks."""
    properties: tuple[str, ...]
    """Properties that speak of it; any of them, or a divergence, kills it."""
    defect: type[Defect]
    wrong_fix_of: str = ""
    """The exhibit that this one was meant to repair, where it is a repair that was tried."""
    part: str = ""
    """The attribute of the engine that names the class of the part where it sits, if in one."""
    invisible: str = ""
    """Why no client and no worker can ever see it, if that is so: it is a matter of policy, speed
    or books. Then it is not to be found at `safety`, whatever is shown."""
    invisible_if_hidden: str = ""
    """Likewise, where only the state tells of it."""
    takes_groups: bool = False
    """Whether it is given several KV groups. A defect of one group need not run with more."""
    takes_states: bool = False
    """Whether recurrent groups are among them."""
    takes: str = ""
    """The feature that it is given besides, of those that are drawn late; by name."""


class Page:
    """The exhibits of one theme, in order of appearance."""

    def __init__(
        self, takes_groups: bool = False, takes_states: bool = False, takes: str = ""
    ) -> None:
        self.exhibits: list[Exhibit] = []
        self._takes: dict[str, object] = {"takes_groups": takes_groups}
        self._takes |= {"takes_states": takes_states, "takes": takes}

    def exhibit(
        self, title: str, upstream: str, properties: str, **more: str
    ) -> Callable[[type[Defect]], type[Defect]]:
        """Put a planted defect, named like its class, on this page; `more` are other fields."""

        def register(defect: type[Defect]) -> type[Defect]:
            name = re.sub(r"\B(?=[A-Z])", "-", defect.__name__).lower()
            told = tuple(properties.split())
            given: Any = {**self._takes, **more}
            self.exhibits.append(Exhibit(name, title, upstream, told, defect, **given))
            return defect

        return register


def collect(pages: Iterable[Page]) -> dict[str, Exhibit]:
    """All exhibits by name.

    Raises:
        ValueError: two exhibits have one name, or a wrong fix is of nothing that is shown.
    """
    exhibits: dict[str, Exhibit] = {}
    for page in pages:
        for entry in page.exhibits:
            if entry.name in exhibits:
                raise ValueError(f"exhibit {entry.name!r}: the name is taken; choose another")
            exhibits[entry.name] = entry
    for entry in exhibits.values():
        if entry.wrong_fix_of and entry.wrong_fix_of not in exhibits:
            raise ValueError(f"exhibit {entry.name!r}: there is no {entry.wrong_fix_of!r} to fix")
    return exhibits
