"""Mutants are made where they mean something, caught where they should be, and shown if not."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutation.campaign import (
    Plan,
    get_stages,
    get_statement_lines,
    is_for,
    make_run,
    measure_reach,
)
from benchmarks.mutation.claims import find_broken_claims, list_claims, list_tests
from benchmarks.mutation.engines import BESIDE_TIERS, COLLIDING, COMPILED_ARRAYS
from benchmarks.mutation.journal import Journal, make_key
from benchmarks.mutation.mutants import (
    Source,
    find_excluded_spans,
    find_functions,
    find_mutants,
    find_sources,
    get_excluding_rule,
    get_innermost,
    is_change,
    make_mutated_text,
    mark_change,
)
from benchmarks.mutation.page import render_page
from benchmarks.mutation.results import dump, find_changed, find_unplayed, put_into, say_command
from benchmarks.mutation.runner import Outcome, Stage, forget, play_mutant, run_forked
from benchmarks.mutation.survivors import Explanation, judge, read_explanations

HOUSE = Path(__file__).parents[2]
SURVIVORS = HOUSE / "benchmarks" / "mutation" / "survivors.toml"
RESULTS = max((HOUSE / "benchmarks" / "results").glob("*-mutation-*.json"))

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants are played in forked processes"),
]

# Which changes are made.

TEXT = '''\
"""One - two."""

LIMIT: int | None = 1


def f(a: int | str, b: int) -> int | None:
    """Three - four."""
    assert a is not None, f"{b - 1}"
    if a == b:
        return Rejected(Code.BAD, f"{a - b}")
    return b - 1
'''


def write(folder: Path, text: str) -> Source:
    file = folder / "module.py"
    file.write_text(text)
    return Source("impl/host/module.py", "blockstep.impl.host.module", file)


def test_nothing_is_changed_in_what_nobody_reads() -> None:
    spans = list(find_excluded_spans(TEXT))
    found = {(rule, start[0]) for rule, start, _ in spans}
    assert found >= {
        ("docstring", 1),
        ("annotation", 3),
        ("annotation", 6),
        ("docstring", 7),
        ("assertion", 8),
        ("wording", 10),
    }
    assert get_excluding_rule("NumberReplacer", (3, 20), spans) is None
    assert get_excluding_rule("ReplaceBinaryOperator_Sub_Add", (11, 13), spans) is None
    assert get_excluding_rule("ReplaceBinaryOperator_Sub_Add", (1, 7), spans) == "docstring"
    assert get_excluding_rule("ReplaceBinaryOperator_Sub_Pow", (11, 13), spans) == "far arithmetic"
    assert get_excluding_rule("ReplaceComparisonOperator_Eq_Is", (9, 9), spans) == "identity"
    assert get_excluding_rule("ReplaceComparisonOperator_Is_IsNot", (9, 9), spans) is None


def test_the_mutants_of_a_module(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray")
    source = write(tmp_path, TEXT)
    mutants, excluded = find_mutants(source)
    assert {mutant.line for mutant in mutants} == {3, 9, 11}
    assert {mutant.function for mutant in mutants} == {"", "f"}
    assert excluded["annotation"] > 0
    assert excluded["assertion"] > 0
    for mutant in mutants:
        mutated = make_mutated_text(TEXT, mutant.operator, mutant.occurrence)
        assert is_change(TEXT, mutated)
        before, old, after = re.split(r"\{([^{}]*) => [^{}]*\}", mark_change(TEXT, mutated))
        assert before + old + after == TEXT.splitlines()[mutant.line - 1].strip()


def test_a_change_must_be_another_program() -> None:
    assert not is_change("x = 1\n", "x = (1)\n")
    assert not is_change("x = 1\n", "x = = 1\n")
    assert is_change("x = 1\n", "x = 2\n")


@pytest.mark.parametrize(
    ("before", "after", "marked"),
    [
        ("if n == 0:", "if n <= 0:", "if n {== => <=} 0:"),
        ("return rows[0]", "return rows[ -1]", "return rows[{0 => -1}]"),
        ("return -1", "return - 2", "return -{1 => 2}"),
        ("if is_full:", "if not is_full:", "if { => not}is_full:"),
        ("if key is not None:", "if key is  None:", "if key is {not => } None:"),
        ("a * 1_000 + b", "a // 1_000 + b", "a {* => //} 1_000 + b"),
        ("@final", "", "{@final => }"),
        ("f(0, 0)", "f(0, 1)", "f(0, {0 => 1})"),
    ],
)
def test_a_change_is_marked_in_its_line(before: str, after: str, marked: str) -> None:
    assert mark_change(before, after) == marked


def test_modules_are_found_in_their_rooms() -> None:
    found = {source.module: source for source in find_sources()}
    assert found["spec/lives/commit.py"].import_name == "blockstep.spec.lives.commit"
    assert found["impl/host/pool.py"].import_name == "blockstep.impl.host.pool"
    left_out = ("spec/vocabulary/", "spec/releases/", "impl/engine/", "spec/profiles.py")
    assert not [module for module in found if module.startswith(left_out)]


def test_what_only_a_compiler_reads_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray")
    text = '@compiled\ndef f(a):\n    return a\n\n\n@entry("int")\ndef g(a):\n    return a\n'
    assert find_mutants(write(tmp_path, text)) == ([], {"compiler": 2})


def test_places_are_named() -> None:
    text = "class C:\n    @property\n    def m(self):\n        return 1\n\nx = 1\n"
    functions = find_functions(text)
    assert get_innermost((2, 4), functions) == "C.m"
    assert get_innermost((4, 8), functions) == "C.m"
    assert get_innermost((6, 0), functions) == ""


def test_lines_of_a_statement_end_where_its_body_begins() -> None:
    text = "if (a and\n    b):\n    x = 1\nelif c:\n    y = (1,\n         2)\n"
    assert get_statement_lines(text, 2) == range(1, 3)
    assert get_statement_lines(text, 4) == range(4, 5)
    assert get_statement_lines(text, 6) == range(5, 7)


def test_an_unknown_module_is_refused() -> None:
    with pytest.raises(LookupError, match=r"impl/host/pool\.py"):
        find_sources(["impl/host/tool.py"])


# What becomes of them.

SHORT: tuple[Stage, ...] = (("host", "tiny", 400), ("host", "small", 400))


def play_changed(module: str, old: str, new: str, stages: tuple[Stage, ...] = SHORT) -> Any:
    """The outcome of one change, written by hand."""
    (source,) = find_sources([module])
    assert source.text.count(old) == 1
    text = source.text.replace(old, new)

    def work() -> dict[str, Any]:
        return asdict(play_mutant(source.import_name, str(source.file), text, stages, 0))

    ((_, result),) = run_forked([work], 1, 60)
    return Outcome(**result) if isinstance(result, dict) else result


def test_the_unmutated_code_survives() -> None:
    outcome = play_changed("impl/host/pool.py", "refs[block] += 1", "refs[block] += 1")
    assert outcome.killed_by == ""
    assert outcome.num_events >= 800


@pytest.mark.parametrize("engine", [BESIDE_TIERS, COLLIDING, COMPILED_ARRAYS])
def test_the_unmutated_code_survives_with_every_engine(engine: str) -> None:
    importlib.import_module("blockstep.impl.compiled")  # as machine code, which must be forgotten
    stages: tuple[Stage, ...] = ((engine, "small", 3_000),)
    outcome = play_changed("impl/host/pool.py", "refs[block] += 1", "refs[block] += 1", stages)
    assert outcome.killed_by == ""


def test_a_mutant_of_the_engine_is_killed_by_a_property() -> None:
    outcome = play_changed("impl/host/pool.py", "refs[block] += 1", "refs[block] += 2")
    assert outcome.killed_by == "property"
    assert outcome.detail.startswith("P1 ")


def test_a_mutant_of_groups_is_killed_where_each_run_has_some() -> None:
    old, new = "min(num_computed, self.size - 1)", "min(num_computed, self.size - 2)"
    stages: tuple[Stage, ...] = (("host", "small groups", 800),)
    assert play_changed("impl/host/kinds.py", old, new, stages).killed_by


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("impl/tiers/order.py", "for name in reversed(names):", "for name in names:"),
        ("spec/beside/tiers.py", "put(tiers, 0, name, kept)", "put(tiers, 1, name, kept)"),
    ],
)
def test_a_mutant_of_tiers_is_killed_where_both_orders_are_played(
    module: str, old: str, new: str
) -> None:
    stages: tuple[Stage, ...] = ((BESIDE_TIERS, "tiny", 400),)
    outcome = play_changed(module, old, new, stages)
    assert (outcome.killed_by, outcome.detail) == ("fault", "engine_raises_nothing")


COMPILED: tuple[Stage, ...] = (("compiled", "small", 400),)


def test_a_mutant_of_the_compiled_engine_is_killed_by_a_property() -> None:
    old, new = "s.blocks[block, REF_COUNT] += 1", "s.blocks[block, REF_COUNT] += 2"
    outcome = play_changed("impl/compiled/blocks.py", old, new, COMPILED)
    assert outcome.killed_by == "property"
    assert outcome.detail.startswith("P1 ")


def test_a_mutant_is_never_compiled() -> None:
    def work() -> dict[str, Any]:
        forget("blockstep.impl.compiled.blocks")
        compiled: Any = importlib.import_module("blockstep.impl.compiled")
        found = importlib.util.find_spec("numba")
        return {"is_compiled": compiled.IS_COMPILED, "numba": found is not None}

    assert list(run_forked([work], 1, 60)) == [(0, {"is_compiled": False, "numba": False})]


def test_a_leak_is_seen_where_it_is_looked_for() -> None:
    old, new = "s.nodes[before, NUM_USES] -= 1  #", "s.nodes[before, NUM_USES] -= 0  #"
    assert play_changed("impl/compiled/lives.py", old, new, COMPILED).killed_by == ""
    stages: tuple[Stage, ...] = ((COMPILED_ARRAYS, "small", 400),)
    assert (
        play_changed("impl/compiled/lives.py", old, new, stages).detail == "engine_raises_nothing"
    )


def test_a_mutant_of_what_the_engines_share_is_killed() -> None:
    old, new = "    if is_unfinished:\n", "    if not is_unfinished:\n"
    for stages in (SHORT, COMPILED):
        assert play_changed("impl/refusals.py", old, new, stages).killed_by == "property"


@pytest.mark.parametrize(
    ("module", "engines"),
    [
        ("spec/pool.py", ["host"]),
        ("spec/beside/tiers.py", [BESIDE_TIERS]),
        ("impl/tiers/order.py", [BESIDE_TIERS]),
        ("spec/step/schedule.py", ["host"]),
        ("impl/host/pool.py", ["host", COLLIDING]),
        ("impl/compiled/blocks.py", ["compiled", COMPILED_ARRAYS]),
        ("impl/arrays.py", ["host", COLLIDING, "compiled", COMPILED_ARRAYS]),
    ],
)
def test_a_mutant_meets_the_engines_of_its_wing(module: str, engines: list[str]) -> None:
    played = (BESIDE_TIERS, "host", COLLIDING, "compiled", COMPILED_ARRAYS)
    assert [one for one in played if is_for((one, "small", 1), module)] == engines


def test_a_mutant_of_the_specification_is_killed() -> None:
    old = "free_queue = (*pool.free_queue, *released)"
    outcome = play_changed("spec/pool.py", old, "free_queue = (*released, *pool.free_queue)")
    assert outcome.killed_by == "divergence"


def test_a_mutant_that_cannot_be_imported_is_killed() -> None:
    outcome = play_changed("spec/pool.py", "class Pool:", "class Tool:")
    assert outcome == Outcome("import", "ImportError", 0)


def test_a_mutant_that_loops_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.mutation.runner.EPISODE_SECONDS", 0.3)
    old = "while block == NULL_BLOCK:\n                head += 1"
    new = "while block == NULL_BLOCK:\n                head += 0"
    (source,) = find_sources(["impl/host/pool.py"])
    assert source.text.count(old) == 1
    assert play_changed("impl/host/pool.py", old, new) is signal.SIGPROF


def test_a_mutant_of_code_for_collisions_meets_the_engine_that_runs_it() -> None:
    old, new = "and self._indices[block] == index\n", "and self._indices[block] != index\n"
    assert play_changed("impl/host/prefix.py", old, new).killed_by == ""
    stages: tuple[Stage, ...] = ((COLLIDING, "small", 800),)
    assert play_changed("impl/host/prefix.py", old, new, stages).killed_by


def test_only_stages_that_execute_the_line_are_played() -> None:
    pytest.importorskip("cosmic_ray")
    stages: tuple[Stage, ...] = (("host", "tiny", 200), (COLLIDING, "tiny", 200))
    (source,) = find_sources(["impl/host/prefix.py"])
    reached = measure_reach([source], Plan(stages, ()), lambda *_: None)
    mutants, _ = find_mutants(source)
    runs = [make_run(one, source, reached) for one in mutants]
    played = [get_stages(run, stages) for run in runs if "_verified_hits" in run.mutant.function]
    assert played
    assert all(one == [stages[1]] for one in played)


def test_what_was_played_is_remembered(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    keys = [make_key("text", number) for number in range(4)]
    first = Journal(file)
    assert first.split(keys) == ([], [0, 1, 2, 3])
    results: list[Any] = [{"changed": False}, signal.SIGPROF, None]
    for key, result in zip(keys, results, strict=False):
        first.note(key, result)
    again = Journal(file)
    assert again.split(keys) == ([(0, results[0]), (1, results[1]), (2, None)], [3])
    assert again.split([make_key("another text", 0)]) == ([], [0])
    assert again.seconds == pytest.approx(first.seconds, abs=0.01)


def test_a_command_is_said_without_the_files_that_it_wrote() -> None:
    arguments = ["--only", "spec/", "--journal", "a.jsonl", "--jobs", "1", "--json", "b"]
    said = say_command("benchmarks.mutation", arguments)
    assert said == "python -m benchmarks.mutation --only spec/ --jobs 1"


def test_processes_are_told_apart() -> None:
    def answer(number: int) -> Any:
        return lambda: {"number": number}

    results = dict(run_forked([answer(number) for number in range(5)], 2, 60))
    assert results == {number: {"number": number} for number in range(5)}


def test_a_process_that_says_nothing_is_told_from_one_that_was_ended() -> None:
    def leave() -> dict[str, Any]:
        os._exit(3)

    def end() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    ended = dict(run_forked([leave, end], 1, 60))
    assert ended == {0: None, 1: signal.SIGTERM}


# What is said about them.


def make_results(survivors: list[dict[str, Any]]) -> dict[str, Any]:
    modules = [
        {
            "module": "impl/host/pool.py",
            "text": "0",
            "commit": "abc1234",
            "mutants": 20,
            "killed": {"property": 17, "timeout": 1},
            "no_change": 1,
            "excluded": {"annotation": 4},
        }
    ]
    run = {
        "day": "2026-11-21",
        "command": "make mutation",
        "device": "a machine",
        "versions": {"python": "3.11"},
        "seed": 0,
        "sample": None,
        "first": [["host", "tiny", 10]],
        "deep": [],
        "seconds": 60,
        "modules": ["impl/host/pool.py"],
    }
    return {
        "runs": [run],
        "modules": modules,
        "properties": {"P1 every_block_is_free_or_held": 17},
        "survivors": survivors,
    }


def make_survivor(change: str) -> dict[str, Any]:
    place = {"module": "impl/host/pool.py", "function": "BlockPool.free", "line": 64}
    return {**place, "change": change}


NEVER_NEGATIVE = Explanation(
    "A count is never negative.", "counts", changes=("== => <=", "!= => >"), lines=("if n {} 0",)
)


def explain(line: str, verdict: str = "equivalent", most: int = 1) -> Explanation:
    return Explanation("It is so.", "some of them", verdict, most, lines=(line,))


def test_a_survivor_that_nobody_explains_stands_out() -> None:
    survivors = [make_survivor("if n {== => <=} 0:"), make_survivor("a {| => &} b")]
    verdicts = judge(make_results(survivors), [NEVER_NEGATIVE])
    assert [one["change"] for one in verdicts.unexplained] == ["a {| => &} b"]
    assert not verdicts.is_good
    page = render_page(verdicts)
    row = (
        "| **UNEXPLAINED** | `BlockPool.free` of `impl/host/pool.py`, `` a {\\| => &} b `` |  | 1 |"
    )
    assert row in page
    assert page.index("`` a {\\| => &} b ``") < page.index("| counts |")
    assert "| `impl/host/pool.py` | 20 | 18 | 1 | 90.0% | 94.7% |" in page


def test_a_class_is_of_some_changes_in_some_lines_of_some_places() -> None:
    assert NEVER_NEGATIVE.is_about(make_survivor("if n {== => <=} 0:"))
    assert NEVER_NEGATIVE.is_about(make_survivor("if n {!= => >} 0 and k > 0:"))
    assert not NEVER_NEGATIVE.is_about(make_survivor("if n {== => >=} 0:"))
    assert not NEVER_NEGATIVE.is_about(make_survivor("if m {== => <=} 0:"))
    assert not NEVER_NEGATIVE.is_about(make_survivor("if n == 0 and k {== => <=} 0:"))
    survivor = make_survivor("row[K] {> => !=} 0")
    assert explain("row[...] {} 0").is_about(survivor)
    assert explain("row[K] {> => ...} 0").is_about(survivor)
    assert not explain("row[K] {> => ...=} 1").is_about(survivor)
    for where, is_there in (("impl/", True), ("impl/host/pool.py B", True), ("spec/", False)):
        assert Explanation("It is so.", where=(where,)).is_about(survivor) == is_there


def test_the_first_class_that_fits_is_taken() -> None:
    said = [explain("if n {} 0"), NEVER_NEGATIVE]
    verdicts = judge(make_results([make_survivor("if n {== => <=} 0:")]), said)
    assert [one for _, one in verdicts.explained] == said[:1]


def test_a_hole_is_not_good() -> None:
    verdicts = judge(make_results([make_survivor("a {| => &} b")]), [explain("a {} b", "hole")])
    assert not verdicts.unexplained
    assert len(verdicts.holes) == 1
    assert not verdicts.is_good
    assert "| hole | some of them: `BlockPool.free` of `impl/host/pool.py` |" in render_page(
        verdicts
    )


def make_good_results(*changes: str) -> dict[str, Any]:
    results = make_results([make_survivor(change) for change in changes])
    results["modules"][0] |= {"mutants": 40, "killed": {"property": 40 - len(changes)}}
    return results


def test_all_explained_and_enough_killed_is_good() -> None:
    verdicts = judge(make_good_results("if n {== => <=} 0:"), [NEVER_NEGATIVE])
    assert verdicts.is_good
    assert verdicts.score("impl/host").of_all == 0.975


def test_a_class_that_explains_nothing_is_not_good() -> None:
    said = [NEVER_NEGATIVE, explain("gone {} now")]
    results = make_good_results("if n {== => <=} 0:")
    verdicts = judge(results, said)
    assert verdicts.idle == said[1:]
    assert not verdicts.is_good
    assert "Explains nothing** any more: some of them" in render_page(verdicts)
    assert judge(results, said, is_whole=False).is_good  # other modules were not played


def test_a_class_that_explains_more_than_it_may_is_not_good() -> None:
    results = make_good_results("if n {== => <=} 0:", "if n {!= => >} 0:")
    verdicts = judge(results, [NEVER_NEGATIVE])
    assert verdicts.overfull == [NEVER_NEGATIVE]
    assert not verdicts.is_good
    assert "**Explains 2**, at most 1: counts" in render_page(verdicts)
    assert judge(results, [explain("if n {} 0", most=2)]).is_good


def test_what_was_played_later_takes_the_place_of_what_was_played_before() -> None:
    whole = make_results([make_survivor("a {| => &} b")])
    part = make_results([make_survivor("c {| => &} d")])
    part["modules"][0] |= {"text": "1", "mutants": 30}
    part["runs"][0] |= {"command": "later"}
    results = put_into(whole, part)
    assert [one["change"] for one in results["survivors"]] == ["c {| => &} d"]
    assert [one["mutants"] for one in results["modules"]] == [30]
    assert [run["command"] for run in results["runs"]] == ["later"]
    assert results["properties"] == {"P1 every_block_is_free_or_held": 34}
    page = render_page(judge(results, []))
    assert "| `later`, 1 min, 2026-11-21 | `impl/host/pool.py` |" in page
    assert "the text has changed" not in page


def test_results_have_a_line_for_each_module_and_each_survivor() -> None:
    results = make_results([make_survivor("a {| => &} b"), make_survivor("c {| => &} d")])
    assert json.loads(dump(results)) == results
    assert len(dump(results).splitlines()) == 13
    assert json.loads(dump(make_results([]))) == make_results([])


def test_a_run_tells_of_the_stages_that_its_modules_met() -> None:
    whole = make_results([])
    whole["runs"][0]["first"] = [["host", "tiny", 11], ["compiled", "tiny", 12]]
    page = render_page(judge(whole, []))
    assert "| 11 t host |" in page
    assert "12 t compiled" not in page


def test_a_module_of_which_a_sample_was_played_is_marked() -> None:
    whole, sampled = make_results([]), make_results([])
    sampled["runs"][0] |= {"sample": 20}
    row = "| `impl/host/pool.py` † | 20 |"
    part = put_into(whole, sampled)
    assert row in render_page(judge(part, []))
    assert "† A sample of its mutants was played." in render_page(judge(part, []))
    assert row not in render_page(judge(whole, []))
    assert row not in render_page(judge(put_into(part, make_results([])), []))


def test_a_module_that_has_changed_since_has_the_commit_that_was_played() -> None:
    results = make_results([])
    changed = find_changed(results["modules"])
    assert changed == {"impl/host/pool.py"}
    page = render_page(judge(results, []), changed)
    assert "| 90.0% | 90.0% | abc1234 |" in page
    assert "the text has changed since" in page
    assert "abc1234" not in render_page(judge(results, []))
    (source,) = find_sources(["impl/host/pool.py"])
    assert source.module in find_unplayed([])
    assert source.module not in find_unplayed(results["modules"])
    assert "Not played yet: `a`, `b`." in render_page(judge(results, []), (), ["a", "b"])
    assert not find_changed([{"module": source.module, "text": make_key(source.text)}])


def test_every_survivor_is_explained_and_every_class_is_needed() -> None:
    verdicts = judge(json.loads(RESULTS.read_text()), read_explanations(SURVIVORS))
    assert not verdicts.unexplained
    assert not verdicts.idle
    assert not verdicts.overfull
    assert verdicts.is_good


def test_the_page_counts_what_the_results_count() -> None:
    verdicts = judge(json.loads(RESULTS.read_text()), read_explanations(SURVIVORS))
    page, results = render_page(verdicts), verdicts.results
    for module in results["modules"]:
        killed = sum(module["killed"].values())
        row = rf"\| `{module['module']}`( †)? \| {module['mutants']} \| {killed} \|"
        assert bool(re.search(row, page)) == bool(module["mutants"]), module["module"]
    for heading in ("Not equivalent", "Equivalent"):
        table = page.partition(f"### {heading}\n")[2].partition("\n#")[0]
        shown = sum(int(count) for count in re.findall(r"\| (\d+) \|$", table, re.MULTILINE))
        is_same = heading == "Equivalent"
        said = [one for _, one in verdicts.explained if one]
        assert shown == sum((one.verdict == "equivalent") == is_same for one in said)
    for name, count in results["properties"].items():
        assert f"`{name}` {count}" in page


def test_tests_are_found_in_what_is_said_of_a_class() -> None:
    why = "Seldom drawn; tests/spec/test_a.py, tests/impl/test_b.py and test_c.py catch it."
    assert list_tests(why) == (
        "tests/spec/test_a.py",
        "tests/impl/test_b.py",
        "tests/impl/test_c.py",
    )
    assert list_tests("Nobody asks.") == ()


def test_a_claim_that_a_test_catches_a_mutant_is_tried() -> None:
    pytest.importorskip("cosmic_ray")
    place = {"module": "spec/beside/adapters.py", "function": "has_seat", "line": 1}
    changes = ("max_loras == {0 => -1}", "max_loras {== => <} 0")
    (source,) = find_sources(["spec/beside/adapters.py"])
    lines = [line.strip() for line in source.text.splitlines() if "max_loras == 0" in line]
    survivors = [
        {**place, "change": lines[0].replace("max_loras == 0", change)} for change in changes
    ]
    survivors.append({**place, "change": "no {such => line}"})
    why = ("tests/spec/test_adapters.py catches it.", "tests/spec/test_copies.py catches it.")
    said = [
        Explanation(why[0], "a", "unreachable", lines=("{0 => -1}",)),
        Explanation(why[1], "b", "unreachable", lines=("{== => <}",)),
        Explanation(why[0], "c", "unreachable", lines=("{such => line}",)),
    ]
    claims = list_claims(judge(make_results(survivors), said))
    assert len(claims) == 3
    broken = list(find_broken_claims(claims, HOUSE, 1))
    assert [line.split(" impl")[0].split(" spec")[0] for line in broken] == ["GONE", "NOT CAUGHT"]
    assert "{== => <}" in broken[1]


def test_every_test_that_is_named_is_there() -> None:
    named = {test for one in read_explanations(SURVIVORS) for test in list_tests(one.why)}
    assert named
    assert not [test for test in named if not (HOUSE / test).is_file()]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('[[fine]]\nwhy = "It is."\n', "needs a verdict"),
        ('[[equivalent]]\nlines = ["a {} b"]\n', "a why"),
        ('[[hole]]\nwhy = "It is."\nlines = ["a == b"]\n', "the place of the change"),
    ],
)
def test_an_explanation_must_be_one_that_there_can_be(
    tmp_path: Path, entry: str, problem: str
) -> None:
    file = tmp_path / "survivors.toml"
    file.write_text(entry)
    with pytest.raises(ValueError, match=problem):
        read_explanations(file)
