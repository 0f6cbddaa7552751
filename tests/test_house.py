"""Rules of the repository that no general tool checks (see CONTRIBUTING.md).

Each check is a plain function over source text or a folder, with a test that it finds violations.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1]
WINGS = ("spec", "impl", "kernels", "conformance")
PLACES = (*WINGS, "tests", "benchmarks", "docs")
FILES = sorted(file for place in PLACES for file in (HOUSE / place).rglob("*.py"))
PROPERTIES = HOUSE / "docs" / "reference" / "properties.md"
NUM_LINES_MAX = 70


def short(file: Path) -> str:
    return file.relative_to(HOUSE).as_posix()


def test_files_of_all_packages_are_checked() -> None:
    found = {file.relative_to(HOUSE).parts[0] for file in FILES}
    assert found >= {*WINGS, "tests", "docs"}


# The wings.


@pytest.mark.parametrize("wing", WINGS)
def test_each_package_is_a_typed_portion_of_one_namespace(wing: str) -> None:
    portion = HOUSE / wing / "blockstep"
    module = {"__main__.py"} if wing == "conformance" else set()  # `python -m blockstep`
    assert {path.name for path in portion.iterdir()} - {"__pycache__"} == {wing, *module}
    assert (portion / wing / "py.typed").is_file()


def find_imports_against_the_rules(house: Path) -> str:
    """Return what import-linter reports for the packages in `house` with our rules, or ""."""
    shutil.copy(HOUSE / "pyproject.toml", house)
    portions = os.pathsep.join(str(house / wing) for wing in WINGS)
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"],
        cwd=house,
        env={**os.environ, "PYTHONPATH": portions},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


MODULES = (
    "spec.vocabulary.config", "spec.copies", "spec.frozen_map", "spec.core.block_pool",
    "spec.core.rules", "spec.core.state", "spec.core.schedule",
    "spec.transition", "spec.snapshots", "spec.invariants", "spec.core.parts",
    "spec.features.lora", "spec.releases.policy_order",
    "spec.profiles", "spec.oracle", "impl.host.engine", "kernels.attention",
    "conformance.engine", "conformance.protocol.program", "conformance.draw.actions",
    "conformance.features.pins.draws", "conformance.features.pins.goals",
    "conformance.judge.coverage_goals", "conformance.lockstep.driver", "conformance.search.check",
    "conformance.recorded.replay", "conformance.engines.serving", "conformance.museum.pool",
    "conformance.explore.walk", "conformance.prove.runner", "conformance.bench.player",
    "conformance.campaign.plan",
    "conformance.report.failure", "conformance.command.main", "conformance.pytest_plugin",
)  # fmt: skip
"""A repository with one module for each folder that the rules distinguish."""

ALLOWED = (
    ("impl.host.engine", "from blockstep.spec.vocabulary import config"),
    ("impl.host.engine", "from blockstep.spec.vocabulary.config import Config"),
    ("impl.host.engine", "import blockstep.kernels.attention"),
    ("conformance.lockstep.driver", "from blockstep.spec.core.block_pool import take"),
    ("spec.core.block_pool", "from blockstep.spec.vocabulary.config import Config"),
    ("spec.releases.policy_order", "from blockstep.spec.core.schedule import goes_on"),
    ("spec.oracle", "from blockstep.spec.profiles import STRICT"),
    ("conformance.command.main", "from blockstep.conformance.report import failure"),
    ("conformance.prove.runner", "from blockstep.conformance.engine import Engine"),
    ("conformance.features.pins.goals", "from blockstep.conformance.judge import coverage_goals"),
)
FORBIDDEN = (
    ("spec.core.schedule", "from blockstep.spec.releases.policy_order import single_waiting_queue"),
    ("spec.core.rules", "from blockstep.spec.releases import policy_order"),
    ("spec.core.schedule", "from blockstep.spec.features import lora"),
    ("spec.features.lora", "from blockstep.spec.releases import policy_order"),
    ("spec.core.state", "from blockstep.spec import profiles"),
    ("spec.vocabulary.config", "from blockstep.spec.profiles import STRICT"),
    ("spec.core.block_pool", "import blockstep.impl.host.engine"),
    ("spec.core.block_pool", "import blockstep.kernels.attention"),
    ("spec.vocabulary.config", "from blockstep.conformance.lockstep import driver"),
    ("impl.host.engine", "from blockstep.spec.core.block_pool import take"),
    ("impl.host.engine", "from blockstep.spec import pool"),
    ("impl.host.engine", "import blockstep.spec"),
    ("impl.host.engine", "def f():\n    from blockstep.spec.core.block_pool import take"),
    ("impl.host.engine", "import blockstep.conformance.lockstep.driver"),
    ("kernels.attention", "import blockstep.spec.vocabulary.config"),
    ("kernels.attention", "import blockstep.impl.host.engine"),
    ("kernels.attention", "import blockstep.conformance.lockstep.driver"),
    ("conformance.lockstep.driver", "import blockstep.impl.host.engine"),
    ("conformance.lockstep.driver", "def f():\n    import blockstep.kernels.attention"),
    (
        "conformance.search.check",
        "from blockstep.conformance.report.failure import render_first_failure",
    ),
    ("conformance.draw.actions", "from blockstep.conformance.judge import coverage_goals"),
    ("conformance.features.pins.draws", "from blockstep.conformance.judge import coverage_goals"),
    ("conformance.features.pins.goals", "import blockstep.conformance.search.check"),
    ("conformance.bench.player", "def f():\n    import blockstep.conformance.prove.runner"),
    ("conformance.pytest_plugin", "import blockstep.conformance.command.main"),
    ("conformance.engine", "from blockstep.conformance.protocol.program import Program"),
)


def build_house(house: Path, sources: Mapping[str, str]) -> None:
    """Create every module of `MODULES`, empty unless `sources` has its text."""
    for name in MODULES:
        wing = name.split(".", maxsplit=1)[0]
        file = (house / wing / "blockstep" / Path(*name.split("."))).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(sources.get(name, ""))
        for room in file.parents[: len(name.split(".")) - 1]:
            (room / "__init__.py").touch()


def test_allowed_imports_pass(tmp_path: Path) -> None:
    sources = {name: "\n".join(s for n, s in ALLOWED if n == name) for name, _ in ALLOWED}
    build_house(tmp_path, sources)
    assert find_imports_against_the_rules(tmp_path) == ""


def list_houses() -> list[dict[str, str]]:
    """Return the forbidden imports in as few repositories as possible, one for each module."""
    houses: list[dict[str, str]] = []
    for name, source in FORBIDDEN:
        free = [house for house in houses if name not in house]
        if not free:
            houses.append({})
        (free or houses)[-1][name] = source
    return houses


@pytest.mark.parametrize("sources", list_houses())
def test_each_forbidden_import_is_caught(sources: dict[str, str], tmp_path: Path) -> None:
    build_house(tmp_path, sources)
    message = " ".join(find_imports_against_the_rules(tmp_path).split())  # it breaks long lines
    assert [name for name in sources if f"blockstep.{name} -> blockstep." not in message] == []


def test_a_module_without_a_layer_is_caught(tmp_path: Path) -> None:
    build_house(tmp_path, {})
    (tmp_path / "conformance" / "blockstep" / "conformance" / "attic.py").touch()
    assert "attic" in find_imports_against_the_rules(tmp_path)


# Circles.


CIRCULAR_TYPES = ("blockstep.spec.core.hooks", "blockstep.spec.core.feature")
"""Modules whose imports for types only do not count. The types of hooks are circular by nature: a
state has rules, rules have hooks, and a hook is a function of a step of a state."""


def find_imports(root: Path) -> dict[str, set[str]]:
    """Return the modules below `root` that each of them imports: at once, later or for types."""
    files: dict[str, Path] = {}
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        named: set[str] = set()
        nodes: list[ast.AST] = [ast.parse(file.read_text())]
        for node in nodes:
            is_of_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if is_of_types and name in CIRCULAR_TYPES:
                continue
            nodes += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= inner if inner <= files.keys() else inner | {node.module}
        found[name] = named & files.keys() - {name}
    return found


def find_circles(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other: the rest after both ends of chains are removed."""
    left = {name: {*named} for name, named in imports.items()}
    while True:
        imported = set[str]().union(*left.values())
        ends = {name for name, named in left.items() if not named or name not in imported}
        if not ends:
            return sorted(left)
        left = {name: named - ends for name, named in left.items() if name not in ends}


@pytest.mark.parametrize("wing", WINGS)
def test_no_modules_import_each_other(wing: str) -> None:
    assert find_circles(find_imports(HOUSE / wing)) == []


def test_a_circular_import_is_caught(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    files = {
        "room/__init__.py": "",
        "room/a.py": "from room.b import f",
        "room/b.py": "from room import c",
        "room/c.py": "def f():\n    import room.a",
        "room/d.py": "import room.a",
        "room/e.py": "if TYPE_CHECKING:\n    import room.f",
        "room/f.py": "import room.e",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert find_circles(find_imports(tmp_path)) == [
        *("room.a", "room.b", "room.c"),
        *("room.e", "room.f"),
    ]
    (tmp_path / "room" / "c.py").write_text("")
    (tmp_path / "room" / "f.py").write_text("")
    assert find_circles(find_imports(tmp_path)) == []


# P-numbers.


def get_defined(page: str) -> list[str]:
    """Return the P-numbers that the page of properties defines, in the order of its headings."""
    return re.findall(r"^#+ (P\d+)\b", page, flags=re.MULTILINE)


def find_unknown_properties(source: str, defined: list[str]) -> list[str]:
    return sorted({*re.findall(r"\bP\d+\b", source)} - {*defined})


def test_the_properties_are_numbered_without_a_gap() -> None:
    defined = get_defined(PROPERTIES.read_text())
    assert defined == [f"P{number}" for number in range(1, 27)]


def test_every_property_named_in_code_exists() -> None:
    defined = get_defined(PROPERTIES.read_text())
    unknown = {short(file): find_unknown_properties(file.read_text(), defined) for file in FILES}
    assert {file: names for file, names in unknown.items() if names} == {}


def test_an_unknown_property_is_caught() -> None:
    unknown = "P" + "27"
    assert find_unknown_properties(f"holds by P4 and {unknown}", ["P4"]) == [unknown]


# One screen per concept.


def find_long_functions(source: str) -> list[str]:
    """Return functions of more than `NUM_LINES_MAX` lines, with docstring, without decorators."""
    return [
        f"{node.name}: {length} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > NUM_LINES_MAX
    ]


def test_every_function_fits_one_screen() -> None:
    long = {short(file): find_long_functions(file.read_text()) for file in FILES}
    assert {file: names for file, names in long.items() if names} == {}


def test_a_long_function_is_caught() -> None:
    body = "    pass\n" * (NUM_LINES_MAX - 1)
    assert find_long_functions(f"def f():\n{body}") == []
    assert find_long_functions(f"def f():\n{body}    pass") == [f"f: {NUM_LINES_MAX + 1} lines"]
