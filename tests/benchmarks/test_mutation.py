"""Mutants are made where they mean something, caught where they should be, and shown if not."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutation.__main__ import say_command
from benchmarks.mutation.campaign import (
    Plan,
    find_changed,
    find_unplayed,
    get_stages,
    get_statement_lines,
    is_for,
    make_run,
    measure_reach,
    put_into,
)
from benchmarks.mutation.engines import COLLIDING, COMPILED_ARRAYS
from benchmarks.mutation.journal import Journal, make_key
from benchmarks.mutation.mutants import (
    Source,
    find_excluded_spans,
    find_functions,
    find_mutants,
    find_sources,
    get_changed_lines,
    get_excluding_rule,
    get_innermost,
    is_change,
    make_mutated_text,
)
from benchmarks.mutation.page import Explanation, judge, read_explanations, render_page
from benchmarks.mutation.runner import Outcome, Stage, forget, play_mutant, run_forked

SURVIVORS = Path(__file__).parents[2] / "benchmarks" / "mutation" / "survivors.toml"

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
        before, _ = get_changed_lines(TEXT, mutated)
        assert before == TEXT.splitlines()[mutant.line - 1].strip()


def test_a_change_must_be_another_program() -> None:
    assert not is_change("x = 1\n", "x = (1)\n")
    assert not is_change("x = 1\n", "x = = 1\n")
    assert is_change("x = 1\n", "x = 2\n")


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


@pytest.mark.parametrize("engine", [COLLIDING, COMPILED_ARRAYS])
def test_the_unmutated_code_survives_with_every_engine(engine: str) -> None:
    importlib.import_module("blockstep.impl.compiled")  # as machine code, which must be forgotten
    stages: tuple[Stage, ...] = ((engine, "small", 3_000),)
    outcome = play_changed("impl/host/pool.py", "refs[block] += 1", "refs[block] += 1", stages)
    assert outcome.killed_by == ""


def test_a_mutant_of_the_engine_is_killed_by_a_property() -> None:
    outcome = play_changed("impl/host/pool.py", "refs[block] += 1", "refs[block] += 2")
    assert outcome.killed_by == "property"
    assert outcome.detail.startswith("P1 ")


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
        ("impl/host/pool.py", ["host", COLLIDING]),
        ("impl/compiled/blocks.py", ["compiled", COMPILED_ARRAYS]),
        ("impl/arrays.py", ["host", COLLIDING, "compiled", COMPILED_ARRAYS]),
    ],
)
def test_a_mutant_meets_the_engines_of_its_wing(module: str, engines: list[str]) -> None:
    played = ("host", COLLIDING, "compiled", COMPILED_ARRAYS)
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
    stages: tuple[Stage, ...] = ((COLLIDING, "small", 400),)
    assert play_changed("impl/host/prefix.py", old, new, stages).killed_by


def test_only_stages_that_execute_the_line_are_played() -> None:
    pytest.importorskip("cosmic_ray")
    stages: tuple[Stage, ...] = (("host", "tiny", 50), (COLLIDING, "tiny", 50))
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
    said = say_command(["--only", "spec/", "--journal", "a.jsonl", "--jobs", "1", "--json", "b"])
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
            "mutants": 20,
            "killed": {"property": 17, "timeout": 1},
            "no_change": 1,
            "excluded": {"annotation": 4},
        }
    ]
    return {
        "command": "make mutation",
        "device": "a machine",
        "versions": {"python": "3.11"},
        "seed": 0,
        "sample": None,
        "first": [["host", "tiny", 10]],
        "deep": [],
        "seconds": 60,
        "modules": modules,
        "properties": {"P1 every_block_is_free_or_held": 17},
        "survivors": survivors,
    }


def make_survivor(before: str, after: str) -> dict[str, Any]:
    place = {"module": "impl/host/pool.py", "function": "BlockPool.free", "line": 64}
    change = {"operator": "X", "before": before, "after": after}
    return {**place, **change, "reached": True, "events": 10}


def explain(verdict: str, before: str, after: str = "") -> Explanation:
    why = "A count is never negative."
    return Explanation("impl/host/pool.py", "BlockPool.free", before, verdict, why, after)


def test_a_survivor_that_nobody_explains_stands_out() -> None:
    survivors = [make_survivor("if n == 0:", "if n <= 0:"), make_survivor("a | b", "a & b")]
    verdicts = judge(make_results(survivors), [explain("equivalent", "if n == 0:", "if n <= 0:")])
    assert [one["before"] for one in verdicts.unexplained] == ["a | b"]
    assert not verdicts.is_good
    page = render_page(verdicts)
    assert "**UNEXPLAINED** (1)" in page
    assert page.index("`` a \\| b ``") < page.index("A count is never negative.")
    assert "| `impl/host/pool.py` | 20 | 18 | 1 | 90.0% | 94.7% |" in page


def test_an_explanation_is_about_one_change_of_one_line() -> None:
    one = explain("equivalent", "if n == 0:", "if n <= 0:")
    assert one.is_about(make_survivor("if n == 0:", "if n <= 0:"))
    assert not one.is_about(make_survivor("if n == 0:", "if n >= 0:"))
    assert explain("equivalent", "if n == 0:").is_about(make_survivor("if n == 0:", "if n > 0:"))


def test_a_hole_is_not_good_and_an_idle_explanation_is_named() -> None:
    survivors = [make_survivor("if n == 0:", "if n <= 0:"), make_survivor("a | b", "a & b")]
    said = [explain("equivalent", "if n == 0:"), explain("hole", "a | b"), explain("hole", "gone")]
    verdicts = judge(make_results(survivors), said)
    assert not verdicts.unexplained
    assert len(verdicts.holes) == 1
    assert not verdicts.is_good
    assert [one.before for one in verdicts.idle] == ["gone"]
    assert "Explains nothing any more" in render_page(verdicts)


def test_all_explained_and_enough_killed_is_good() -> None:
    results = make_results([make_survivor("if n == 0:", "if n <= 0:")])
    results["modules"][0]["killed"] = {"property": 19}
    verdicts = judge(results, [explain("equivalent", "if n == 0:")])
    assert verdicts.is_good
    assert verdicts.score("impl/host").of_all == 0.95


def test_what_was_played_later_takes_the_place_of_what_was_played_before() -> None:
    whole = make_results([make_survivor("a | b", "a & b")])
    part = make_results([make_survivor("c | d", "c & d")])
    part["modules"][0] |= {"text": "1", "mutants": 30}
    results = put_into(whole, part)
    assert [one["before"] for one in results["survivors"]] == ["c | d"]
    assert [one["mutants"] for one in results["modules"]] == [30]
    assert results["properties"] == {"P1 every_block_is_free_or_held": 34}
    page = render_page(judge(results, []))
    assert "Played later: `impl/host/pool.py`." in page
    assert "its text has changed" not in page.lower()


def test_a_run_tells_of_the_stages_that_its_modules_met() -> None:
    stages = [["host", "tiny", 11], ["compiled", "tiny", 12]]
    whole = make_results([]) | {"first": stages}
    assert "- 11 events of preset tiny" in render_page(judge(whole, []))
    assert "- 12 events" not in render_page(judge(whole, []))


def test_a_module_of_which_a_sample_was_played_is_marked() -> None:
    whole = make_results([])
    part = put_into(whole, make_results([]) | {"sample": 20})
    row = "| `impl/host/pool.py` † | 20 |"
    assert row in render_page(judge(part, []))
    assert "† A sample of its mutants was played." in render_page(judge(part, []))
    assert row not in render_page(judge(whole, []))
    assert row not in render_page(judge(put_into(part, make_results([])), []))


def test_a_module_that_has_changed_since_is_marked() -> None:
    results = make_results([])
    changed = find_changed(results["modules"])
    assert changed == {"impl/host/pool.py"}
    page = render_page(judge(results, []), changed)
    assert "| `impl/host/pool.py` \\* | 20 |" in page
    assert "\\* Its text has changed since it was played." in page
    (source,) = find_sources(["impl/host/pool.py"])
    assert source.module in find_unplayed([])
    assert source.module not in find_unplayed(results["modules"])
    assert "Not played yet: `a`, `b`." in render_page(judge(results, []), (), ["a", "b"])
    assert not find_changed([{"module": source.module, "text": make_key(source.text)}])


def test_what_is_written_about_survivors_is_well_formed() -> None:
    read_explanations(SURVIVORS)


def test_a_verdict_must_be_one_that_there_is(tmp_path: Path) -> None:
    file = tmp_path / "survivors.toml"
    line = 'module = "m"\nfunction = "f"\nbefore = "x"\nverdict = "fine"\nwhy = "It is."\n'
    file.write_text(f"[[survivor]]\n{line}")
    with pytest.raises(ValueError, match="needs a verdict"):
        read_explanations(file)
