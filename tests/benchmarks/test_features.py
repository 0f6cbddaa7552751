"""The benchmark of features: each side runs, and its line is printed."""

from __future__ import annotations

import pytest
from benchmarks import features


def test_each_side_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "NUM_WARM", 2)
    features.main(["-n", "3", "--steps", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| 3 running | us a step | by the first |"
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        *(f"| {name}" for name in features.FEATURES),
        "| one group through apply",
    ]
