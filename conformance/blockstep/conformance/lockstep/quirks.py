"""Quirks met: whether a run saw each quirk of its profile decide, and where it just does not.

A profile that has a quirk too much, or a quirk that reaches too far, shows only just outside of
what the quirk is about. So both sides of each quirk are watched:

* it applies: without it the specification would have answered an event otherwise, or be otherwise;
* it does not apply: a decision that it replaces was asked, and nothing would have been otherwise.

Where all that it replaced gave the result that it has without the quirk, that is known at once.
Else the event is taken once more without the quirk: the first time, the second, the fourth, the
eighth and so on that it may have decided in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.spec import vocabulary as v
from blockstep.spec.profiles import QUIRKS, Profile, Quirk
from blockstep.spec.releases import (
    adapters,
    drafts,
    encoder,
    flight,
    get_rules,
    grammars,
    groups,
    sessions,
    states,
    telling,
    transfers,
)
from blockstep.spec.rules import Rules
from blockstep.spec.state import State
from blockstep.spec.strict import STRICT_RULES
from blockstep.spec.transition import Accepted, transition


def name_applied(quirk: Quirk) -> str:
    """The goal that a quirk was seen to decide."""
    return f"quirk {quirk} applies"


def name_spared(quirk: Quirk) -> str:
    """The goal that a quirk was asked, and did not decide."""
    return f"quirk {quirk} does not apply"


FEATURE_OF: Mapping[Quirk, str] = {
    story.quirk: feature
    for theme, feature in (
        (groups, "groups"),
        (states, "states"),
        (adapters, "adapters"),
        (encoder, "encoder"),
        (drafts, "drafts"),
        (flight, "async"),
        (sessions, "sessions"),
        (grammars, "masks"),
        (transfers, "transfers"),
        (telling, "events"),
    )
    for story in theme.STORIES
}
"""The feature of each quirk that has one; the others are of every run."""
OF_ANOTHER = (Quirk.PADDING_WAITS_AT_THE_END, Quirk.HIT_IS_COMPANY_ENOUGH)
"""Quirks that replace nothing by themselves: another one, which is watched, asks for them."""
UNMET: Mapping[str, str] = {
    **{
        name(quirk): "It changes nothing but the quirk admitted_with_padding."
        for quirk in OF_ANOTHER
        for name in (name_applied, name_spared)
    },
    **{
        name(Quirk.TRANSFERS_ARE_NO_WORK): "It is read from a state: no event asks for it."
        for name in (name_applied, name_spared)
    },
    name_spared(Quirk.LOADED_KEEP_THEIR_BLOCKS): "It is asked only where a request lacks blocks "
    "and another one holds some for a load that has arrived, and then it decides whether they go.",
}
"""Goals that no run has to reach, and why."""


def get_feature(goal: str) -> str | None:
    """The feature of the quirk of a goal, if it has one."""
    return FEATURE_OF.get(Quirk(goal.split()[1]))


def is_spared(goal: str) -> bool:
    """Whether a goal is that a quirk was asked and did not decide."""
    return goal == name_spared(Quirk(goal.split()[1]))


def tell_goal(goal: str) -> str:
    """The title of the quirk that a goal is about."""
    return next(story.title for story in QUIRKS if story.quirk == goal.split()[1])


def list_goals(profile: Profile, features: Collection[str] | None = None) -> list[str]:
    """Both sides of each quirk of a profile that has one of these features; None: of each."""
    quirks = [
        quirk
        for quirk in Quirk
        if quirk in profile.quirks and (features is None or FEATURE_OF.get(quirk) in features)
    ]
    return [goal for quirk in quirks for goal in (name_applied(quirk), name_spared(quirk))]


class WatchedSpec(SpecEngine):
    """The specification under a profile, which notes what the quirks did."""

    def __init__(self, config: v.Config, profile: Profile) -> None:
        super().__init__(config, profile)
        self.watch = QuirkWatch(config, profile.quirks)
        self.state = replace(self.state, rules=self.watch.rules)

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event, and note what the quirks did."""
        before = self.state
        self.watch.begin()
        seen = super().apply(event)
        self.watch.settle(before, event, seen, self.state)
        return seen


class QuirkWatch:
    """The rules of a profile, and what its quirks were seen to do."""

    def __init__(self, config: v.Config, quirks: frozenset[Quirk]) -> None:
        self.config, self.quirks = config, quirks
        self.met: set[str] = set()
        """Goals that were reached."""
        self._asked: dict[Quirk, bool] = {}
        """Quirks that were asked in this event: whether all gave the result of without."""
        self._num_asked = dict.fromkeys(quirks, 0)
        """Events in which a quirk may have decided."""
        rules = replace(STRICT_RULES, quirks=quirks, remake=(get_rules, (quirks, config)))
        flags: dict[str, Quirk] = {}
        for story in QUIRKS:
            if story.quirk in quirks:
                rules, changed = self._fold(story.quirk, rules, story.change(rules, config))
                flags |= dict.fromkeys(changed, story.quirk)
        self.rules = _watch_flags(rules, flags, self._note_flag)

    def begin(self) -> None:
        """An event comes."""
        self._asked = {}

    def settle(self, before: State, event: v.Event, seen: v.Observation, after: State) -> None:
        """An event was taken: note what its quirks did."""
        for quirk, is_as_without in self._asked.items():
            if is_as_without:
                self.met.add(name_spared(quirk))
                continue
            count = self._num_asked[quirk] = self._num_asked[quirk] + 1
            is_tried = count & (count - 1) == 0  # the first, and then fewer and fewer
            if is_tried and not {name_applied(quirk), name_spared(quirk)} <= self.met:
                is_applied = self._is_otherwise(quirk, before, event, seen, after)
                self.met.add(name_applied(quirk) if is_applied else name_spared(quirk))

    def _is_otherwise(
        self, quirk: Quirk, before: State, event: v.Event, seen: v.Observation, after: State
    ) -> bool:
        """Whether an event has another answer or state without a quirk, or fails an assertion."""
        without = get_rules(self.quirks - {quirk}, self.config)
        try:
            result = transition(replace(before, rules=without), event)
        except AssertionError:
            return True
        if not isinstance(result, Accepted):
            return bool(result != seen)
        return result.observation != seen or replace(result.state, rules=after.rules) != after

    def _fold(self, quirk: Quirk, before: Rules, after: Rules) -> tuple[Rules, list[str]]:
        """The rules with a quirk whose functions are watched, and the flags that it changed."""
        watched: dict[str, Any] = {}
        flags: list[str] = []
        for one in fields(Rules):
            old, new = getattr(before, one.name), getattr(after, one.name)
            if new is old or one.name in ("quirks", "remake"):
                continue
            if callable(new):
                watched[one.name] = self._compare(quirk, old, new)
            else:
                flags.append(one.name)
        return replace(after, **watched), flags

    def _compare(
        self, quirk: Quirk, old: Callable[..., Any], new: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function of a quirk, which notes whether the one that it replaces gives the same."""

        def ask(*args: Any) -> Any:
            found = new(*args)
            if not {name_applied(quirk), name_spared(quirk)} <= self.met:
                try:
                    is_same = bool(old(*args) == found)
                except AssertionError:
                    is_same = False
                self._asked[quirk] = is_same and self._asked.get(quirk, True)
            return found

        return ask

    def _note_flag(self, quirk: Quirk) -> None:
        self._asked[quirk] = False


def _watch_flags(rules: Rules, flags: dict[str, Quirk], note: Callable[[Quirk], None]) -> Rules:
    """The rules, of which each of some flags is noted when it is read."""
    values = {one.name: getattr(rules, one.name) for one in fields(Rules)}
    watched: Rules = _get_class(tuple(sorted(flags.items())))(**values)
    object.__setattr__(watched, "note", note)
    return watched


@cache
def _get_class(flags: tuple[tuple[str, Quirk], ...]) -> Any:
    """A class of rules that tells of each of these flags when it is read."""

    def make(name: str, quirk: Quirk) -> property:
        slot = Rules.__dict__[name]

        def get(self: Any) -> Any:
            self.note(quirk)
            return slot.__get__(self)

        return property(get, slot.__set__)

    told = {name: make(name, quirk) for name, quirk in flags}
    return type("WatchedRules", (Rules,), {"__slots__": ("note",), **told})
