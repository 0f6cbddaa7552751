"""Mutants of functions: how changes are found in the source, and how they are applied."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockstep.conformance.prove import changes
from blockstep.conformance.prove.laws import LAWS
from blockstep.conformance.prove.mutants import find_subjects, try_mutants
from blockstep.spec.core import block_pool


def list_new(body: str) -> list[str]:
    text = f"def f(a, b):\n    {body}\n"
    return [one.new for one in changes.find_changes(text)]


@pytest.mark.parametrize(
    ("body", "new"),
    [
        ("return a < b", ["(a <= b)"]),
        ("return 0 < a == b", ["(0 <= a == b)", "(0 < a != b)", "1"]),
        ("return a is not None", ["(a is None)"]),
        ("return a - (b + 1)", ["(a + (b + 1))", "(b - 1)", "2"]),
        ("return 1 if a else 2", ["(not (a))", "2", "3"]),
        ("return not a and b", ["((not a) or (b))", "((b))", "((not a))", "(a)"]),
        ("return min(a, True)", ["max", "False"]),
        ("return [x for x in a if x]", ["True"]),
        ("return replace(a, b=1, c=b)", ["replace(a, c=b)", "replace(a, b=1)", "2"]),
        ("return [g(a), *b]", ["*()", "*()"]),
        ("yield a", ["yield from ()"]),
        ("g(a)", ["pass"]),
        ("a.b = b", ["pass"]),
        ("a += b", ["pass"]),
        ("a = b", []),
        ("assert a < b, a + b", []),
        ("raise ValueError(a + b)", []),
        ("return (a,) * b", []),
        ('return f"{a + b}"', []),
        ("return Complaint(a + b)", ["return None"]),
        ("return Rejected(a, b + 1)", []),
        ("a = 1  # no-mutate: it is not read", []),
        ("a = b + 1  # no-mutate constant: it is not read", ["(b - 1)"]),
        ("# no-mutate: it is not read\n    # at all\n    a = 1", []),
    ],
)
def test_changes_of_each_kind_of_statement(body: str, new: list[str]) -> None:
    assert list_new(body) == new


def test_annotations_defaults_decorators_and_constants_are_not_changed() -> None:
    text = 'A = 1\n\n@g(1)\ndef f(a: "1 + 1" = 1) -> 1 + 1:\n    """1 + 1"""\n    b: 1 + 1 = a\n'
    assert not changes.find_changes(text)


@pytest.mark.parametrize("mark", ["# no-mutate", "# no-mutate:", "# no-mutate word: why"])
def test_a_mark_needs_a_reason(mark: str) -> None:
    with pytest.raises(ValueError, match="line 1: a mark is"):
        changes.find_marks(f"a = 1  {mark}\n")


def test_a_change_names_its_function_and_is_shown_in_its_line() -> None:
    text = "class A:\n    def f(self, a):\n        def g():\n            return a == 'é' != 1\n"
    (*_, last) = changes.find_changes(text)
    assert (last.function, last.kind, last.lines) == ("A.f", "constant", (4, 4))
    assert last.show(text) == "return a == 'é' != {1 => 2}"
    assert last.apply(text) == text.replace("1", "2")


def test_a_change_is_applied_to_a_loaded_function_and_undone() -> None:
    file = block_pool.__file__
    text = Path(file).read_text(encoding="utf-8")
    kept = block_pool.count_free
    (change,) = (
        one
        for one in changes.find_changes(text)
        if one.function == "count_free" and one.kind == "comparison"
    )
    one = block_pool.create_pool(4)
    assert kept(one, (1, 2)) == 2
    with changes.planted(change, text, file):
        assert kept(one, (1, 2)) == 0
    assert kept(one, (1, 2)) == 2


def test_a_function_that_is_not_loaded_cannot_be_changed() -> None:
    text = "def no_such_function(a):\n    return a + 1\n"
    with pytest.raises(changes.CannotPlantError, match="no_such_function"):
        changes.plant(changes.find_changes(text)[0], text, block_pool.__file__)


def test_mutants_of_a_law_are_of_the_functions_that_it_calls() -> None:
    law = LAWS["pool.blocks_are_taken_from_the_head_of_the_queue"]
    called, inner = find_subjects(law)
    assert {name for _, name in called} >= {"allocate_blocks", "find_block"}
    assert "withdraw_blocks" in {name for _, name in inner}
    tried = try_mutants(law)
    assert tried == try_mutants(law)
    assert tried.num_tried >= 8
    assert all("`" in mutant.name for mutant, _ in tried.refuted)
    assert tried.refuted
