"""Each field that is read from an engine is changed in turn, and each time the run fails.

A new field of the vocabulary is found by its type: it must be met in some feature, or be listed in
`NEVER_MET` with a reason. The count of changes is printed (`pytest -s`); `make docs` has a page of
all changes.
"""

from __future__ import annotations

import sys

from play_support.changed import (
    NEVER_MET,
    OF_BLOCKS,
    WHY_NOT,
    change_in_features,
    list_owed,
    make_page,
)

from blockstep.conformance.lockstep.plan_equivalence import NOT_COMPARED as NOT_IN_A_PLAN
from blockstep.conformance.protocol.features import FEATURES
from blockstep.spec import vocabulary as v


def test_each_changed_field_is_found_in_each_feature() -> None:
    changes = change_in_features()
    total = sum(map(len, changes.features.values()))
    sys.stdout.write(f"{total} changes: {len(changes.met)} fields in {len(FEATURES)} features\n")
    assert changes.passed_over == []
    assert sorted(list_owed() - changes.met) == []
    assert not changes.met & NEVER_MET.keys()
    free = {(kind.__name__, name) for kind, names in NOT_IN_A_PLAN.items() for name in names}
    of_events = {field for field in changes.not_in_a_plan if hasattr(v, field[0])} - free
    assert {owner for owner, _ in of_events} <= {*OF_BLOCKS}
    assert WHY_NOT.keys() == {name for _, name in free}
    page = make_page(changes)
    assert f"**{total} changes, of {len(changes.met)} fields" in " ".join(page.split())
    assert all(f"\n{owner}.{name} " in page for owner, name in changes.met)
    assert "## Not compared" in page
