"""Page: docs/reference/mutation.md, from the numbers of a campaign and the words of a person.

What a survivor is, nobody can compute: `survivors.toml` says it, one sentence each, and a survivor
without a sentence stands out on the page and in the exit code.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.mutation.campaign import is_for
from benchmarks.mutation.engines import COLLIDING, COMPILED_ARRAYS
from benchmarks.mutation.mutants import RULES, WHOLE_MODULES, WINGS
from benchmarks.mutation.runner import EPISODE_SECONDS, Stage

VERDICTS: Mapping[str, str] = {
    "equivalent": "no program can tell it from the original",
    "unreachable": "what is played does not come there, or not in a state where it matters",
    "hole": "it should have been caught: a rule or a property is missing",
}
ENGINES: Mapping[str, str] = {
    COLLIDING: "the host engine with a digest of two bits, so that contents collide",
    "host-vector": "the host engine with its code for many rows, which is gone, used for few too",
    "benchmarks.mutation.engines:Arrays": "the same from two rows on, plans and answers in arrays",
    "compiled": "the compiled engine, as the Python that it is",
    COMPILED_ARRAYS: "the same, plans and answers in arrays; tables grow row by row, contents "
    "collide, and what is in use is counted after each event, so that no leak is overlooked",
}
"""What is played beside `host`."""
UNEXPLAINED: Final = "UNEXPLAINED"
SCORE_MIN: Final = 0.95
"""For each engine."""
GATED: Final = ("impl/host", "impl/compiled")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a person says about survivors."""

    module: str
    function: str
    before: str
    """The line as it stands in the source."""
    verdict: str
    why: str
    after: str = ""
    """The changed line; "" for every change of this line."""
    operator: str = ""
    """"" for every operator."""

    def is_about(self, survivor: Mapping[str, Any]) -> bool:
        """Whether this survivor is meant."""
        wanted = {"module": self.module, "function": self.function, "before": self.before}
        wanted |= {"after": self.after} if self.after else {}
        wanted |= {"operator": self.operator} if self.operator else {}
        return all(survivor[name] == value for name, value in wanted.items())


def read_explanations(file: Path) -> list[Explanation]:
    """The hand-written sentences.

    Raises:
        ValueError: a verdict is none of `VERDICTS`, or a sentence is missing.
    """
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("survivor", [])
    found = [Explanation(**entry) for entry in entries]
    for one in found:
        if one.verdict not in VERDICTS or not one.why:
            wanted = " or ".join(VERDICTS)
            raise ValueError(f"{file.name}: {one.before!r} needs a verdict ({wanted}) and a why")
    return found


@dataclass(frozen=True, slots=True)
class Score:
    """Of one module or of one wing."""

    mutants: int
    killed: int
    told_apart: int
    """Mutants but for those explained as equivalent or unreachable."""

    @property
    def of_all(self) -> float:
        """Killed of all mutants."""
        return self.killed / self.mutants if self.mutants else 1.0

    @property
    def of_told_apart(self) -> float:
        """Killed of those that anything could kill."""
        return self.killed / self.told_apart if self.told_apart else 1.0


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Each survivor with what is said about it."""

    results: Mapping[str, Any]
    explained: list[tuple[Mapping[str, Any], Explanation | None]]
    idle: list[Explanation]
    """Explanations that no survivor needs any more."""

    @property
    def unexplained(self) -> list[Mapping[str, Any]]:
        """Survivors about which nothing is said."""
        return [survivor for survivor, explanation in self.explained if explanation is None]

    @property
    def holes(self) -> list[Mapping[str, Any]]:
        """Survivors that should have been caught."""
        return [one for one, said in self.explained if said is not None and said.verdict == "hole"]

    def score(self, place: str) -> Score:
        """The score of a module, or of those in a folder."""
        modules = [one for one in self.results["modules"] if is_in(one["module"], place)]
        mutants = sum(one["mutants"] for one in modules)
        killed = sum(sum(one["killed"].values()) for one in modules)
        beyond = sum(
            is_in(one["module"], place)
            and said is not None
            and said.verdict in {"equivalent", "unreachable"}
            for one, said in self.explained
        )
        return Score(mutants, killed, mutants - beyond)

    @property
    def is_good(self) -> bool:
        """Whether everything is explained, nothing is a hole, and the engines' scores suffice."""
        is_enough = all(self.score(wing).of_told_apart >= SCORE_MIN for wing in GATED)
        return is_enough and not self.unexplained and not self.holes


def is_in(module: str, place: str) -> bool:
    """Whether `place` is this module or its folder."""
    return place in (module, module.rpartition("/")[0])


def judge(results: Mapping[str, Any], explanations: Sequence[Explanation]) -> Verdicts:
    """Bring survivors and sentences together; the first sentence that fits is taken."""
    explained = []
    used: set[int] = set()
    for survivor in results["survivors"]:
        index = next((i for i, one in enumerate(explanations) if one.is_about(survivor)), None)
        explained.append((survivor, None if index is None else explanations[index]))
        if index is not None:
            used.add(index)
    modules = {one["module"] for one in results["modules"]}
    idle = [one for i, one in enumerate(explanations) if i not in used and one.module in modules]
    return Verdicts(results, explained, idle)


# The page.

INTRO = """\
# Mutation

<!-- Made by `make mutation`; do not edit. What is said about a survivor stands in
     benchmarks/mutation/survivors.toml. -->

A mutant is the code with one small change in it. `blockstep check` should notice every one
that matters: a mutant of an engine must differ from the specification or break a property, and a
mutant of the specification must differ from the host engine. The tests take no part in this.

The changes are made by [cosmic-ray](https://cosmic-ray.readthedocs.io). Its operators are a
library that turns a source text into a changed one, so the process that judges a mutant can be
ours. mutmut 3 is bound to pytest: it writes all mutants into one copy of the project and runs its
tests on them. What is asked here is what `check` sees; and thousands of mutants are affordable only
if none of them starts Python, so each is played in a forked process that has everything but the
mutated module already.
"""

HOW = """\
## How it is counted

Killed is what has a finding: a property, a divergence, no progress, or a fault. Killed as well
is what cannot be imported, raises, or does not come back: *loops* are those that spend
{seconds:g} s of processor time in one episode. A mutant plays only where the unmutated code
executes the changed line: one of an engine with that engine, and one of the specification with
`host` only. A change in a line that is executed nowhere survives without being played. The
compiled engine is played without numba: a mutant of it is never compiled, and where its machine
code would read or write beyond an array, this Python raises.

*Score* is the share of all mutants that are killed. *Of those that can be told apart* leaves out
what is explained below as equivalent or unreachable; each engine's is to be at least {least:.0%}.
"""


def render_page(
    verdicts: Verdicts, changed: Collection[str] = (), unplayed: Collection[str] = ()
) -> str:
    """The whole page; `changed` are modules whose text is not the one that was played."""
    parts = [INTRO, _render_runs(verdicts), _render_scores(verdicts, changed)]
    if unplayed:
        parts.append(f"Not played yet: {', '.join(f'`{name}`' for name in unplayed)}.\n")
    parts += [
        _render_voices(verdicts.results),
        HOW.format(least=SCORE_MIN, seconds=EPISODE_SECONDS),
    ]
    parts += [_render_exclusions(verdicts.results), _render_survivors(verdicts)]
    return "\n".join(parts)


def _render_runs(verdicts: Verdicts) -> str:
    results = verdicts.results
    runs = results.get("later", [])
    names = {module["module"] for module in results["modules"]}
    text = _render_run(results, names - {name for later in runs for name in later["names"]})
    for later in runs:
        listed = ", ".join(f"`{name}`" for name in later["names"])
        text += f"\nPlayed later: {listed}.\n\n{_render_run(later, later['names'])}"
    return text


def _render_run(run: Mapping[str, Any], names: Collection[str]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    text = f"`{run['command']}`: {run['seconds'] / 60:.0f} minutes on a "
    text += f"{run['device']}; {versions}."
    if run["sample"]:
        text += f" A sample of {run['sample']} mutants."
    text += f"\n\nEach mutant plays, from seed {run['seed']}:\n\n"
    text += _render_stages(run["first"], names)
    if run["deep"]:
        text += "\nWhat survives plays more, unless it is explained as equivalent:\n\n"
    return text + _render_stages(run["deep"], names)


def _render_stages(stages: Iterable[Stage], names: Collection[str]) -> str:
    """Those that are there for one of these modules; for any, if all were played again."""
    return "".join(
        f"- {num:,} events of preset {preset}{_name_engine(engine)}\n"
        for engine, preset, num in stages
        if not names or any(is_for((engine, preset, num), name) for name in names)
    )


def _name_engine(engine: str) -> str:
    return f" (`{engine}`: {ENGINES[engine]})" if engine in ENGINES else ""


def _render_scores(verdicts: Verdicts, changed: Collection[str]) -> str:
    rows = []
    sampled = find_sampled(verdicts.results)
    for wing in WINGS:
        modules = [one for one in verdicts.results["modules"] if is_in(one["module"], wing)]
        for one in modules:
            marks = " \\*" * (one["module"] in changed) + " †" * (one["module"] in sampled)
            name = f"`{one['module']}`{marks}"
            rows.append(_score_row(name, verdicts.score(one["module"]), one))
        if modules:
            total = Counter[str]()
            for module in modules:
                total.update(module["killed"])
            rows.append(_score_row(f"**{wing}**", verdicts.score(wing), {"killed": total}))
    heads = (
        "module",
        "mutants",
        "killed",
        "of these: loops",
        "score",
        "of those that can be told apart",
    )
    notes = ["\\* Its text has changed since it was played."] if changed else []
    notes += ["† A sample of its mutants was played."] if sampled else []
    return "## Scores\n\n" + _table(heads, rows) + "".join(f"\n{note}\n" for note in notes)


def find_sampled(results: Mapping[str, Any]) -> set[str]:
    """Modules of which only some mutants were played, the last time that any were."""
    names = {one["module"] for one in results["modules"]} if results["sample"] else set[str]()
    for later in results.get("later", []):
        names = names | {*later["names"]} if later["sample"] else names - {*later["names"]}
    return names


def _score_row(name: str, score: Score, module: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (
        ("-", "-") if not score.mutants else (f"{score.of_all:.1%}", f"{score.of_told_apart:.1%}")
    )
    loops = module["killed"].get("timeout", 0)
    return name, str(score.mutants), str(score.killed), str(loops), *shares


def _render_voices(results: Mapping[str, Any]) -> str:
    rows = [(f"`{name}`", str(count)) for name, count in results["properties"].items()]
    note = "What spoke first, for every mutant that was caught by a finding.\n\n"
    return "## Who noticed\n\n" + note + _table(("sentence", "mutants"), rows)


def _render_exclusions(results: Mapping[str, Any]) -> str:
    counts = Counter[str]()
    for module in results["modules"]:
        counts.update(module["excluded"])
    rows = [(name, str(counts[name]), why) for name, why in RULES.items()]
    no_change = sum(module["no_change"] for module in results["modules"])
    rows.append(("no other program", str(no_change), "it does not parse, or to the same tree"))
    whole = [(f"`{name}`", why) for name, why in WHOLE_MODULES.items()]
    whole.append(("`spec/vocabulary/`", "both sides share it: a change to it changes both"))
    return (
        "## What is not mutated\n\n"
        + _table(("left out", "places", "why"), rows)
        + "\n"
        + _table(("module", "why"), whole)
    )


def _render_survivors(verdicts: Verdicts) -> str:
    counts = Counter(said.verdict if said else UNEXPLAINED for _, said in verdicts.explained)
    words = [f"- *{name}* ({counts[name]}): {what}" for name, what in VERDICTS.items()]
    if verdicts.unexplained:
        words.append(f"- **{UNEXPLAINED}** ({counts[UNEXPLAINED]}): nobody has looked at it yet")
    text = "## Survivors\n\n" + "\n".join(words) + "\n"
    by_module: dict[str, list[tuple[str, ...]]] = {}
    ordered = sorted(verdicts.explained, key=lambda pair: pair[1] is not None)
    for survivor, said in ordered:
        row = (f"`{survivor['function'] or 'module'}`", _render_change(survivor), *_say(said))
        by_module.setdefault(survivor["module"], []).append(row)
    for module in sorted(by_module):
        rows = by_module[module]
        text += f"\n### {module}\n\n" + _table(("function", "change", "verdict", "why"), rows)
    for one in verdicts.idle:
        text += f"\nExplains nothing any more: `{one.module}`, {_code(one.before)}.\n"
    return text


def _say(said: Explanation | None) -> tuple[str, str]:
    return (said.verdict, said.why) if said else (f"**{UNEXPLAINED}**", "")


def _render_change(survivor: Mapping[str, Any]) -> str:
    never = "" if survivor["reached"] else " (never executed)"
    return f"{_code(survivor['before'])} becomes {_code(survivor['after']) or 'nothing'}{never}"


def _code(text: str) -> str:
    """One line of code inside a table."""
    return f"`` {text} ``".replace("|", "\\|") if text else ""


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = tuple(heads)
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
