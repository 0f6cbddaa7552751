"""Dispatch of launches: a kernel runs on the device of its tensors, not on the current one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from blockstep.kernels.arguments import check_fp8
from blockstep.kernels.dispatch import is_dependent_launch

pytest.importorskip("triton")
CONCEPTS = ("attention", "blocks", "cache", "rejection", "step")


def test_every_launch_uses_the_device_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[object] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    first = torch.zeros(1)
    num_launches = 0
    for concept in CONCEPTS:
        module = importlib.import_module(f"blockstep.kernels.{concept}_triton")
        for name, launch in vars(module).items():
            if name.startswith("launch_"):
                num_launches += 1
                with pytest.raises(TypeError, match="missing"):
                    launch(first)
    assert entered == [first] * num_launches
    assert num_launches == 11


@pytest.mark.parametrize(("capability", "refused"), [((8, 6), True), ((8, 9), False)])
def test_fp8_is_rejected_on_a_gpu_without_fp8_support(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    if refused:
        with pytest.raises(TypeError, match=r"key_cache: .* on cuda:0, .* is 8\.6; fp8 needs 8\.9"):
            check_fp8("key_cache", device)
    else:
        check_fp8("key_cache", device)


@pytest.mark.parametrize(("capability", "expected"), [((8, 9), False), ((9, 0), True)])
def test_early_launches_are_used_only_on_gpus_that_support_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    is_dependent_launch.cache_clear()
    assert is_dependent_launch(torch.device("cuda", 0)) is expected
    is_dependent_launch.cache_clear()
    assert not is_dependent_launch(torch.device("cpu"))
