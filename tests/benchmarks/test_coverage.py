"""The report of unreached code: each entry is listed and needs a reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from benchmarks.coverage.page import (
    AWAY,
    NOT_EXECUTED,
    Module,
    Reason,
    Unreached,
    find_module,
    from_json,
    get_unexplained,
    read_reasons,
    render_page,
    to_json,
)

REASONS = Path(__file__).parents[2] / "benchmarks" / "coverage" / "unreached.toml"
TEXT = """\
def f(x):
    if x:
        y = 1
        return y
    if x is None:
        return 2
    for _ in ():
        x += 1
    return 3


def g():
    z = 4
    return z


f(1)
f(0)
"""


def run_traced(file: Path) -> Any:
    coverage = pytest.importorskip("coverage")
    tracer = coverage.Coverage(
        data_file=None, config_file=False, branch=True, include=[str(file)], concurrency="thread"
    )
    spec = importlib.util.spec_from_file_location("traced", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    tracer.start()
    try:
        spec.loader.exec_module(module)
    finally:
        tracer.stop()
    return tracer


def test_each_branch_not_taken_is_one_entry(tmp_path: Path) -> None:
    file = tmp_path / "traced.py"
    file.write_text(TEXT)
    module = find_module(run_traced(file), file, "spec/traced.py")
    assert [(one.function, one.code, one.to) for one in module.unreached] == [
        ("f", "if x is None:", "return 2"),
        ("f", "for _ in ():", "x += 1"),
        ("g", "z = 4", NOT_EXECUTED),
    ]
    assert module.num_lines - module.num_lines_reached == 4
    assert module.num_branches - module.num_branches_reached == 2


MODULE = Module(
    "spec/core/block_pool.py",
    10,
    9,
    4,
    2,
    (Unreached(3, "f", "if a | b:", "return 1"), Unreached(5, "f", "if c:", AWAY)),
)


RUN = {
    "command": "make coverage",
    "day": "2026-01-02",
    "commit": "abc",
    "python": "3.11",
    "blockstep": "0.1",
    "coverage": "7.6",
}


def make_results(*modules: Module) -> dict[str, Any]:
    return to_json(modules, {"engine host": 1_000}, RUN)


def test_written_results_are_read_back() -> None:
    assert from_json(make_results(MODULE)) == [MODULE]
    assert "on 2026-01-02" in render_page(make_results(MODULE), [])


def test_unreached_code_without_a_reason_is_listed() -> None:
    reasons = [Reason("spec/core/block_pool.py", "f", "It is never used.", code="if a | b:")]
    assert get_unexplained([MODULE], reasons) == [("spec/core/block_pool.py", MODULE.unreached[1])]
    page = render_page(make_results(MODULE), reasons)
    assert "| `f`: `` if a \\| b: `` continues to `` return 1 `` | It is never used. |" in page
    assert "| `f`: `` if c: `` leaves the function | **UNEXPLAINED** |" in page
    assert "| **all** | 10 | 9 | 4 | 2 | 1 |" in page


def test_a_reason_for_a_branch_that_is_reached_now_is_reported() -> None:
    reasons = [Reason("spec/core/block_pool.py", "f", "No.", code="if c:", to="return 2")]
    assert len(get_unexplained([MODULE], reasons)) == 2
    page = render_page(make_results(MODULE), reasons)
    assert "Explains nothing any more: `spec/core/block_pool.py`, `` if c: ``." in page


def test_a_reason_for_a_class_is_shown_once() -> None:
    ways = (Unreached(3, "C.f", "a", AWAY), Unreached(5, "C.g", "b", AWAY))
    reasons = [Reason("spec/core/block_pool.py", "C", "It is never used.")]
    page = render_page(make_results(Module("spec/core/block_pool.py", 10, 9, 4, 2, ways)), reasons)
    assert page.count("It is never used.") == 1
    assert not reasons[0].is_about("spec/core/block_pool.py", Unreached(7, "Cd", "b", AWAY))


def test_the_file_of_reasons_is_well_formed() -> None:
    read_reasons(REASONS)
