"""Where a launch goes: to the device of its tensors, whichever is the current one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
CONCEPTS = ("attention", "blocks", "cache", "rejection", "step")


def test_every_launch_makes_the_device_of_its_tensors_the_current_one(
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
    assert num_launches == 9
