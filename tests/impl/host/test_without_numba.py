"""The host engine without numba: it runs as Python, warns once, and is not measured."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.impl.host.test_host import WITHOUT
from typer.testing import CliRunner

from blockstep.conformance.bench.timed_engines import open_side
from blockstep.conformance.command.main import app
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.search.options import ExitCode
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import Config

SLOW = "it runs as Python: pip install 'blockstep[compiled]'"


@pytest.mark.parametrize("way", WITHOUT)
def test_the_engine_warns_once_without_numba_and_is_not_measured(way: str) -> None:
    code = f"""{WITHOUT[way]}
import warnings
from blockstep.spec.vocabulary import Config
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from blockstep.impl.host import HostEngine
    for _ in range(3):
        HostEngine(Config(num_blocks=8))
(one,) = caught
assert one.category is RuntimeWarning
assert "pip install 'blockstep[compiled]'" in str(one.message)
from blockstep.conformance.bench.timed_engines import open_side
from blockstep.conformance.protocol.features import UsageError
try:
    open_side("host", Config(num_blocks=8))
except UsageError as error:
    assert "pip install 'blockstep[compiled]'" in str(error)
else:
    raise AssertionError("it was measured")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["scheduler", "profile"])
def test_a_slow_engine_is_not_measured(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostEngine, "slow_because", SLOW)
    with pytest.raises(UsageError, match=r"'host' is not measured: it runs as Python"):
        open_side("host", Config(num_blocks=8))
    arguments = ["bench", command, "--engine", "host", "--scenario", "decode", "-n", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == ExitCode.USAGE
    assert "pip install 'blockstep[compiled]'" in result.output
