"""Witnesses: the coverage goals that a run reached, without which its pass counts for less (D9).

Each goal has a name and one line, next to the code that counts it. Goals are counted from steps and
the history only, like the property checks; counts of several runs or processes add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from blockstep.conformance.judge.checks import ANSWER_TYPES
from blockstep.conformance.judge.coverage_goals import core
from blockstep.conformance.judge.goals import Find, Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.protocol.features import is_off, load_parts
from blockstep.spec import vocabulary as v

OF_FEATURES: Mapping[str, Goals] = {
    name: module.GOALS for name, module in load_parts("goals").items()
}
WITNESSES: Mapping[str, str] = {
    name: text
    for goals in (core.GOALS, *OF_FEATURES.values(), core.REFUSALS)
    for name, text in goals.texts.items()
}
"""All goals by name, with what they mean."""


def situations(step: Step, history: History) -> list[str]:
    """Return the goals that a step reaches, each as often as it does.

    `history` knows all steps before it.
    """
    event: type = type(step.event)
    answer: type = type(step.observation)
    found: list[str] = []
    for find in _list_finders(event, answer, history.lacked):
        found += find(step, history)
    return found


@cache
def _list_finders(event: type, answer: type, lacked: frozenset[str]) -> tuple[Find, ...]:
    """Return the functions that find the goals of steps of these types, those of features that a
    config does not switch off among them.

    There are none if no event of the type is answered so.
    """
    kind = v.Rejected if answer is v.Rejected else event
    if kind is event and answer not in ANSWER_TYPES.get(event, ()):
        return ()
    return tuple([goals.find[kind] for goals in _list_goals(lacked) if kind in goals.find])


@cache
def _list_goals(lacked: frozenset[str]) -> tuple[Goals, ...]:
    """Return the goals of every engine and those of the features that a config does not switch
    off."""
    asked = [goals for name, goals in OF_FEATURES.items() if not is_off(name, lacked)]
    return (core.GOALS, core.REFUSALS, *asked)
