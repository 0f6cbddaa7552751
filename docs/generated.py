"""Pages that are built from data: each has a stub in this folder that says what it shows.

A stub contains a line `<!-- generated: NAME -->`, which `make docs` replaces by what the function
of that name returns. The data of long runs are committed (benchmarks/results, and `reached.json`
and the `.toml` files in the folders of the benchmarks); the pages are not.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer
from benchmarks import commands, coverage, findings, museum, pairs
from benchmarks.coverage.page import read_reasons
from benchmarks.coverage.page import render_page as render_coverage
from benchmarks.mutation.page import render_page as render_mutation
from benchmarks.mutation.targets import TARGETS
from benchmarks.pairs.page import render_page as render_pairs
from benchmarks.scheduler import GOALS_SECTION, PARTS, make_sections
from docs.pictures import PICTURES
from docs.tour import make_tour

from blockstep.conformance.command.main import GROUPS, app
from blockstep.conformance.explore.tables import join_worlds, list_worlds, render_table
from blockstep.conformance.explore.worlds import WORLDS
from blockstep.conformance.prove.laws import LAWS
from blockstep.conformance.prove.table import laws_page
from blockstep.conformance.report.vocabulary import make_page as make_vocabulary
from blockstep.spec.profiles import PROFILES, QUIRKS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CODE_LINE = re.compile(r"^(Example): (.+(?:\n.+)*)", re.MULTILINE)
MARK = re.compile(r"^<!-- generated: ([\w -]+) -->$", re.MULTILINE)


def read_last(name: str) -> Any:
    """Return the newest results of a name, such as `mutation`."""
    return json.loads(max(RESULTS.glob(f"*-{name}*.json")).read_text(encoding="utf-8"))


def read_reached(package: Any) -> Any:
    """Return what the last whole run of a benchmark wrote into its folder."""
    return json.loads((get_folder(package) / "reached.json").read_text(encoding="utf-8"))


def get_folder(package: Any) -> Path:
    """Return the folder of a benchmark."""
    return Path(next(iter(package.__path__)))


def make_mutation() -> str:
    """Return the page on mutants, from the last results of each target."""
    played = [target for target in TARGETS if list(RESULTS.glob(f"*-mutation-{target}.json"))]
    return render_mutation([read_last(f"mutation-{target}") for target in played])


def make_coverage() -> str:
    """Return the page on the branches of the specification that `check` reaches."""
    reasons = read_reasons(get_folder(coverage) / "unreached.toml")
    return render_coverage(read_reached(coverage), reasons)


def make_timings(part: str) -> str:
    """Return the tables of one part of the scheduler's benchmark."""
    return make_sections(RESULTS)[part]


def make_laws() -> str:
    """Return the page on what is proved, with the solvers of the run."""
    record = read_last("prove")
    day = max(RESULTS.glob("*-prove.json")).name[:10]
    solvers = ", ".join(f"{name} {number}" for name, number in record["solvers"].items())
    return f"Run of {day} with {solvers}.\n\n" + laws_page(record, LAWS)


def make_options() -> str:
    """Return every command with its options, by the groups of `blockstep --help`."""
    whole: Any = typer.main.get_command(app)
    parts: list[str] = []
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += describe_command(f"blockstep {name}", whole.commands[name])
    return "\n".join(parts)


def describe_command(name: str, command: Any) -> Iterator[str]:
    """Yield the section of a command, and of each command that it contains."""
    context = command.context_class(command, info_name=name)
    records = [param.get_help_record(context) for param in command.params]
    yield f"### {name}\n"
    yield CODE_LINE.sub(r"\1: `\2`", inspect.cleandoc(command.help or "")) + "\n"
    yield "".join(f"- `{names}`: {escape(text)}\n" for names, text in filter(None, records))
    for inner, inside in getattr(command, "commands", {}).items():
        yield from describe_command(f"{name} {inner}", inside)


def escape(text: str) -> str:
    """Return the help of an option in one line, with the signs of Markdown as they are."""
    return re.sub(r"([<>*_\[\]|`])", r"\\\1", " ".join(text.split()))


def make_worlds() -> str:
    """Return the small worlds with their counts, and what is shortest in them."""
    run = max(RESULTS.glob("*-explore-quirks.json")).name[:10]
    return "\n".join(
        [
            "## Worlds\n",
            render_table(list_worlds(WORLDS.values()), markdown=True),
            "## Shortest programs of quirks\n",
            f"Run of {run}. Lengths are events; `-`: in no world of this size.\n",
            render_table(read_last("explore-quirks"), markdown=True),
            "## Shortest programs of seeded bugs\n",
            f"Run of {run}.\n",
            render_table(join_worlds(read_last("explore-seeded-bugs")), markdown=True),
        ]
    )


def make_quirks() -> str:
    """Return the quirks of all releases, and the profiles that follow them."""
    lines = [f"## {len(QUIRKS)} quirks\n"]
    for story in QUIRKS:
        breaks = f"Breaks {' '.join(story.property_ids)}" if story.property_ids else "No property"
        lines += [
            f"### {story.quirk}\n",
            f"{story.title[0].upper()}{story.title[1:]}.\n",
            f"- {breaks}; upstream: {story.upstream}; seen in {story.seen_in}",
            f"- Example: {story.program}\n",
        ]
    lines.append("## Profiles\n")
    for profile in PROFILES:
        names = ", ".join(f"`{quirk}`" for quirk in sorted(profile.quirks))
        lines.append(f"- {profile.name}: {names or 'none'}")
    return "\n".join(lines) + "\n"


def make_fields() -> str:
    """Return the table of the fields that are read from an engine, by feature."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    changed = importlib.import_module("play_support.changed")
    text: str = changed.make_page(changed.change_in_features())
    return text


PAGES: Mapping[str, Callable[[], str]] = {
    "commands and engines": lambda: commands.render(commands.read_cells()),
    "commands": make_options,
    "coverage": make_coverage,
    "fields": make_fields,
    "findings": findings.make_page,
    "laws": make_laws,
    "mutation": make_mutation,
    "pairs": lambda: render_pairs(read_reached(pairs)),
    "quirks": make_quirks,
    **PICTURES,
    **{f"scheduler {part}": partial(make_timings, part) for part in (*PARTS, GOALS_SECTION)},
    "seeded bugs": museum.make_page,
    "tour": make_tour,
    "vocabulary": make_vocabulary,
    "worlds": make_worlds,
}
"""The function that returns the text in place of a mark, by the mark's name."""


def put_pages(text: str) -> str:
    """Return the text of a stub with its marks replaced.

    Raises:
        KeyError: there is no generator of a mark's name.
    """
    return MARK.sub(lambda mark: PAGES[mark[1]](), text)
