"""Plants: they make rules of the specification, or values of its state, wrong in a play."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from blockstep.conformance.protocol.changed_spec import ChangedSpec, link
from blockstep.spec.core.rules import Rules
from blockstep.spec.releases.quirk import Change
from blockstep.spec.vocabulary import Config
from play_support.play import Plant


def keep(rules: Rules, _config: Config) -> Rules:
    return rules


class Changeable(ChangedSpec):
    """The specification, until a change is made in the middle of a run."""

    change: Change = staticmethod(keep)

    def become(self, change: Change = keep, **fields: Any) -> None:
        """Take the rules of this change and other fields of the config from now on."""
        self.change = change
        config = replace(self.state.config, **fields)
        self._linked = link(change, config)
        self.state = replace(self.state, config=config, rules=self._linked.rules)


def becoming(change: Change) -> Plant:
    """Return a plant: the engine has the rules of this change from now on."""

    def plant(engine: Changeable) -> None:
        engine.become(change)

    return plant


def going_by(**fields: Any) -> Plant:
    """Return a plant: the engine has other fields in its config from now on."""

    def plant(engine: Changeable) -> None:
        engine.become(**fields)

    return plant


def answering(*functions: Callable[..., Any], by: Any) -> Plant:
    """Return a plant: these functions of the specification always return the value `by`."""

    def change(rules: Rules, _config: Config) -> Rules:
        for function in functions:
            rules = rules.replacing(function, lambda *_args, **_named: by)
        return rules

    return becoming(change)
