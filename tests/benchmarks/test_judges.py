"""Judges are taken away where they stand, missed where they should be, and shown if not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from benchmarks.judges.__main__ import RESULTS, SURVIVORS
from benchmarks.judges.campaign import Plan, find_mutants
from benchmarks.judges.changes import find_changes
from benchmarks.judges.listed import find_listed, get_lists, get_sentences
from benchmarks.judges.museum import CLEAN, HIDDEN, SHOWN, Entry, play_entry
from benchmarks.judges.mutants import (
    KINDS,
    Mutant,
    Source,
    Text,
    find_all,
    find_neutral,
    make_text,
    mark,
    read_sources,
)
from benchmarks.judges.mutants import find_mutants as find_in
from benchmarks.judges.page import render_page
from benchmarks.judges.patching import CannotPatchError, Reach, plant
from benchmarks.judges.playing import Trial, choose
from benchmarks.judges.results import get_score, is_good
from benchmarks.mutation.results import say_command
from benchmarks.mutation.runner import run_forked
from benchmarks.mutation.survivors import Explanation, judge, read_explanations

from blockstep.conformance.judge.properties import CHECKS_OF
from blockstep.conformance.lockstep.liveness import drain_bound
from blockstep.conformance.protocol.program import Drain, Program
from blockstep.spec.vocabulary import Abort, Config, Request, Schedule, Submit

HOUSE = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="mutants are played in forked processes"),
]

# What is found in a text.

SENTENCES = '''\
@sentence("P1", Schedule, Commit)
def all_is_well(step, ledger):
    """It is."""
    if step.is_odd:
        return [Complaint("odd")]
    for name in step.names:
        if name in ledger and name != "":
            yield unequal(f"{name!r}", 1, 2)
    yield from differing("names", (), step.names)
'''
VOICES = """\
class Worker:
    def look(self, row) -> list[Finding]:
        if row.count < 1:
            self._complain("P12", "row_runs_a_token", "none")
        self._findings.append(violated("P1", "all_is_well", f"{row}"))
        return self._findings


def find(row) -> Finding | None:
    if row:
        found = violated("P1", "all_is_well", "why")
        return found
    return find(row)
"""


SOURCES = read_sources()


@cache
def list_mutants() -> list[Mutant]:
    return [*find_listed(SOURCES), *find_all(SOURCES)]


def list_changes(module: str, text: str, fine: bool = False) -> dict[str, str]:
    source = Source(module, text)
    found = find_in(source, find_neutral([*SOURCES.values(), source]), fine)
    return {one.title: mark(text, one) for one in found}


def test_a_sentence_is_silenced_and_so_is_each_complaint() -> None:
    found = list_changes("judge/properties/pool.py", SENTENCES)
    assert found == {
        "sentence P1 all_is_well off": "{ => return ()}if step.is_odd:",
        "complaint pool.all_is_well 1": 'return [{Complaint("odd") => *()}]',
        "complaint pool.all_is_well 2": ('{yield unequal(f"{name!r}", 1, 2) => (yield from ())}'),
        "complaint pool.all_is_well 3": ('yield from {differing("names", (), step.names) => ()}'),
    }


def test_a_voice_is_silenced_and_a_finding_is_not_made() -> None:
    found = list_changes("judge/worker/worker.py", VOICES)
    assert found == {
        "voice P12 row_runs_a_token 1": (
            '{self._complain("P12", "row_runs_a_token", "none") => None}'
        ),
        "voice P1 all_is_well 1": (
            '{self._findings.append(violated("P1", "all_is_well", f"{row}")) => None}'
        ),
        "voice P1 all_is_well 2": "if {row => (False and (row))}:",
        "voice worker.find 1": "return {find(row) => None}",
    }


def test_finer_changes_leave_wording_alone() -> None:
    found = list_changes("judge/properties/pool.py", SENTENCES, fine=True)
    assert [change for title, change in found.items() if title.startswith("fine ")] == [
        "if {step.is_odd => (not (step.is_odd))}:",
        'if {name in ledger and name != "" => (not (name in ledger and name != ""))}:',
        'if {name in ledger and name != "" => ((name in ledger) or (name != ""))}:',
        'if {name in ledger and name != "" => (True and (name != ""))}:',
        'if {name in ledger and name != "" => ((name in ledger) and True)}:',
        'if {name in ledger => (name not in ledger)} and name != "":',
        'if name in ledger and {name != "" => (name == "")}:',
    ]


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x = 1 if a < b else 2", ["(a <= b)", "2", "3"]),
        ("x = 0 < a <= b", ["(0 <= a <= b)", "(0 < a < b)", "1"]),
        ("x = min(a, -(-b // c))", ["max", "(-b * c)"]),
        ("f(a)", ["None"]),
        ("assert a < b, a + b", []),
        ("shown(a + 1)", []),
    ],
)
def test_the_kinds_of_finer_changes(line: str, changed: list[str]) -> None:
    text = Text(f"{line}\n")
    assert sorted(new for _, new in find_changes(text.tree, text.get)) == sorted(changed)


def test_every_mutant_of_the_judges_is_another_program_with_a_name_of_its_own() -> None:
    found = list_mutants()
    titles = [one.title for one in found]
    assert len(set(titles)) == len(titles)
    assert {one.kind for one in found} == {*KINDS} - {"fine"}
    for one in found:
        if one.edit is not None:
            text = SOURCES[one.module].text
            assert compile(make_text(text, one.edit), one.module, "exec")
            assert make_text(text, one.edit) != text
    assert {f"sentence {title} off" for title in get_sentences()} <= {*titles}
    wanted = {
        "wiring drain_bound doubled",
        "wiring check_view in properties._tell 1",
        "wiring judge_state in safety.SafetyRun._judge_state 1",
        "wiring _what_matters ignores status",
        "wiring release_canary in check.search 1",
        "voice P24 drafts_are_the_last_scheduled_tokens 1",
    }
    assert wanted <= {*titles}


def test_what_begins_like_nothing_is_refused() -> None:
    with pytest.raises(LookupError, match="name a kind"):
        find_mutants(SOURCES, Plan(only=("judge/wicker",)))


def test_a_sample_is_drawn_by_its_seed() -> None:
    few = {name: SOURCES[name] for name in SOURCES if name.startswith("judge/worker/")}
    drawn = [find_mutants(few, Plan(("voice",), sample=5, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    fine = find_mutants(few, Plan(("fine", "voice"), fine=7))
    assert sum(one.kind == "fine" for one in fine) == 7
    assert sum(one.kind == "voice" for one in fine) > 7


# A change in a process of its own.


def in_a_fork(work: Any) -> Any:
    ((_, told),) = run_forked([work], 1, 60)
    return told


def get_mutant(title: str) -> tuple[Mutant, Source]:
    (one,) = [one for one in list_mutants() if one.title == title]
    return one, SOURCES[one.module]


def test_a_function_is_exchanged_wherever_it_is_held() -> None:
    live = {"A": Request("A", (1, 2), max_tokens=3)}

    def work() -> dict[str, Any]:
        plant(*get_mutant("wiring drain_bound doubled"))
        return {"bound": drain_bound(live)}

    assert in_a_fork(work) == {"bound": 2 * drain_bound(live)}


def test_a_sentence_is_taken_from_one_list_and_from_one_kind_of_event() -> None:
    title = "P1 every_block_is_free_or_held"
    one = get_sentences()[title]

    def work() -> dict[str, Any]:
        plant(*get_mutant(f"sentence {title} off in properties.JUDGED"))
        plant(*get_mutant("kind Abort of pool.every_block_is_free_or_held"))
        held = get_lists()
        return {
            "safety": one in held["properties.JUDGED"],
            "abort": one in CHECKS_OF[Abort],
            "schedule": one in CHECKS_OF[Schedule],
            "kinds": Abort in one.kinds,
        }

    told = {"safety": False, "abort": False, "schedule": True, "kinds": False}
    assert in_a_fork(work) == told
    assert one in get_lists()["properties.JUDGED"]
    assert one in CHECKS_OF[Abort]


def test_what_is_worked_out_at_import_is_no_mutant() -> None:
    one, source = get_mutant("wiring drain_bound doubled")
    gone = Mutant(one.kind, one.name, one.module, "no_such_function", one.lines, one.edit)
    with pytest.raises(CannotPatchError, match="no_such_function"):
        plant(gone, source)


def halve(number: int) -> int:
    if number % 2:
        return -1
    return number // 2


def test_lines_that_run_are_noted() -> None:
    assert isinstance(halve, FunctionType)
    first = halve.__code__.co_firstlineno
    with Reach([Path(__file__)]) as reach:
        halve(4)
        halve(2)
    assert reach.lines[__file__] == {first + 1, first + 3}
    assert sys.gettrace() is None


def test_a_mutant_meets_what_executes_it_and_the_quick_ones_first() -> None:
    one, _ = get_mutant("wiring drain_bound doubled")
    line = frozenset({one.lines[0]})
    trials = {
        name: Trial(name, seconds, {module: lines})
        for name, seconds, module, lines in [
            ("a.py::slow", 2.0, one.module, line),
            ("a.py::quick", 0.1, one.module, line),
            ("a.py::elsewhere", 0.1, one.module, frozenset({1})),
            ("museum:clean shown 0", 0.0, one.module, line),
        ]
    }
    corpus = {"museum:clean shown 0": Entry(CLEAN, SHOWN)}
    met = [trial.name for trial in choose(one, trials, corpus)]
    assert met == ["a.py::quick", "a.py::slow", "museum:clean shown 0"]


@pytest.mark.parametrize("how", [SHOWN, HIDDEN])
def test_an_exhibit_is_found_by_its_program_and_a_clean_engine_is_not(how: str) -> None:
    size = Config(num_blocks=2, block_size=1, max_num_batched_tokens=64, max_model_len=64)
    alike = (Submit(Request(name, (0,), max_tokens=1)) for name in "AB")
    program = Program(size, (*alike, Drain()))
    assert play_entry(Entry("full-hit", how, program))
    assert not play_entry(Entry(CLEAN, how, program))
    assert play_entry(Entry(CLEAN, how))


def test_a_sample_is_missed_by_the_tests() -> None:
    command = [
        *(sys.executable, "-m", "benchmarks.judges", "--only", "judge/worker/kv.py", "--jobs", "1"),
        *("--sample", "12", "--no-museum", "--tests", "test_voices"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HOUSE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "voice      100.0%" in done.stdout


# What is said about them.


def make_results(survivors: list[dict[str, Any]]) -> dict[str, Any]:
    run = {
        "day": "2026-11-22",
        "command": "python -m benchmarks.judges",
        "device": "a machine",
        "versions": {"python": "3.11"},
        "commit": "abc1234",
        "seed": 0,
        "tests": 400,
        "programs": 100,
        "seconds": 60,
    }
    killed = {"tests": 90 - len(survivors), "museum": 8, "hang": 2}
    voice = {"module": "voice", "mutants": 100, "killed": killed, "no_change": 0, "found": 100}
    return {
        "runs": [run],
        "modules": [voice],
        "noticed": {"test_worker": 90, "the museum": 8},
        "survivors": survivors,
    }


SURVIVOR = {"module": "voice", "function": "P26 x 1", "file": "f.py", "change": "{a => None}"}


def test_a_survivor_that_nobody_explains_stands_out() -> None:
    alone = judge(make_results([SURVIVOR]), [])
    assert not is_good(alone)
    assert "UNEXPLAINED" in render_page(alone)
    why = Explanation("Nothing is lost.", where=("voice P26",), lines=("{a => None}",))
    said = judge(make_results([SURVIVOR]), [why])
    assert is_good(said)
    assert get_score(said.results, said) == 1.0
    assert "Nothing is lost." in render_page(said)


def test_a_low_score_is_not_good() -> None:
    why = Explanation("It is a hole.", "holes", "hole", 4, lines=("{a => None}",))
    assert not is_good(judge(make_results([SURVIVOR] * 4), [why]))


def test_a_command_is_said_without_the_files_that_it_wrote() -> None:
    arguments = ["--fine", "300", "--journal", "a.jsonl", "--corpus", "b", "--jobs", "1"]
    said = say_command("benchmarks.judges", arguments)
    assert said == "python -m benchmarks.judges --fine 300 --jobs 1"


def test_the_last_results_are_good() -> None:
    results = json.loads(max(RESULTS.glob("*-judges-*.json")).read_text())
    verdicts = judge(results, read_explanations(SURVIVORS))
    assert is_good(verdicts)
    assert len(render_page(verdicts).splitlines()) <= 150
