"""Table of the seeded bugs: what catches each, from results of `blockstep museum run`.

    python -m benchmarks.museum FILE...

Puts results (`blockstep museum run --json FILE`) into benchmarks/results/museum.json, of which
`make docs` makes the page: a column for each equivalence, a cell for each seeded bug.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._pages import get_commit

from blockstep.conformance.museum import EXHIBITS
from blockstep.conformance.museum.trial import describe, format_fall, name_standing, tabulate

CELLS = Path(__file__).with_name("results") / "museum.json"


def main(files: Sequence[str]) -> int:
    """Put the rows of some files into the cells, each with the day and commit of this call."""
    if not files:
        print(__doc__)
        return 2
    kept = read_cells()
    for file in files:
        for row in json.loads(Path(file).read_text(encoding="utf-8")):
            column = kept["columns"].setdefault(name_standing(row), {"runs": [], "cells": {}})
            column["cells"][row["exhibit"]] = format_fall(row)
            run = f"{datetime.now(tz=UTC).date().isoformat()} at commit {get_commit()}"
            if run not in column["runs"]:
                column["runs"].append(run)
    CELLS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


def read_cells() -> dict[str, Any]:
    """Return what is kept: for each column the runs and the cells by seeded bug."""
    kept: dict[str, Any] = json.loads(CELLS.read_text(encoding="utf-8"))
    return kept


def make_page() -> str:
    """Return the runs of each column and the table of all seeded bugs that there are today."""
    columns = read_cells()["columns"]
    lines = [f"- {name}: {', '.join(column['runs'])}" for name, column in columns.items()]
    about: dict[str, tuple[str, str]] = {}
    for name, exhibit in EXHIBITS.items():
        description = describe(exhibit)
        about[name] = str(description["what is wrong"]), str(description["upstream"])
    table = tabulate(about, {name: column["cells"] for name, column in columns.items()})
    return "Runs of each column:\n\n" + "\n".join(lines) + "\n\n" + table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
