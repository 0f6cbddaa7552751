"""The benchmark of the engine's host side runs with a stubbed forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import engine_host

from blockstep.impl.engine.model import Model
from blockstep.impl.host.jit import IS_COMPILED


@pytest.mark.skipif(not IS_COMPILED, reason="times mean nothing without machine code")
def test_steps_of_all_requests_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[int] = []

    def forward(model: Model, inputs: object) -> object:
        made = engine_host.forward(model, inputs)  # type: ignore[arg-type]
        calls.append(len(made))
        return made

    engine_host.make_model(tmp_path)
    monkeypatch.setattr(Model, "forward", forward)
    monkeypatch.setattr(engine_host, "NUM_WARM_UP", 2)
    figures = engine_host.measure(tmp_path, 3, 4, 2, "host", profile=False)
    assert figures.process_ms > 0
    assert 0 < figures.wall_ms <= figures.wall_p90_ms
    assert figures.read_ms > 0
    assert calls[0] == 3 * engine_host.NUM_PROMPT
    assert set(calls[1:]) == {3}
    assert len(calls) >= 2 + 4 + 2
