"""`make gpu` where there is no GPU: what it asks of a machine, runs, leaves out, and says of it.

The Python that it is given is a script which writes down how it was called.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "gpu"
PYTHON = """#!/bin/sh
echo "python $* TRITON_INTERPRET=${TRITON_INTERPRET-unset} PYTHONPATH=$PYTHONPATH" \
  "plugins=$PYTEST_DISABLE_PLUGIN_AUTOLOAD" >> "$LOG"
echo "this is $*"
[ "$1" = - ] && exit "${NO_GPU:-0}"
[ "$2" = pytest ] && exit "${TESTS:-0}"
exit 0
"""
SANITIZER = """#!/bin/sh
echo "sanitizer $* caching=$PYTORCH_NO_CUDA_MEMORY_CACHING" >> "$LOG"
exit "${SANITIZED:-0}"
"""


def run(folder: Path, *options: str, **environment: str) -> tuple[int, list[str], str]:
    """Exit status, how everything was called, and what was said."""
    for name, text in (("python", PYTHON), ("sanitizer", SANITIZER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    log = folder / "log"
    done = subprocess.run(
        [SCRIPT, *options],
        env={
            **os.environ, "LOG": str(log), "GPU_PYTHON": str(folder / "python"),
            "SANITIZER": str(folder / "sanitizer"), "TRITON_INTERPRET": "1", "RESULTS": "",
            "PYTHONPATH": "carried", **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, log.read_text().splitlines()[1:], done.stderr


def test_tests_sanitizer_and_times_are_run_on_compiled_kernels(tmp_path: Path) -> None:
    status, calls, said = run(tmp_path, "-x")
    assert status == 0
    tests, sanitizer, times = calls
    assert tests.startswith("python -m pytest tests/kernels tests/impl/engine -x ")
    assert "--error-exitcode" in sanitizer
    assert sanitizer.endswith("caching=1")
    assert times.startswith("python benchmarks/kernels.py --json benchmarks/results ")
    for call in (tests, times):
        assert "TRITON_INTERPRET=unset PYTHONPATH=spec:impl:kernels:conformance:carried " in call
    assert said.splitlines() == [
        f"make gpu: {part} passed" for part in ("tests", "compute-sanitizer", "times")
    ]


def test_no_plugin_of_that_python_can_fail_the_tests(tmp_path: Path) -> None:
    _, (tests, *_), _ = run(tmp_path)
    assert tests.endswith("plugins=1")


def test_parts_can_be_run_apart_and_leave_what_they_say_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    status, calls, said = run(tmp_path, "times", "tests", "-k", "times", RESULTS=str(folder))
    assert status == 0
    times, tests = calls
    assert times.startswith(f"python benchmarks/kernels.py --json {folder} ")
    assert tests.startswith("python -m pytest tests/kernels tests/impl/engine -k times ")
    assert said.splitlines() == ["make gpu: times passed", "make gpu: tests passed"]
    assert sorted(file.name for file in folder.iterdir()) == ["tests.txt", "times.txt"]
    assert (folder / "tests.txt").read_text().startswith("this is -m pytest tests/kernels")


def test_a_part_fails_whether_or_not_its_words_are_kept(tmp_path: Path) -> None:
    status, _, said = run(tmp_path, "tests", TESTS="1", RESULTS=str(tmp_path))
    assert status == 1
    assert said.splitlines() == ["make gpu: tests FAILED (1)"]


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"TESTS": "1"}, "tests FAILED (1)"),
        ({"SANITIZED": "3"}, "compute-sanitizer FAILED (3)"),
        ({"SANITIZER": "/no/such/tool"}, "compute-sanitizer NOT RUN"),
    ],
)
def test_a_part_that_fails_or_is_missing_fails_the_whole_and_hinders_no_other(
    tmp_path: Path, environment: dict[str, str], line: str
) -> None:
    if "SANITIZER" in environment and Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        pytest.skip("the real one is found")
    status, calls, said = run(tmp_path, **environment)
    assert status == 1
    assert f"make gpu: {line}" in said.splitlines()
    assert calls[-1].startswith("python benchmarks/kernels.py")


def test_the_sanitizer_is_left_out_by_wish(tmp_path: Path) -> None:
    status, calls, said = run(tmp_path, SANITIZER="")
    assert (status, len(calls)) == (0, 2)
    assert "make gpu: compute-sanitizer left out, as asked" in said.splitlines()


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    status, calls, said = run(tmp_path, NO_GPU="1")
    assert (status, calls) == (2, [])
    assert said.splitlines()[-1] == "make gpu: nothing was run"


def test_this_python_is_told_what_it_lacks() -> None:
    """The real questions, asked of the Python that runs the tests."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("it lacks nothing")
    done = subprocess.run(
        [SCRIPT], env={**os.environ, "GPU_PYTHON": sys.executable}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "sees no CUDA device through torch" in done.stderr


WITHOUT = """
import importlib.util
import sys
def is_missing(name):
    frame = sys._getframe(2)
    while "importlib" in frame.f_code.co_filename or frame.f_code is find_spec.__code__:
        frame = frame.f_back
    ours = "site-packages" not in frame.f_code.co_filename
    return ours and name.partition(".")[0] in sys.argv[1].split(",")
class Missing:
    def find_spec(self, name, path=None, target=None):
        if is_missing(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
find = importlib.util.find_spec
def find_spec(name, package=None):
    return None if is_missing(name) else find(name, package)
importlib.util.find_spec = find_spec
sys.meta_path.insert(0, Missing())
import pytest
sys.exit(pytest.main(["-q", "--collect-only", "tests/kernels", "tests/impl/engine"]))
"""
"""What others need in turn is theirs to bring."""


def test_the_tests_import_nothing_that_is_not_asked_for() -> None:
    """Otherwise none of them would run there: pytest ends where a conftest cannot be imported."""
    pytest.importorskip("triton")
    asked = re.search(r"needs = \((.*?)\)", SCRIPT.read_text(), re.DOTALL)
    assert asked is not None
    needs = set(re.findall(r'"(\w+)"', asked[1]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = [*project["project"]["dependencies"], *project["dependency-groups"]["test"]]
    names = {re.split(r"[^\w-]", one)[0].lower() for one in declared} - needs
    others = [module for module, dists in packages_distributions().items()
              if names.intersection(dist.lower() for dist in dists)]  # fmt: skip
    assert {"hypothesis", "z3", "xdist"} <= set(others)
    paths = [ROOT / wing for wing in ("spec", "impl", "kernels", "conformance")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(others)], cwd=ROOT, capture_output=True,
        text=True, check=False, env={
            **os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


BREAKS = """
import torch

def test_that_breaks_the_gpu():
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize

def test_after_it():
    assert not torch.cuda.is_initialized()
"""


def test_a_broken_gpu_fails_one_test_and_not_those_after_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_gpu.py").write_text(BREAKS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "-v", "-rf", tmp_path],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"crashed while running '.*test_that_breaks_the_gpu'", done.stdout)
    assert re.search(r"PASSED .*test_after_it", done.stdout), done.stdout
