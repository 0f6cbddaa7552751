"""Rows that are built column by column equal those of their constructors."""

from __future__ import annotations

from blockstep.impl.objects import make_cached_rows, make_output_rows
from blockstep.spec.vocabulary import CachedRow, OutputRow


def test_rows_equal_those_of_the_constructors() -> None:
    columns = (["a", "b"], [((1,),), ((),)], [None, (4, 5)], [3, 4], [1, 0], [1, 2], [(), (7,)])
    made = make_cached_rows(*columns)
    assert made == [
        CachedRow("a", False, ((1,),), None, 3, 1, 1),
        CachedRow("b", False, ((),), (4, 5), 4, 0, 2, (7,)),
    ]
    assert all(type(row) is CachedRow for row in made)
    assert hash(made[0]) == hash(CachedRow("a", False, ((1,),), None, 3, 1, 1))
    outputs = make_output_rows(["a", "b"], [(1,), (2, 3)], [0, 5])
    assert outputs == [OutputRow("a", (1,)), OutputRow("b", (2, 3), num_cached_tokens=5)]
    assert repr(outputs[0]) == repr(OutputRow("a", (1,)))
