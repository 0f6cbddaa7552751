"""The kernels run as the worker's data plane: real plans, every slot and attended row compared."""

from __future__ import annotations

import pytest

from blockstep.conformance.judge.dataplane import OnKernels
from blockstep.conformance.search.episodes import run_episode
from blockstep.conformance.search.options import CheckOptions


@pytest.mark.parametrize("episode", range(2))
def test_an_episode_runs_the_kernels_on_its_plans(backend: str, device: str, episode: int) -> None:
    played = run_episode(CheckOptions(preset="tiny", seed=5), episode, OnKernels(device=device))
    assert played.first is None
