"""Table of what was found in which release of vLLM, from the results of hunts.

    python -m benchmarks.findings

Prints it; `make docs` puts it into its page. The results are benchmarks/results/*-hunt-*.json, one
for each release (`blockstep hunt --engine vllm --profile vllm-RELEASE --json FILE`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from blockstep.spec.profiles import QUIRKS, QuirkStory

HOUSE = Path(__file__).resolve().parents[1]
RESULTS = HOUSE / "benchmarks" / "results"


def main() -> int:
    """Print the page."""
    print(make_page())
    return 0


def read_hunts() -> list[dict[str, Any]]:
    """Return the results of all hunts, the oldest release first."""
    hunts = [
        {"day": file.name[:10], **json.loads(file.read_text())}
        for file in RESULTS.glob("*-hunt-*.json")
    ]
    return sorted(hunts, key=release_of)


def make_page() -> str:
    """Return the tables and the programs, from all results of hunts."""
    return render(read_hunts())


def count_rows(hunts: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many defects the hunts without a required feature found, by release."""
    return {
        hunt["engine_version"]: len({title_of(defect) for defect in hunt["defects"]})
        for hunt in hunts
        if not hunt.get("with")
    }


def release_of(hunt: dict[str, Any]) -> tuple[bool, list[int], list[str]]:
    """Return the sort key of a hunt: those with a required feature last, then the release."""
    features = hunt.get("with", [])
    release = [int(part) for part in hunt["engine_version"].split(".")]
    return bool(features), release, features


def column_of(hunt: dict[str, Any]) -> str:
    """Return the head of the hunt's column."""
    return " ".join([hunt["engine_version"], *(f"with {name}" for name in hunt.get("with", ()))])


def render(hunts: list[dict[str, Any]]) -> str:
    """Return a table of all releases, one of hunts with a feature, then a program of each defect.

    The program is of the latest release with the defect, from a hunt without a required feature
    if one found it.
    """
    titles: dict[str, dict[str, dict[str, Any]]] = {}
    for hunt in hunts:
        for defect in hunt["defects"]:
            titles.setdefault(title_of(defect), {})[column_of(hunt)] = defect
    plain = {column_of(hunt) for hunt in hunts if not hunt.get("with")}
    lines: list[str] = []
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
    """Return the table of some hunts: a row for each defect, a column for each hunt."""
    if not hunts:
        return []
    columns = [column_of(hunt) for hunt in hunts]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for title, found in titles.items():
        if any(one in found for one in columns):
            cells = [str(len(found[one]["program"])) if one in found else "-" for one in columns]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    events = [f"{hunt['num_events']:,}" for hunt in hunts]
    lines.append("| *events played* | " + " | ".join(events) + " |")
    return [*lines, "| *day* | " + " | ".join(hunt["day"] for hunt in hunts) + " |", ""]


def title_of(defect: dict[str, Any]) -> str:
    """Return the title of the quirk that explains a defect, else what the hunt printed."""
    names = {cause["name"] for cause in defect["causes"] if cause["means"] == "quirk"}
    stories = [story for story in QUIRKS if story.quirk in names]
    if stories:
        return "; ".join(f"{story.title} ({format_story(story)})" for story in stories)
    first = defect["findings"][0]
    unexplained = f"nothing known: {first['property'] or first['kind']} {first['sentence']}"
    return str(defect["title"]) if defect["causes"] else unexplained


def format_story(story: QuirkStory) -> str:
    """Return the upstream number, and which properties the quirk breaks."""
    breaks = "breaks " + " ".join(story.property_ids) if story.property_ids else "a change"
    return f"{breaks}; {story.upstream}"


if __name__ == "__main__":
    sys.exit(main())
