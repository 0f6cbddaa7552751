"""Each field of the vocabulary that is read of an engine is changed by one, and the run fails.

In one episode for each feature, each field of an answer or a state is changed where it first says
something, in a copy, and compared as the run compares it (exact, and plan). A field that the
vocabulary gains is found by its type: it must be met in some feature, or stand in `NEVER_MET` with
a reason. The count of changes is printed (`pytest -s`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any, get_args, get_type_hints

import pytest
from play_support.altered import alter

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.plans import NOT_COMPARED as NOT_IN_A_PLAN
from blockstep.conformance.lockstep.plans import only_plan
from blockstep.conformance.protocol.compare import NOT_COMPARED
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v

Field = tuple[str, str]
"""A type and one of its fields."""
NEVER_MET: dict[Field, str] = {
    ("Aborted", "ending_req_ids"): "an abort of the specification ends at once",
    ("OutputRow", "num_external_tokens"): "told by engines alone, and held to their plans (P21)",
    ("Rejected", "detail"): "wording is free",
}
"""Fields that the specification never fills, and why."""
NUM_EPISODES = 1
"""Of each feature."""
RARE = ("encoder", "kinds", "tiers")
"""Features with a field that few episodes fill: of these more episodes are played, up to this."""
NUM_RARE_EPISODES = 40


def list_fields(kinds: set[type], known: set[Field] | None = None) -> set[Field]:
    """The fields of these types, and of the records of the vocabulary in them."""
    found: set[Field] = set() if known is None else known
    for kind in kinds:
        hints = get_type_hints(kind)
        for part in fields(kind):
            if (kind.__name__, part.name) not in found:
                found.add((kind.__name__, part.name))
                list_fields(set(_list_records(hints[part.name])), found)
    return found


def _list_records(kind: Any) -> Iterator[type]:
    """The dataclasses that an annotation names, but for requests: they are the driver's own."""
    if isinstance(kind, type) and is_dataclass(kind) and kind is not v.Request:
        yield kind
    for inner in get_args(kind):
        yield from _list_records(inner)


def change_each(record: Any) -> Iterator[tuple[Field, Any]]:
    """Each field of a record, and of the first of the records in it, with the record in which it
    alone is another; of those only that say something."""
    for part in fields(record):
        value = getattr(record, part.name)
        if value is None or value == ():
            continue
        first = value[0] if isinstance(value, tuple) else value
        name = type(record).__name__, part.name
        if is_dataclass(first) and not isinstance(first, v.Request):
            for field, other in change_each(first):
                rest = (other, *value[1:]) if isinstance(value, tuple) else other
                changed = replace(record, **{part.name: rest})
                yield field, changed
                if is_dataclass(value):
                    yield name, changed
        if isinstance(value, v.Request):
            yield name, replace(record, request=replace(value, max_tokens=value.max_tokens + 1))
        elif not is_dataclass(value):
            yield name, replace(record, **{part.name: alter(value, part.name)})


class Changes:
    """What was changed, by field and feature, and what of it was passed over."""

    def __init__(self) -> None:
        self.feature = ""
        self.features: dict[Field, set[str]] = defaultdict(set)
        self.passed_over: list[tuple[str, Field]] = []
        self.not_in_a_plan: set[Field] = set()

    def note(self, field: Field, is_noticed: bool) -> None:
        """A field was changed in an answer or a state."""
        self.features[field].add(self.feature)
        if not is_noticed:
            self.passed_over.append((self.feature, field))


def change_in_runs(changes: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each run compare, beside what the engine answers, that with each field changed."""
    compare = LockStep._compare

    def compare_all(
        self: LockStep, event: Any, told: Any, expected: Any, seen: Any, after: Any
    ) -> Any:
        for field, other in change_each(seen):
            if changes.feature not in changes.features[field] and other != seen:
                found = [*self._diverge(told, expected, other, self._comparable(after))]
                changes.note(field, bool(found))
                if only_plan(other) == only_plan(expected):
                    changes.not_in_a_plan.add(field)
        for field, other in change_each(after):
            if changes.feature not in changes.features[field] and other != after:
                found = [*self._diverge(told, expected, seen, self._comparable(other))]
                changes.note(field, bool(found))
        return compare(self, event, told, expected, seen, after)

    monkeypatch.setattr(LockStep, "_compare", compare_all)


def test_each_field_that_is_changed_is_noticed_in_each_feature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = Changes()
    change_in_runs(changes, monkeypatch)
    hints = {(kind.__name__, name) for kind, names in NOT_COMPARED.items() for name in names}
    owed = list_fields({*get_args(v.Observation), v.Snapshot}) - hints - NEVER_MET.keys()
    more = [(name, index) for index in range(NUM_EPISODES, NUM_RARE_EPISODES) for name in RARE]
    for name, index in [*product((one.name for one in FEATURES), range(NUM_EPISODES)), *more]:
        met = {field for field, names in changes.features.items() if names}
        if index < NUM_EPISODES or owed - met:
            changes.feature = name
            options = CheckOptions("spec", seed=7, with_features=(name,))
            assert play_episode(options, index, SpecEngine)[2] == []
    met = {field for field, names in changes.features.items() if names}
    total = sum(map(len, changes.features.values()))
    sys.stdout.write(f"{total} changes: {len(met)} fields in {len(FEATURES)} features\n")
    assert changes.passed_over == []
    assert sorted(owed - met) == []
    assert not met & NEVER_MET.keys()
    free = {(kind.__name__, name) for kind, names in NOT_IN_A_PLAN.items() for name in names}
    of_events = {field for field in changes.not_in_a_plan if hasattr(v, field[0])} - free
    assert {owner for owner, _ in of_events} <= {"BlockStored", "BlockRemoved", "BlockCopy"}
