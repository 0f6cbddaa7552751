"""The table of what was found in which release, from the results of hunts.

    python -m benchmarks.findings

Reads benchmarks/results/*-hunt-*.json (`blockstep hunt --json FILE`, one for each release) and
writes docs/reference/findings.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from blockstep.spec.profiles import QUIRKS, QuirkStory

HOUSE = Path(__file__).resolve().parents[1]
RESULTS = HOUSE / "benchmarks" / "results"
PAGE = HOUSE / "docs" / "reference" / "findings.md"
HEAD = """# Findings

What `blockstep hunt` found in releases of vLLM. Nothing is forgiven at first, so each was found by
runs that knew of no defect; [how to read it](../explanation/findings.md). A number is the length of
the shortest program, in actions; `-`: not found there.

Made by `python -m benchmarks.findings` from the results of
`blockstep hunt --engine vllm --profile vllm-RELEASE --json FILE`. In the second table every run of
a hunt had a feature (`--with`).
"""


def main() -> int:
    """Make the page."""
    hunts = [json.loads(file.read_text()) for file in RESULTS.glob("*-hunt-*.json")]
    if not hunts:
        print(f"no results of hunts in {RESULTS}", file=sys.stderr)
        return 2
    hunts.sort(key=release_of)
    PAGE.write_text(render(hunts), encoding="utf-8")
    print(PAGE.relative_to(HOUSE))
    return 0


def release_of(hunt: dict[str, Any]) -> tuple[bool, list[int], list[str]]:
    """What to sort by: hunts with a feature in every run come last; the release as numbers."""
    features = hunt.get("with", [])
    release = [int(part) for part in hunt["engine_version"].split(".")]
    return bool(features), release, features


def column_of(hunt: dict[str, Any]) -> str:
    """The head of its column."""
    return " ".join([hunt["engine_version"], *(f"with {name}" for name in hunt.get("with", ()))])


def render(hunts: list[dict[str, Any]]) -> str:
    """A table of all releases, one of features, then each defect with a program.

    That of the latest release that has it; one without a feature in every run, if there is any.
    """
    titles: dict[str, dict[str, dict[str, Any]]] = {}
    for hunt in hunts:
        for defect in hunt["defects"]:
            titles.setdefault(title_of(defect), {})[column_of(hunt)] = defect
    plain = {column_of(hunt) for hunt in hunts if not hunt.get("with")}
    lines = [HEAD]
    for is_plain in (True, False):
        lines += tabulate(
            [hunt for hunt in hunts if (column_of(hunt) in plain) is is_plain], titles
        )
    for title, found in titles.items():
        shown = {one: defect for one, defect in found.items() if one in plain} or found
        release, defect = next(reversed(shown.items()))
        first = defect["findings"][0]
        lines += [f"## {title}", "", f"Found by {first['property'] or first['kind']}"]
        lines[-1] += f" `{first['sentence']}`, here in {release}:"
        lines += ["", "```text", f"config    {defect['config'].replace(' ' * 12, ' ' * 10)}"]
        lines += [f"{number:>2}  {action}" for number, action in enumerate(defect["program"], 1)]
        lines += [f"seen      {first['message']}", "```", ""]
    return "\n".join(lines)


def tabulate(
    hunts: list[dict[str, Any]], titles: dict[str, dict[str, dict[str, Any]]]
) -> list[str]:
    """A table of what some hunts found: a row for each defect, a column for each hunt."""
    if not hunts:
        return []
    columns = [column_of(hunt) for hunt in hunts]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for title, found in titles.items():
        if any(one in found for one in columns):
            cells = [str(len(found[one]["program"])) if one in found else "-" for one in columns]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    events = [f"{hunt['num_events']:,}" for hunt in hunts]
    return [*lines, "| *events played* | " + " | ".join(events) + " |", ""]


def title_of(defect: dict[str, Any]) -> str:
    """What accounts for it: a quirk in the words that it has now, or what the hunt said."""
    names = {cause["name"] for cause in defect["causes"] if cause["means"] == "quirk"}
    stories = [story for story in QUIRKS if story.quirk in names]
    if stories:
        return "; ".join(f"{story.title} ({tell(story)})" for story in stories)
    first = defect["findings"][0]
    said = f"nothing known: {first['property'] or first['kind']} {first['sentence']}"
    return str(defect["title"]) if defect["causes"] else said


def tell(story: QuirkStory) -> str:
    """Upstream's number, and whether it breaks anything."""
    breaks = "breaks " + " ".join(story.property_ids) if story.property_ids else "a change"
    return f"{breaks}; {story.upstream}"


if __name__ == "__main__":
    sys.exit(main())
