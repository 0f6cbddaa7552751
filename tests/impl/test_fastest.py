"""The fastest engine that can take a config; and the compiled one says so where it is not fast."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.impl.compiled.test_compiled import WITHOUT
from typer.testing import CliRunner

from blockstep.conformance.bench.sides import open_side
from blockstep.conformance.command.main import app
from blockstep.conformance.engine import ALL_CAPABILITIES
from blockstep.conformance.protocol.features import UsageError
from blockstep.conformance.protocol.registry import load_engine
from blockstep.conformance.search.options import ExitCode
from blockstep.impl import fastest
from blockstep.impl.capabilities import list_needed
from blockstep.impl.compiled import IS_COMPILED, CompiledEngine
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import Config, GroupKind, KVGroup, Policy, SpecMethod

PLAIN = Config(num_blocks=8)
ASKED: dict[str, dict[str, Any]] = {
    "priority": {"policy": Policy.PRIORITY},
    "drafts": {"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 1},
    "async": {"max_frames_in_flight": 2, "async_scheduling": True},
    "pipeline": {"max_frames_in_flight": 2},
    "groups": {"groups": (KVGroup(GroupKind.FULL, 16),)},
}
SLOW = "it runs as Python: pip install 'blockstep[compiled]'"


@pytest.mark.parametrize("name", ASKED)
def test_a_config_asks_for_what_an_engine_may_lack(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(num_blocks=8, **ASKED[name])
    assert list_needed(PLAIN) == frozenset()
    assert list_needed(config) == {name}
    assert name in ALL_CAPABILITIES
    monkeypatch.setattr(fastest, "COMPILED", ALL_CAPABILITIES - {name})
    assert fastest.get_fastest(config) is HostEngine


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not there, or switched off")
def test_the_compiled_engine_is_taken_where_it_can_be() -> None:
    assert fastest.get_fastest(PLAIN) is CompiledEngine
    assert isinstance(load_engine("fastest")(PLAIN), CompiledEngine)


@pytest.mark.parametrize("way", WITHOUT)
def test_without_numba_the_host_engine_is_taken_and_the_other_warns_once(way: str) -> None:
    code = f"""{WITHOUT[way]}
import warnings
from blockstep.impl.fastest import make_engine
from blockstep.spec.vocabulary import Config
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert type(make_engine(Config(num_blocks=8))).__name__ == "HostEngine"
    assert not caught
    from blockstep.impl.compiled import CompiledEngine
    for _ in range(3):
        CompiledEngine(Config(num_blocks=8))
(one,) = caught
assert one.category is RuntimeWarning
assert "pip install 'blockstep[compiled]'" in str(one.message)
from blockstep.conformance.bench.sides import open_side
from blockstep.conformance.protocol.features import UsageError
try:
    open_side("compiled", Config(num_blocks=8))
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
def test_what_is_slow_is_not_measured(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledEngine, "slow_because", SLOW)
    with pytest.raises(UsageError, match=r"'compiled' is not measured: it runs as Python"):
        open_side("compiled", PLAIN)
    arguments = ["bench", command, "--engine", "compiled", "--scenario", "decode", "-n", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == ExitCode.USAGE
    assert "pip install 'blockstep[compiled]'" in result.output
