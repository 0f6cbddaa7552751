"""SGLang's scheduler, where SGLang is installed: it conforms in both loops."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="no SGLang is installed")


def test_sglang_conforms() -> None:
    result = check(CheckOptions(engine="sglang", preset="tiny", max_events=600))
    assert result.first is None, result.first


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sglang_conforms_for_long(preset: str, seed: int) -> None:
    result = check(CheckOptions(engine="sglang", preset=preset, seed=seed, max_events=100_000))
    assert result.first is None, result.first
