"""Compilation of the host engine: by the first engine, not on import, and with progress shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockstep.impl.host import HostEngine, groups, jit
from blockstep.spec.vocabulary import Config

pytestmark = pytest.mark.skipif(not jit.IS_COMPILED, reason="there is nothing to compile")
count_common: Any = groups.count_common
START = "from blockstep.impl.host import HostEngine"
MAKE = "from blockstep.spec.vocabulary import Config\nHostEngine(Config(num_blocks=2))"


class Named:
    """Stands in for a function, which compiles at once."""

    def __init__(self, is_interrupted: bool = False) -> None:
        self.signatures: list[object] = []
        self.is_interrupted = is_interrupted

    def compile(self, types: object) -> None:
        """Compile it, or be interrupted the first time."""
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        self.signatures.append(types)

    def disable_compile(self) -> None:
        """Do nothing."""

    @property
    def overloads(self) -> dict[object, SimpleNamespace]:
        """Return the machine code, which says what it was compiled for."""
        return {
            types: SimpleNamespace(entry_point=lambda places, types=types: (places, types))
            for types in self.signatures
        }


def make_entry(kind: str, is_interrupted: bool = False) -> jit.Entry:
    """Return an entry whose function compiles at once."""
    entry = jit.Entry.__new__(jit.Entry)
    entry.kinds, entry.outer = (kind,), Named(is_interrupted)
    return entry


@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_progress_is_shown_unless_all_functions_are_cached(
    num_kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in range(num_kept):
        (tmp_path / f"{number}.nbi").touch()
    monkeypatch.setattr(jit, "_find_cache", lambda: tmp_path)
    monkeypatch.setattr(jit, "_ENTRIES", [make_entry("int"), make_entry("bool")])
    monkeypatch.setattr(jit, "SECONDS_BETWEEN_LINES", -1.0)
    jit.compile_entries.__wrapped__()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if num_kept == 2 else 3)
    assert [line for line in lines if "2 of 2 functions compiled" in line] == lines[2:]


def test_an_interrupted_compilation_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [make_entry("int"), make_entry("bool", is_interrupted=True)]
    monkeypatch.setattr(jit, "_find_cache", lambda: tmp_path)
    monkeypatch.setattr(jit, "_ENTRIES", entries)
    with pytest.raises(KeyboardInterrupt):
        jit.compile_entries.__wrapped__()
    jit.compile_entries.__wrapped__()
    assert [len(entry.outer.signatures) for entry in entries] == [1, 1]
    state: Any = SimpleNamespace(places=7)
    assert str([entry(state) for entry in entries]) == "[(7, (int64,)), (7, (bool,))]"


def test_python_calls_the_machine_code_of_the_declared_types() -> None:
    engine = HostEngine(Config(num_blocks=2))
    assert count_common(engine.requests.state, 0) == 0
    code = {id(one.entry_point) for one in count_common.outer.overloads.values()}
    assert {id(count_common._call)} == code


def run(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run code with its own folder of machine code."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


def test_an_import_compiles_nothing(tmp_path: Path) -> None:
    assert run(START, tmp_path).stderr == ""
    assert not [*tmp_path.rglob("*.nbi")]


@pytest.mark.soak
def test_the_first_engine_compiles_once(tmp_path: Path) -> None:
    assert "functions compiled" in run(f"{START}\n{MAKE}", tmp_path).stderr
    assert run(f"{START}\n{MAKE}", tmp_path).stderr == ""
