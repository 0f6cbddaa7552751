"""Annotate: results of `check`, `hunt` and the pytest plugin as GitHub Actions shows them.

An annotation is put on the line where the engine raised, if the file is found in the working
folder, or else where the engine's factory is defined. Strings of an engine are escaped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FRAME = re.compile(r"(?P<name>.+) \((?P<file>[^()]+):(?P<line>\d+)\)(?:: (?P<source>.*))?")
"""Format of a call in which an engine raised, in a finding's `frames`."""
FORMATS = ("blockstep-check", "blockstep-hunt", "blockstep-pytest")
SKIPPED_FOLDERS = frozenset({"site-packages", "node_modules", "__pycache__"})
FENCE = "~~~~~~"
"""Fence around programs in a summary; longer than any in the text of an engine."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, relative to the working folder."""

    file: str
    line: int


def list_annotations(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Return a line for GitHub Actions for each finding of a result as JSON."""
    lines = []
    for engine, finding, again in _list_findings(result):
        name = f"{finding['property'] or finding['kind']} {finding['sentence']}"
        place = find_place(finding["frames"], engine, folder)
        where = "" if place is None else f"file={_property(place.file)},line={place.line},"
        message = _data(f"{_get_defect(finding)}\n{again}")
        lines.append(f"::error {where}title={_property(f'Blockstep: {name}')}::{message}")
    lines += [f"::error title=Blockstep::{_data(why)}" for why in _list_lacking(result)]
    return lines


def make_summary(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown, for the summary of a job, with a trailing newline."""
    lines = ["## Blockstep", ""]
    for run in _list_runs(result):
        lines.append(f"{_code(run['engine'])}: {_describe_run(run)}")
        for failure in _list_failures(run):
            first = failure["findings"][0]
            name = f"{first['property'] or first['kind']} {first['sentence']}"
            lines += ["", f"**{_escape(name)}**: {_escape(_get_defect(first))}", "", FENCE]
            lines += [line.replace(FENCE, "~") for line in (failure["config"], *failure["program"])]
            lines += [FENCE, "", _code(failure["reproduce"])]
        known: Mapping[str, int | None] = run.get("known_programs", {})
        for file, count in known.items():
            what = (
                "gone: take it out of the known programs"
                if count is None
                else f"known, {count} times"
            )
            lines += ["", f"{_code(file)}: {what}"]
        lines.append("")
    return "\n".join(lines)


def find_place(frames: Sequence[str], engine: str, folder: Path) -> Place | None:
    """Return the line of a finding: that of the innermost frame that is found, or of the
    factory."""
    for frame in reversed(frames):
        found = FRAME.fullmatch(frame)
        if found is not None:
            place = _find_line(found["file"], int(found["line"]), found["source"] or "", folder)
            if place is not None:
                return place
    module, _, attribute = engine.partition("@")[0].partition(":")
    bases = [root.joinpath(*module.split(".")) for root in (folder, folder / "src")]
    for file in [it for base in bases for it in (base.with_suffix(".py"), base / "__init__.py")]:
        if attribute and file.is_file():
            return Place(file.relative_to(folder).as_posix(), _find_definition(file, attribute))
    return None


def _find_line(name: str, line: int, source: str, folder: Path) -> Place | None:
    """Return the line of the only file of this name that has this source there."""
    places = []
    for file in folder.rglob(name):
        parts = file.relative_to(folder).parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(".") for part in parts):
            continue
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        if line <= len(lines) and source in lines[line - 1]:
            places.append(Place("/".join(parts), line))
    return places[0] if len(places) == 1 else None


def _find_definition(file: Path, attribute: str) -> int:
    """Return the line in which a module defines a name, or 1. Nothing is imported."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return 1
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return node.lineno
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(it, ast.Name) and it.id == attribute for it in targets):
            return node.lineno
    return 1


def _list_runs(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the checks and hunts in a result: one, or one for each preset that pytest played."""
    if result["format"] == "blockstep-pytest":
        return [run["check"] for run in result["runs"]]
    return [result]


def _list_failures(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the failures of a run, each with findings, config, program and reproduce."""
    if run["format"] == "blockstep-hunt":
        return list(run["defects"])
    played = [run, *run["corpus"]]
    failures = [row["failure"] for row in played if row["failure"] is not None]
    return [it for number, it in enumerate(failures) if it not in failures[:number]]


def _list_findings(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    for run in _list_runs(result):
        for failure in _list_failures(run):
            yield run["engine"], failure["findings"][0], failure["reproduce"]


def _get_defect(finding: Mapping[str, Any]) -> str:
    """Return the defect as the first line of a report has it; older files have the message only."""
    return str(finding.get("headline") or finding["message"])


def _list_lacking(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a check without a failure is no success."""
    for run in _list_runs(result):
        if not _list_failures(run) and run.get("exit_code"):
            yield _describe_run(run)


def _describe_run(run: Mapping[str, Any]) -> str:
    failures = len(_list_failures(run))
    played = f"{run['num_events']:,} events, equivalence {run['equivalence']}"
    if failures:
        return f"{failures} failure{'s' * (failures != 1)} in {played}"
    gone = [name for name, count in run.get("known_programs", {}).items() if count is None]
    if gone and not run.get("witnesses_missing"):
        return f"nothing wrong in {played}, but known findings are gone: {', '.join(gone)}"
    if run.get("exit_code"):
        return f"no verdict in {played}: {len(run['witnesses_missing'])} coverage goals not reached"
    return f"nothing wrong in {played}"


# The text of an engine may contain anything.


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _escape(text: str) -> str:
    """Return the text in one line, escaped for Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&])", r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"
