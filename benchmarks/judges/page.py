"""Page on the judges: the numbers of a campaign, with reasons that are written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks._pages import make_table
from benchmarks.judges.playing import TESTS_SECONDS_MAX
from benchmarks.judges.results import SCORE_MIN, get_score, get_weighed_score
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
HOW = """\
*Told apart* leaves out the mutants that are explained below as equivalent or unreachable. Over all
played mutants it is {score:.1%}; it must be at least {least:.0%}. Of the class *fine* only a sample
is played, drawn by the seed (`--fine` plays all); if each class is weighted by its size in the
code, {weighed:.1%} are noticed. *Hang* is a test that does not end. Each mutant runs the tests that
execute the changed statement, quick ones first and for at most {seconds:g} s, in a process forked
from one that has collected them all; then it plays the programs of the seeded bugs.
"""


def render_page(verdicts: Verdicts) -> str:
    """Return the page's tables."""
    results = verdicts.results
    how = HOW.format(
        score=get_score(results, verdicts),
        weighed=get_weighed_score(results, verdicts),
        least=SCORE_MIN,
        seconds=TESTS_SECONDS_MAX,
    )
    parts = ["## Scores\n", _render_scores(verdicts), how]
    parts += [_render_noticed(results), render_survivors(verdicts), _render_run(results)]
    return "\n".join(parts)


def _render_scores(verdicts: Verdicts) -> str:
    rows = []
    for row in verdicts.results["modules"]:
        kind, killed = row["module"], row["killed"]
        score = verdicts.score(kind)
        counts = (
            row["found"],
            row["mutants"],
            *(killed.get(name, 0) for name in ("tests", "museum", "hang")),
        )
        left = score.mutants - score.killed
        shares = (f"{score.of_all:.1%}", f"{score.of_told_apart:.1%}")
        rows.append((f"{kind}: {CLASSES[kind]}", *map(str, counts), str(left), *shares))
    heads = (
        "class",
        "in the text",
        "played",
        "tests",
        "museum",
        "hang",
        "nobody",
        "score",
        "told apart",
    )
    return make_table(heads, rows)


def _render_noticed(results: Mapping[str, Any]) -> str:
    names = ", ".join(f"`{name}` {count}" for name, count in results["noticed"].items())
    return f"## Who noticed\n\nThe first that did, by test module: {names}.\n"


def _render_run(results: Mapping[str, Any]) -> str:
    lines = [
        f"`{run['command']}`, {run['seconds'] / 60:.0f} min after the unmutated run, {run['day']}, "
        f"{run['tests']} tests and {run['programs']} programs, seed {run['seed']}; "
        f"text of {run['commit']}; "
        f"{run['device']}; python {run['versions']['python']}. {run.get('note', '')}".rstrip()
        for run in results["runs"]
    ]
    unmade = sum(row["no_change"] for row in results["modules"])
    told = f"\nNot made, since they are worked out when a module is imported: {unmade}.\n"
    return "\n".join(["## Run\n", *lines, told])
