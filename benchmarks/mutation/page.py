"""Page on mutation: the numbers of a campaign, with reasons that are written by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from benchmarks._pages import make_table, quote_code
from benchmarks.mutation.campaign import is_for
from benchmarks.mutation.engines import BESIDE_TIERS, COLLIDING, COMPILED_ARRAYS
from benchmarks.mutation.mutants import RULES, WHOLE_MODULES, WINGS, is_in
from benchmarks.mutation.runner import EPISODE_SECONDS, Stage
from benchmarks.mutation.survivors import SCORE_MIN, VERDICTS, Explanation, Verdicts

ENGINES: Mapping[str, tuple[str, str]] = {
    "host": ("host", "the host engine"),
    COLLIDING: ("colliding", "the host engine with a digest of two bits, so that contents collide"),
    BESIDE_TIERS: (
        "beside tiers",
        "the host engine, and at each event the order of tiers beside the specification's",
    ),
    "host-vector": ("host-vector", "the host engine with its code for many rows, which is gone"),
    "benchmarks.mutation.engines:Arrays": ("host arrays", "the same, plans and answers in arrays"),
    "compiled": ("compiled", "the compiled engine, as the Python that it is"),
    COMPILED_ARRAYS: (
        "compiled arrays",
        (
            "the same, plans and answers in arrays; tables grow row by row, contents collide, and "
            "what is in use is counted after each event, so that no leak is overlooked"
        ),
    ),
}
"""What is played: a short name, and what it is."""

HOW = """\
A mutant is killed if its run has a finding, or if it cannot be imported, raises, or does not come
back (*loops*: {seconds:g} s of processor time in one episode). The changes are those of cosmic-ray,
and each mutant is played in a process forked from one that has imported everything. A mutant plays
only where the unchanged code executes the changed line; one that is executed nowhere survives
without being played. A mutant of the specification is played with `host` only. The compiled engine
is played without numba. *Score* is the share of all mutants that are killed. *Told apart* leaves
out the mutants that are explained below as equivalent or unreachable; it must be at least
{least:.0%} for each engine.
"""
FEW = 7
"""Classes of fewer equivalent mutants share a row."""


def render_page(
    verdicts: Verdicts, changed: Collection[str] = (), unplayed: Collection[str] = ()
) -> str:
    """Return the page's tables; the text of the modules in `changed` has changed since they ran."""
    parts = [_render_scores(verdicts, changed)]
    if unplayed:
        parts.append(f"Not played yet: {', '.join(f'`{name}`' for name in unplayed)}.\n")
    parts += [HOW.format(least=SCORE_MIN, seconds=EPISODE_SECONDS)]
    parts += [_render_voices(verdicts.results), render_survivors(verdicts)]
    parts += [_render_runs(verdicts.results), _render_exclusions(verdicts.results)]
    return "\n".join(parts)


def _render_scores(verdicts: Verdicts, changed: Collection[str]) -> str:
    rows, nothing = [], []
    sampled = {name for run in verdicts.results["runs"] if run["sample"] for name in run["modules"]}
    for wing in WINGS:
        modules = [one for one in verdicts.results["modules"] if is_in(one["module"], wing)]
        for one in modules:
            name = f"`{one['module']}`"
            if one["mutants"]:
                mark = " †" * (one["module"] in sampled)
                text = one["commit"] or "before" if one["module"] in changed else ""
                rows.append(_score_row(name + mark, verdicts, one["module"], one["killed"], text))
            else:
                nothing.append(name)
        if modules:
            killed = sum((Counter(one["killed"]) for one in modules), Counter[str]())
            rows.append(_score_row(f"**{wing}**", verdicts, wing, killed, ""))
    heads = ("module", "mutants", "killed", "of these: loops", "score", "told apart", "text of")
    notes = ["† A sample of its mutants was played."] if sampled else []
    if changed:
        notes.append("Where a commit stands, the text has changed since; the numbers are its own.")
    if nothing:
        notes.append(f"Nothing could be changed in {', '.join(nothing)}.")
    return f"## Scores\n\n{make_table(heads, rows)}" + f"\n{' '.join(notes)}\n" * bool(notes)


def _score_row(
    name: str, verdicts: Verdicts, place: str, killed: Mapping[str, int], commit: str
) -> tuple[str, ...]:
    score = verdicts.score(place)
    shares = (f"{score.of_all:.1%}", f"{score.of_told_apart:.1%}") if score.mutants else ("-", "-")
    counts = (score.mutants, score.killed, killed.get("timeout", 0))
    return name, *map(str, counts), *shares, commit


def _render_voices(results: Mapping[str, Any]) -> str:
    voices = ", ".join(f"`{name}` {count}" for name, count in results["properties"].items())
    text = "What spoke first, for every mutant that a finding caught in any run, those of modules "
    return f"## Who noticed\n\n{text}that are gone included: {voices}.\n"


def render_survivors(verdicts: Verdicts) -> str:
    """What survived, and what is said about it."""
    counts = Counter(said.verdict if said else "" for _, said in verdicts.explained)
    words = [f"{counts[name]} *{name}*: {what}" for name, what in VERDICTS.items()]
    text = f"## Survivors\n\n{'; '.join(words)}.\n"
    rows: list[tuple[str, ...]] = [
        ("**UNEXPLAINED**", f"{_name(one)}, {quote_code(one['change'])}", "", "1")
        for one in verdicts.unexplained
    ]
    needed = [*dict.fromkeys(said for _, said in verdicts.explained if said)]
    rows += [_explained_row(verdicts, one) for one in needed if one.verdict != "equivalent"]
    if rows:
        text += "\n### Not equivalent\n\n" + make_table(("", "what", "why", "mutants"), rows)
    same = [(one, verdicts.count(one)) for one in needed if one.verdict == "equivalent"]
    same.sort(key=lambda pair: -pair[1])
    classes = [(one.what, one.why, str(count)) for one, count in same if count >= FEW]
    if few := [(one.what or one.why, count) for one, count in same if count < FEW]:
        names = "; ".join(what for what, _ in few)
        classes.append((names, "see survivors.toml", str(sum(count for _, count in few))))
    if classes:
        text += "\n### Equivalent\n\n"
        text += make_table(("what is changed", "why nobody can tell", "mutants"), classes)
    for one in verdicts.idle:
        text += f"\n**Explains nothing** any more: {one.what or one.why}\n"
    for one in verdicts.overfull:
        text += f"\n**Explains {verdicts.count(one)}**, at most {one.most}: {one.what or one.why}\n"
    return text


def _explained_row(verdicts: Verdicts, said: Explanation) -> tuple[str, ...]:
    survivors = [one for one, explanation in verdicts.explained if explanation is said]
    if said.what:
        what = f"{said.what}: {', '.join(dict.fromkeys(map(_name, survivors)))}"
    else:
        what = f"{_name(survivors[0])}, {quote_code(survivors[0]['change'])}"
    never = sum(not one.get("reached", True) for one in survivors)
    why = said.why + f" ({never} never executed)" * bool(never)
    return said.verdict, what, why, str(len(survivors))


def _name(survivor: Mapping[str, Any]) -> str:
    return f"`{survivor['function'] or 'module'}` of `{survivor['module']}`"


def _render_runs(results: Mapping[str, Any]) -> str:
    runs = results["runs"]
    engines = {stage[0] for run in runs for stage in (*run["first"], *run["deep"])}
    rows = [
        (
            f"`{_shorten(run['command'])}`, {run['seconds'] / 60:.0f} min, {run['day']}",
            ", ".join(f"`{name}`" for name in run["modules"]),
            _list_stages(run, "first"),
            _list_stages(run, "deep"),
        )
        for run in runs
    ]
    where = dict.fromkeys(f"{run['device']}; {_list_versions(run)}" for run in runs)
    texts = [f"*{name}* is {what}" for engine, (name, what) in ENGINES.items() if engine in engines]
    return (
        "## Runs\n\n"
        + make_table(("run", "modules", "every mutant plays", "survivors play as well"), rows)
        + f"\nEach on: {'. '.join(where)}. Numbers are events, from seed "
        + f"{', '.join(str(seed) for seed in dict.fromkeys(run['seed'] for run in runs))} on, of "
        + "presets tiny (t) and small, (g) with several KV groups in each run. What is explained "
        + "as equivalent plays no longer.\n\n"
        + f"Here {'; '.join(texts)}.\n"
    )


def _shorten(command: str) -> str:
    """Without the names of the modules, which stand beside it."""
    return re.sub(r"( --only \S+)+", " --only ...", command)


_MARKS = {"tiny": " t", "small groups": " g"}


def _list_stages(run: Mapping[str, Any], kind: str) -> str:
    """Those that are there for one of the modules of the run."""
    stages: list[Stage] = [
        (engine, drawn, num)
        for engine, drawn, num in run[kind]
        if any(is_for((engine, drawn, num), name) for name in run["modules"])
    ]
    return ", ".join(
        f"{num:,}{_MARKS.get(drawn, '')} {ENGINES[engine][0]}" for engine, drawn, num in stages
    )


def _list_versions(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in run["versions"].items())


def _render_exclusions(results: Mapping[str, Any]) -> str:
    counts = sum((Counter(one["excluded"]) for one in results["modules"]), Counter[str]())
    counts["no other program"] = sum(module["no_change"] for module in results["modules"])
    reasons = {**RULES, "no other program": "it does not parse, or to the same tree"}
    rows = [(name, str(counts[name]), why) for name, why in reasons.items() if counts[name]]
    whole = "; ".join(f"`{name}`: {why}" for name, why in WHOLE_MODULES.items())
    table = make_table(("left out", "places", "why"), rows)
    return f"## What is not mutated\n\n{table}\nNot at all: {whole}.\n"
