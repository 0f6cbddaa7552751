"""Changed fields: each field of an engine's answers and states is changed, and a run must notice.

In an episode of each feature, each field of an answer or a state is changed where it first has a
value, in a copy. The copy is compared as the run compares it: exactly, and as a plan alone. A test
uses this, and `make docs` makes a page from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

from blockstep.conformance.lockstep.driver import LockStep
from blockstep.conformance.lockstep.plan_equivalence import only_plan
from blockstep.conformance.protocol.compare import NOT_COMPARED
from blockstep.conformance.protocol.features import FEATURES
from blockstep.conformance.protocol.registry import SpecEngine
from blockstep.conformance.search.episodes import play_episode
from blockstep.conformance.search.options import CheckOptions
from blockstep.spec import vocabulary as v
from play_support.altered import alter

Field = tuple[str, str]
"""A type and one of its fields."""
NEVER_MET: dict[Field, str] = {
    ("Aborted", "ending_req_ids"): "an abort of the specification ends at once",
    (
        "OutputRow",
        "num_external_tokens",
    ): "engines alone report it; P21 compares it with their plans",
    ("Rejected", "detail"): "wording is free",
}
"""Fields that the specification never fills, and why."""
NUM_EPISODES = 1
"""Number of episodes of each feature."""
RARE = ("encoder", "kinds", "tiers")
"""Features with a field that few episodes fill: they get up to `NUM_RARE_EPISODES` episodes."""
NUM_RARE_EPISODES = 40
OF_BLOCKS = ("BlockStored", "BlockRemoved", "BlockCopy")
"""Records that are left out of a plan as a whole: they follow from which blocks are which."""


def list_fields(kinds: set[type], known: set[Field] | None = None) -> set[Field]:
    """Return the fields of these types, and of the records of the vocabulary in them."""
    found: set[Field] = set() if known is None else known
    for kind in kinds:
        hints = get_type_hints(kind)
        for part in fields(kind):
            if (kind.__name__, part.name) not in found:
                found.add((kind.__name__, part.name))
                list_fields(set(_list_records(hints[part.name])), found)
    return found


def _list_records(kind: Any) -> Iterator[type]:
    """Yield the dataclasses that an annotation names, without requests, which the driver made."""
    if isinstance(kind, type) and is_dataclass(kind) and kind is not v.Request:
        yield kind
    for inner in get_args(kind):
        yield from _list_records(inner)


def change_each(record: Any) -> Iterator[tuple[Field, Any]]:
    """Yield each field of a record that has a value, with a copy in which only that field differs.

    Of a tuple of records the first one is changed.
    """
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
    """The changed fields by feature, and the changes that a run did not notice."""

    def __init__(self) -> None:
        self.feature = ""
        self.features: dict[Field, set[str]] = defaultdict(set)
        self.passed_over: list[tuple[str, Field]] = []
        self.not_in_a_plan: set[Field] = set()

    def note(self, field: Field, is_noticed: bool) -> None:
        """Record that a field was changed in an answer or a state."""
        self.features[field].add(self.feature)
        if not is_noticed:
            self.passed_over.append((self.feature, field))

    @property
    def met(self) -> set[Field]:
        """Return the fields that were changed in some feature."""
        return {field for field, names in self.features.items() if names}


@contextmanager
def changing(changes: Changes) -> Iterator[None]:
    """Let each run compare also copies of the engine's answers with one field changed."""
    compare = LockStep._compare

    def compare_all(
        self: LockStep, event: Any, given: Any, expected: Any, seen: Any, after: Any
    ) -> Any:
        for field, other in change_each(seen):
            if changes.feature not in changes.features[field] and other != seen:
                found = [*self._diverge(given, expected, other, self._comparable(after))]
                changes.note(field, bool(found))
                if only_plan(other) == only_plan(expected):
                    changes.not_in_a_plan.add(field)
        for field, other in change_each(after):
            if changes.feature not in changes.features[field] and other != after:
                found = [*self._diverge(given, expected, seen, self._comparable(other))]
                changes.note(field, bool(found))
        return compare(self, event, given, expected, seen, after)

    with patch.object(LockStep, "_compare", compare_all):
        yield


def list_owed() -> set[Field]:
    """Return the fields that are compared in some feature: all but hints and `NEVER_MET`."""
    hints = {(kind.__name__, name) for kind, names in NOT_COMPARED.items() for name in names}
    return list_fields({*get_args(v.Observation), v.Snapshot}) - hints - NEVER_MET.keys()


def change_in_features() -> Changes:
    """Change every field in episodes of every feature."""
    changes, owed = Changes(), list_owed()
    more = [(name, index) for index in range(NUM_EPISODES, NUM_RARE_EPISODES) for name in RARE]
    with changing(changes):
        for name, index in [*product((one.name for one in FEATURES), range(NUM_EPISODES)), *more]:
            if index < NUM_EPISODES or owed - changes.met:
                changes.feature = name
                options = CheckOptions("spec", seed=7, with_features=(name,))
                assert play_episode(options, index, SpecEngine)[2] == []
    return changes


# The page.

INTRO = """`make docs` plays an episode of each feature, the specification against itself. In a
copy of each answer and each state it changes one field at a time, and the run has to notice:
**{total} changes, of {met} fields in {features} features**. A change that is not noticed fails the
build, and a test.

Each field is compared by `blockstep.conformance.protocol.compare` where an engine is held to every
answer and state: at `exact`, and at `renamed` once blocks have been given the same names. The
column `plan` says whether it is compared where an engine is held to its plans alone
(`EngineTraits.equivalence`), which is done by `blockstep.conformance.lockstep.plan_equivalence`. At
`safety` nothing is compared: [properties](properties.md) judge each answer without a reference.

Columns are features, by number; `x`: the field said something there and was changed, `.`: it said
nothing in that episode.
"""
WHY_NOT = {
    "block_ids": "the choice of blocks is free",
    "new_block_ids": "the choice of blocks is free",
    "all_token_ids": "sent again for the worker, which checks it",
    "num_output_tokens": "counted for the worker, which checks it",
    "finished_req_ids": "reported for the worker, which checks it",
    "remapped_req_ids": "the choice of blocks is free",
    "block_copies": "the choice of blocks is free",
    "num_common_prefix_blocks": "the choice of blocks is free",
    "new_block_ids_to_zero": "the choice of blocks is free",
    "num_cached_tokens": "the length of a hit depends on what is evicted",
    "num_external_tokens": "the length of a hit depends on what is evicted",
    "ending_req_ids": "when an aborted request ends is left to the engine",
    "kv_events": "they follow from which blocks are which",
}
"""Why a field of an answer is not compared in a plan, by its name."""


def make_page(changes: Changes) -> str:
    """Return the page: a table of fields and features for answers, and one for states."""
    assert changes.passed_over == [], changes.passed_over
    names = [one.name for one in FEATURES]
    total = sum(map(len, changes.features.values()))
    lines = [INTRO.format(total=total, met=len(changes.met), features=len(names))]
    lines += [f"{number}. {name}" for number, name in enumerate(names, 1)]
    in_answers = {owner for owner, _ in list_fields({*get_args(v.Observation)})}
    for title, is_answer in (("Answers", True), ("States", False)):
        met = sorted(one for one in changes.met if (one[0] in in_answers) is is_answer)
        numbers = "".join(f"{number:>3}" for number in range(1, len(names) + 1))
        lines += ["", f"## {title}", "", "```text", f"{'':44}plan{numbers}"]
        for owner, name in met:
            cells = "".join(
                f"{'x' if one in changes.features[owner, name] else '.':>3}" for one in names
            )
            plan = "yes" if is_answer and is_in_a_plan(changes, (owner, name)) else "no"
            lines.append(f"{owner + '.' + name:<44}{plan:>4}{cells}")
        lines.append("```")
    lines += ["", "## Not compared", "", "| field | where | why |", "| --- | --- | --- |"]
    lines += [
        f"| `{owner}.{name}` | plan | {explain_field(name)} |"
        for owner, name in sorted(changes.not_in_a_plan)
    ]
    lines.append("| all of a state | plan | an engine held to its plans need not show one |")
    lines += [
        f"| `{kind.__name__}.{name}` | anywhere | {why} |"
        for kind, names_of in NOT_COMPARED.items()
        for name, why in names_of.items()
    ]
    lines += [
        f"| `{owner}.{name}` | here | {why} |"
        for (owner, name), why in sorted(NEVER_MET.items())
        if (owner, name) != ("Rejected", "detail")
    ]
    return "\n".join([*lines, ""])


def is_in_a_plan(changes: Changes, field: Field) -> bool:
    """Return whether a field of an answer is compared at equivalence `plan`."""
    return field not in changes.not_in_a_plan


def explain_field(name: str) -> str:
    """Return why a field is not compared at equivalence `plan`."""
    return WHY_NOT.get(name, "the choice of blocks is free")
