"""The script of `make gpu` on a machine without a GPU: its checks, arguments and exit status.

The script runs a stand-in for Python that logs its calls. The command that it runs is tested in
tests/benchmarks/test_gpu.py.
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
from benchmarks.gpu.parts import TESTED

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "gpu"
PYTHON = """#!/bin/sh
echo "TRITON_INTERPRET=${TRITON_INTERPRET-unset} PYTHONPATH=$PYTHONPATH" \
  "plugins=$PYTEST_DISABLE_PLUGIN_AUTOLOAD" >> "$LOG"
for argument do echo "[$argument]" >> "$LOG"; done
[ "$1" = - ] && { echo '{"device": "a GPU"}'; exit "${NO_GPU:-0}"; }
exit "${STATUS:-0}"
"""


def run(folder: Path, *options: str, **environment: str) -> tuple[int, list[str], str]:
    """Return the exit status, the arguments of the second call, and the output."""
    python, log = folder / "python", folder / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, *options],
        env={
            **os.environ, "LOG": str(log), "GPU_PYTHON": str(python), "TRITON_INTERPRET": "1",
            "PYTHONPATH": "carried", "RESULTS": "", **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    first, *lines = log.read_text().splitlines()
    assert lines[0] == "[-]"
    assert first.startswith("TRITON_INTERPRET=unset ")
    return done.returncode, lines[1:], done.stderr


def test_the_command_gets_the_machine_and_the_options(tmp_path: Path) -> None:
    status, (_, *arguments), _ = run(tmp_path, "tests", "--again", "--", "-k", "a b")
    assert status == 0
    assert arguments == [
        "[-m]", "[benchmarks.gpu]", "[--about]", '[{"device": "a GPU"}]', "[--sanitizer]",
        "[compute-sanitizer]", "[tests]", "[--again]", "[--]", "[-k]", "[a b]",
    ]  # fmt: skip


def test_kernels_are_compiled_and_pytest_plugins_are_not_loaded(
    tmp_path: Path,
) -> None:
    _, (environment, *_), _ = run(tmp_path)
    assert environment == (
        "TRITON_INTERPRET=unset PYTHONPATH=spec:impl:kernels:conformance:carried plugins=1"
    )


def test_the_environment_sets_the_sanitizer_and_the_folder(tmp_path: Path) -> None:
    _, arguments, _ = run(tmp_path, SANITIZER="", RESULTS="/a folder")
    assert arguments[5:] == ["[--sanitizer]", "[]", "[--results]", "[/a folder]"]


def test_the_exit_status_is_that_of_the_command(tmp_path: Path) -> None:
    assert run(tmp_path, STATUS="1")[0] == 1


def test_nothing_is_run_without_a_gpu(tmp_path: Path) -> None:
    status, calls, output = run(tmp_path, NO_GPU="1")
    assert (status, calls) == (2, [])
    assert output.splitlines()[-1] == "make gpu: nothing was run"


def test_missing_requirements_of_the_python_are_reported() -> None:
    """The real checks run in the Python that runs the tests."""
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
sys.exit(pytest.main(["-q", "--collect-only", *sys.argv[2:]]))
"""
"""Python that hides modules from our code, but not from installed packages."""


def test_the_tests_import_only_modules_that_the_script_checks() -> None:
    """Otherwise no test would run there, since pytest stops if a conftest cannot be imported."""
    pytest.importorskip("triton")
    asked = re.search(r"needs = \((.*?)\)", SCRIPT.read_text(), re.DOTALL)
    assert asked is not None
    needs = set(re.findall(r'"(\w+)"', asked[1]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    declared = [*project["project"]["dependencies"], *groups["test"], *groups["vllm-tests"]]
    included = {"include-group": "vllm-tests"}
    names = {re.split(r"[^\w-]", one)[0].lower() for one in declared if one != included} - needs
    others = [module for module, dists in packages_distributions().items()
              if names.intersection(dist.lower() for dist in dists)]  # fmt: skip
    assert {"hypothesis", "z3", "xdist"} <= set(others)
    paths = [ROOT / wing for wing in ("spec", "impl", "kernels", "conformance")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(others), *TESTED], cwd=ROOT, capture_output=True,
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


def test_a_broken_gpu_fails_one_test_and_no_later_one(tmp_path: Path) -> None:
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
