"""Page: docs/reference/judges.md, from the numbers of a campaign and the words of a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks._pages import make_table
from benchmarks.judges.results import SCORE_MIN, get_score
from benchmarks.mutation.page import render_survivors
from benchmarks.mutation.survivors import Verdicts

CLASSES: Mapping[str, str] = {
    "sentence": "a sentence never speaks, or is not asked in one list: `renamed`, `safety`",
    "kind": "a sentence judges one kind of event less",
    "complaint": "one complaint of a sentence is not made",
    "wiring": "one finding of the lock-step is not made, one call of a judge does not take place; "
    "a bound is wider; of a state that returns more is ignored, or less",
    "voice": "one complaint of the worker, or of the worker on real memory, is not made",
    "fine": "a boundary moved, a condition negated, a clause left out, a number one more, a call "
    "or a loop cut, in what judges at `safety` and in all sentences",
}
INTRO = """\
# Judges on trial

<!-- Made by `make judges`; do not edit. The reasons: benchmarks/judges/survivors.toml. -->

A green is worth what its judges are worth. So each of them is taken away, one at a time, and
somebody must miss it: a test fails, or one of the museum's exhibits is not found any more, or a
clean engine is accused. Behind an engine that is compared with the specification a judge may sleep
unseen; at `safety` there is nothing else. So the museum is played at `safety`, where each exhibit
has the shortest program that `blockstep check` found, with its state shown and with it hidden.

## Scores
"""
HOW = """\
*Told apart* leaves out what is explained below as equivalent or unreachable; over all classes it is
{score:.1%}, and is to be at least {least:.0%}. *Hang* is a test that does not end, which is noticed
but tells nobody why. Each mutant meets the tests that execute the changed statement, quick ones
first, in a process forked from one that has collected them all; then the programs. Of the class
*fine* a sample drawn by the seed is played: `--fine` plays all.
"""


def render_page(verdicts: Verdicts) -> str:
    """The whole page."""
    results = verdicts.results
    least = get_score(results, verdicts)
    parts = [INTRO, _render_scores(verdicts), HOW.format(score=least, least=SCORE_MIN)]
    parts += [_render_noticed(results), render_survivors(verdicts), _render_run(results)]
    return "\n".join(parts)


def _render_scores(verdicts: Verdicts) -> str:
    rows = []
    for row in verdicts.results["modules"]:
        kind, killed = row["module"], row["killed"]
        score = verdicts.score(kind)
        counts = (row["mutants"], *(killed.get(name, 0) for name in ("tests", "museum", "hang")))
        left = score.mutants - score.killed
        shares = (f"{score.of_all:.1%}", f"{score.of_told_apart:.1%}")
        rows.append((f"{kind}: {CLASSES[kind]}", *map(str, counts), str(left), *shares))
    heads = ("class", "mutants", "tests", "museum", "hang", "nobody", "score", "told apart")
    return make_table(heads, rows)


def _render_noticed(results: Mapping[str, Any]) -> str:
    names = ", ".join(f"`{name}` {count}" for name, count in results["noticed"].items())
    return f"## Who noticed\n\nThe first that did, by test module: {names}.\n"


def _render_run(results: Mapping[str, Any]) -> str:
    lines = [
        f"`{run['command']}`, {run['seconds'] / 60:.0f} min, {run['day']}, {run['tests']} tests "
        f"and {run['programs']} programs, seed {run['seed']}; text of {run['commit']}; "
        f"{run['device']}; python {run['versions']['python']}."
        for run in results["runs"]
    ]
    unmade = sum(row["no_change"] for row in results["modules"])
    found = sum(row["found"] for row in results["modules"])
    told = f"{found} mutants were found in the text; {unmade} of those drawn are worked out when a "
    return "\n".join(["## Run\n", *lines, f"\n{told}module is imported, and were not made.\n"])
