"""The table of commands and engines: every cell is the output of its command."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.commands import (
    COLUMNS,
    LOCAL,
    ROWS,
    WORKS,
    Column,
    Row,
    find_commands,
    has_history,
    read_cells,
    render,
    run_column,
)


def compare(column: Column, folder: Path, slow: bool) -> None:
    kept = read_cells()[column.title]

    def is_wanted(row: Row) -> bool:
        return (slow or not row.is_slow) and (not row.is_of_history or has_history(column))

    cells = run_column(column, folder, is_wanted)
    assert cells == {command: kept[command] for command in cells}


@pytest.mark.parametrize("column", LOCAL, ids=lambda column: column.title)
def test_a_column_equals_the_output_of_its_commands(column: Column, tmp_path: Path) -> None:
    compare(column, tmp_path, slow=False)


@pytest.mark.soak
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.title)
def test_a_whole_column_equals_the_output_of_its_commands(column: Column, tmp_path: Path) -> None:
    if column.path is None:
        pytest.skip(f"{column.variable} names no checkout, so {column.title} is not held to it")
    compare(column, tmp_path, slow=True)


@pytest.mark.parametrize(
    "column", [c for c in COLUMNS if c.variable], ids=lambda column: column.title
)
def test_a_column_of_a_checkout_equals_the_output_of_its_commands(
    column: Column, tmp_path: Path
) -> None:
    if column.path is None:
        pytest.skip(f"{column.variable} names no checkout, so {column.title} is not held to it")
    compare(column, tmp_path, slow=False)


def test_every_command_that_takes_an_engine_is_a_row() -> None:
    takes = {name for name, takes_engine in find_commands().items() if takes_engine}
    assert takes == {row.name for row in ROWS} - {"validate", "explain"}


def test_every_cell_is_kept_and_is_on_the_page() -> None:
    columns = read_cells()
    assert list(columns) == [column.title for column in COLUMNS]
    assert all(list(cells) == [row.command for row in ROWS] for cells in columns.values())
    assert all(cell for cells in columns.values() for cell in cells.values())
    page = render(columns)
    rows = [line for line in page.splitlines() if line.startswith("| `blockstep ")]
    assert [line.split("`")[1] for line in rows] == [f"blockstep {row.command}" for row in ROWS]
    refused = {cell for cells in columns.values() for cell in cells.values() if cell != WORKS}
    assert 0 < len(refused) < len(ROWS)
    assert all(cell in page for cell in refused)


def test_a_command_that_crashes_gives_no_cell(tmp_path: Path) -> None:
    from benchmarks.commands import make_files, run_cell

    files = make_files(tmp_path)
    broken = Column("broken", f"{__name__}:make_broken")
    with pytest.raises(AssertionError, match="no such scheduler"):
        run_cell(Row("arms --engine ENGINE --path PATH --workloads 2"), broken, files)


def make_broken(_config: object) -> object:
    raise OSError("no such scheduler")
