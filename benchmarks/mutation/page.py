"""Page on mutation: the last results of each target, with survivors and marks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._pages import make_table, quote_code
from benchmarks.mutation.campaign import get_score
from benchmarks.mutation.targets import TARGETS

HOW = """\
*Noticed* is the share of the played mutants that a trial noticed. A mutant meets the trials that
execute its statement, quick ones first. A sample is drawn by the seed. Functions only are changed,
by exchanging their code; changes of values that are worked out at import are not made.
"""


def render_page(all_results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's tables for the last results of each target."""
    parts = ["## Scores\n", _render_scores(all_results), HOW, "## Survivors\n"]
    rows = [
        (
            f"`{one['function']}` of `{one['module']}`",
            quote_code(one["change"]),
            str(one["trials"]),
        )
        for results in all_results
        for one in results["survivors"]
    ]
    if rows:
        parts.append(make_table(("function", "change that no trial noticed", "trials"), rows))
    else:
        parts.append("None.\n")
    parts += [_render_marks(all_results), _render_left_out()]
    return "\n".join(parts)


def _render_scores(all_results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in all_results:
        played = sum(count[0] for count in one["modules"].values())
        kinds = ", ".join(
            f"{name} {killed}/{number}" for name, (number, killed) in one["kinds"].items()
        )
        killers = ", ".join(f"{name} {count}" for name, count in one["killed_by"].items())
        run = [f"`{one['command']}`", f"seed {one['seed']}", one["day"], one["commit"]]
        run += [f"{one['not_made']} not made", f"{one['trials']} trials"]
        run += [f"{one['seconds'] / 60:.0f} min", one["device"]]
        counts = (f"{one['found']:,}", f"{played:,}", f"{get_score(one):.1%}")
        what = TARGETS[one["target"]].what
        rows.append((what, *counts, kinds, killers, ", ".join(run)))
    heads = ("target", "mutants", "played", "noticed", "of each kind", "noticed first by", "run")
    return make_table(heads, rows)


def _render_marks(all_results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the reasons of marked lines."""
    counts = Counter(reason for one in all_results for _, _, reason in one["marks"])
    text = (
        "## Lines that are not mutated\n\nNo program can tell a mutant of these lines from the "
        "original. Each ends with `# no-mutate: reason`.\n\n"
    )
    rows = [(reason, str(count)) for reason, count in counts.most_common()]
    return text + (make_table(("reason", "lines"), rows) if rows else "None.\n")


def _render_left_out() -> str:
    rows = [
        (f"`{module}`", reason)
        for target in TARGETS.values()
        for module, reason in target.left_out.items()
    ]
    return "## Modules that are not mutated\n\n" + make_table(("module", "why"), rows)
