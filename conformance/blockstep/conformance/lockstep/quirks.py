"""Quirks met: whether a run saw each quirk of its profile change a decision, and leave one
unchanged.

A superfluous quirk, or one that applies too widely, shows only in decisions just outside of its
condition. So there are two goals for each quirk:

* it applies: without it the specification would have given another answer or state at an event;
* it does not apply: a decision that it replaces was made, and the quirk changed nothing.

If all replaced functions gave the same result as without the quirk, the second goal is reached at
once. Otherwise the event is applied once more without the quirk: the first, second, fourth, eighth
time and so on that the quirk may have mattered in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import fields, replace
from typing import Any

from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features import get_config_rules
from blockstep.spec.profiles import QUIRKS, Profile, Quirk
from blockstep.spec.releases import (
    drafts,
    encoder,
    get_rules,
    grammars,
    groups,
    in_flight,
    kv_events,
    lora,
    mamba_state,
    sessions,
    transfers,
)
from blockstep.spec.transition import Accepted, transition


def name_applied(quirk: Quirk) -> str:
    """Return the name of the goal that a quirk changes a decision."""
    return f"quirk {quirk} applies"


def name_spared(quirk: Quirk) -> str:
    """Return the name of the goal that a quirk leaves a decision unchanged."""
    return f"quirk {quirk} does not apply"


FEATURE_OF: Mapping[Quirk, str] = {
    story.quirk: feature
    for theme, feature in (
        (groups, "groups"),
        (mamba_state, "states"),
        (lora, "adapters"),
        (encoder, "encoder"),
        (drafts, "drafts"),
        (in_flight, "async"),
        (sessions, "sessions"),
        (grammars, "masks"),
        (transfers, "transfers"),
        (kv_events, "events"),
    )
    for story in theme.STORIES
}
"""Feature of each quirk that has one; the others belong to every run."""
OF_ANOTHER = (Quirk.PADDING_WAITS_AT_MAX_MODEL_LEN, Quirk.PADDING_ON_HIT_WITHOUT_OTHER_REQUESTS)
"""Quirks that replace nothing by themselves, but change another one, which is watched."""
UNMET: Mapping[str, str] = {
    **{
        name(quirk): "It changes nothing but the quirk padding_on_admission."
        for quirk in OF_ANOTHER
        for name in (name_applied, name_spared)
    },
    **{
        name(Quirk.LOOP_SLEEPS_DURING_TRANSFERS): "It is read from a state: no event asks for it."
        for name in (name_applied, name_spared)
    },
    **{
        name(Quirk.RESET_WITHOUT_A_STORE_SUCCEEDS): "Runs reset a store only where there is one."
        for name in (name_applied, name_spared)
    },
    name_spared(
        Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS
    ): "It is asked only where a request lacks blocks "
    "and another one holds some for a load that has arrived, and then it decides whether they go.",
}
"""Goals that no run has to reach, with the reason."""
UNMET_WITH: Mapping[str, Mapping[str, str]] = {
    "events": {
        name_spared(Quirk.RESET_EVENT_IS_LATE): "With KV events each reset is an event.",
    },
    "states": {
        name(Quirk.LAST_TOKEN_IS_LOADED): "A store leaves the last token out for states."
        for name in (name_applied, name_spared)
    },
}
"""Goals that cannot be reached where every config has a feature, by its name, and why."""


def get_feature(goal: str) -> str | None:
    """Return the feature of the quirk of a goal, if it has one."""
    return FEATURE_OF.get(Quirk(goal.split()[1]))


def is_spared(goal: str) -> bool:
    """Return whether a goal is that a quirk leaves a decision unchanged."""
    return goal == name_spared(Quirk(goal.split()[1]))


def get_quirk_title(goal: str) -> str:
    """Return the title of the quirk of a goal."""
    return next(story.title for story in QUIRKS if story.quirk == goal.split()[1])


def list_goals(profile: Profile, features: Collection[str] | None = None) -> list[str]:
    """Return both goals of each quirk of a profile that has one of these features; None: of each
    quirk."""
    quirks = [
        quirk
        for quirk in Quirk
        if quirk in profile.quirks and (features is None or FEATURE_OF.get(quirk) in features)
    ]
    return [goal for quirk in quirks for goal in (name_applied(quirk), name_spared(quirk))]


class WatchedSpec(SpecEngine):
    """The specification under a profile, which records what the quirks change."""

    def __init__(self, config: v.Config, profile: Profile) -> None:
        super().__init__(config, profile)
        self.watch = QuirkWatch(config, profile.quirks)
        self.state = replace(self.state, rules=self.watch.rules)

    def apply(self, event: v.Event) -> v.Observation:
        """Apply one event, and record what the quirks change."""
        before = self.state
        self.watch.begin()
        seen = super().apply(event)
        self.watch.settle(before, event, seen, self.state)
        return seen


class QuirkWatch:
    """Rules of a profile, and the effects of its quirks that were seen."""

    def __init__(self, config: v.Config, quirks: frozenset[Quirk]) -> None:
        self.config, self.quirks = config, quirks
        self.met: set[str] = set()
        """Goals that were reached."""
        self._asked: dict[Quirk, bool] = {}
        """Quirks used in this event, with whether all their functions gave the same result as
        without them."""
        self._num_asked = dict.fromkeys(quirks, 0)
        """Number of events in which a quirk may have mattered."""
        rules = replace(
            get_config_rules(config), changes=quirks, remake=(get_rules, (quirks, config))
        )
        for story in QUIRKS:
            if story.quirk in quirks:
                rules = self._fold(story.quirk, rules, story.change(rules, config))
        self.rules = rules

    def begin(self) -> None:
        """Begin an event."""
        self._asked = {}

    def settle(self, before: State, event: v.Event, seen: v.Observation, after: State) -> None:
        """Record what the quirks changed in an event."""
        for quirk, is_as_without in self._asked.items():
            if is_as_without:
                self.met.add(name_spared(quirk))
                continue
            count = self._num_asked[quirk] = self._num_asked[quirk] + 1
            is_tried = count & (count - 1) == 0  # the 1st, 2nd, 4th, 8th and so on
            if is_tried and not {name_applied(quirk), name_spared(quirk)} <= self.met:
                is_applied = self._is_otherwise(quirk, before, event, seen, after)
                self.met.add(name_applied(quirk) if is_applied else name_spared(quirk))

    def _is_otherwise(
        self, quirk: Quirk, before: State, event: v.Event, seen: v.Observation, after: State
    ) -> bool:
        """Return whether an event has another answer or state without a quirk, or fails an
        assertion."""
        without = get_rules(self.quirks - {quirk}, self.config)
        try:
            result = transition(replace(before, rules=without), event)
        except AssertionError:
            return True
        if not isinstance(result, Accepted):
            return bool(result != seen)
        return result.observation != seen or replace(result.state, rules=after.rules) != after

    def _fold(self, quirk: Quirk, before: Rules, after: Rules) -> Rules:
        """Return the rules with a quirk whose functions are watched."""
        watched = after
        for function, by in after.replaced.items():
            if by is not before[function]:
                watched = watched.replacing(function, self._compare(quirk, before[function], by))
        return watched

    def _compare(
        self, quirk: Quirk, old: Callable[..., Any], new: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the function of a quirk, which records whether the replaced function gives the
        same, and leaves a step as it leaves it."""

        def ask(*args: Any, **named: Any) -> Any:
            if {name_applied(quirk), name_spared(quirk)} <= self.met:
                return new(*args, **named)
            copies = [_copy_step(arg) if isinstance(arg, Step) else arg for arg in args]
            found = new(*args, **named)
            try:
                is_same = bool(old(*copies, **named) == found) and copies == [*args]
            except AssertionError:
                is_same = False
            self._asked[quirk] = is_same and self._asked.get(quirk, True)
            return found

        return ask


def _copy_step(step: Step) -> Step:
    """Return a copy of a step that is being planned, with copies of its lists."""
    copied = {one.name: copy(getattr(step, one.name)) for one in fields(Step)}
    return Step(**copied | {"state": step.state})
