"""What users imported yesterday works today, or says where it is now.

`CALLS` is a file as pages of the documentation once showed it, by the names of that time.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from blockstep.conformance.engine import get_traits
from blockstep.conformance.moved import MOVED, get_new_name
from blockstep.conformance.protocol.registry import load_engine

IMPORTS = [
    ("blockstep.conformance.adapters.vllm_releases", "RELEASES"),
    ("blockstep.conformance.check", "check"),
    ("blockstep.conformance.cli", "app"),
    ("blockstep.conformance.dataplane", "OnKernels"),
    ("blockstep.conformance.engine", "Capability"),
    ("blockstep.conformance.machine", "machine"),
    ("blockstep.conformance.program", "Answer"),
    ("blockstep.conformance.registry", "load_engine"),
    ("blockstep.conformance.safety", "Safety"),
    ("blockstep.conformance.serving", "ServingChecker"),
    ("blockstep.conformance.traces", "write_trace"),
    ("blockstep.spec", "Oracle"),
]
CALLS = """
from blockstep.conformance.program import Answer, Drain, Program
from blockstep.conformance.registry import load_engine
from blockstep.conformance.safety import Safety
from blockstep.conformance.shrink import shrink
from blockstep.conformance.driver import LockStep
from blockstep.spec import Config, Oracle, Request, Schedule, Submit

config = Config(num_blocks=10, block_size=4)
run = LockStep.start(config, load_engine("host"))
for action in (Submit(Request("A", (1, 2, 3), max_tokens=2)), Schedule(), Answer(), Drain()):
    assert run.perform(action) == []
oracle = Oracle(config)
assert oracle.apply(Submit(Request("A", (1, 2, 3), max_tokens=2)))
assert Program(config, (Schedule(),)).config is config
assert Safety().name == "safety"
assert callable(shrink)
print("done")
"""


@pytest.mark.parametrize(("module", "name"), IMPORTS, ids=lambda text: text)
def test_what_was_imported_once_is_found(module: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = importlib.import_module(module)
    assert getattr(found, name, None) is not None
    new_name = get_new_name(module)
    if new_name is not None:
        assert getattr(found, name) is getattr(sys.modules[new_name], name)


def test_a_file_of_yesterday_runs_and_is_told_the_new_names() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", "-c", CALLS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    for old in ("program", "registry", "safety", "shrink", "driver"):
        told = f"blockstep.conformance.{old} is called blockstep.conformance.{MOVED[old]} now"
        assert told in done.stderr


def test_an_engine_is_found_by_the_name_that_it_had() -> None:
    with pytest.warns(FutureWarning, match="the engine compiled is called host now"):
        held = get_traits(load_engine("compiled@plan")).equivalence
    assert held is not None
    assert held.name == "plan"
    with pytest.warns(DeprecationWarning, match=r"called blockstep\.impl\.host:HostEngine now"):
        old = importlib.import_module("blockstep.impl.compiled")
    assert old.CompiledEngine is load_engine("host")


def test_no_module_has_an_old_name_again() -> None:
    for old in MOVED:
        path = f"blockstep.conformance.{old}"
        for finder in sys.meta_path:
            is_ours = type(finder).__module__ == "blockstep.conformance.moved"
            package = importlib.import_module("blockstep.conformance")
            find = getattr(finder, "find_spec", None)
            assert is_ours or find is None or find(path, package.__path__) is None, path


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("blockstep.conformance.nowhere")
