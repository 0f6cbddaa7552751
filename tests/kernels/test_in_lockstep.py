"""The kernels under the data plane of the worker: real plans, every slot and every attended row."""

from __future__ import annotations

import pytest

from blockstep.conformance.judge.dataplane import OnKernels
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions


@pytest.mark.parametrize("episode", range(2))
def test_an_episode_moves_real_memory_by_its_plans(backend: str, device: str, episode: int) -> None:
    played = run_episode(CheckOptions(preset="tiny", seed=5), episode, OnKernels(device=device))
    assert played.first is None
