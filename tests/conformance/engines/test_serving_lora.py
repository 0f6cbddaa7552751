"""LoRA under check: each token must run with the adapter of its request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
from engine_support.adapters import ADAPTERS
from engine_support.models import build_model, save_model

from blockstep.conformance.engines.serving import CheckFailedError, ServingChecker
from blockstep.impl.engine import LLM, SamplingParams
from blockstep.impl.engine.input_batch import Batch
from blockstep.impl.engine.model import Inputs

PROMPTS = [[2, 3, 4, 5, 6, 7]] * 4
ADAPTER_NAMES = ["whole", None, "some", "whole"]
Numbers: TypeAlias = torch.Tensor | None


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], LLM]:
    model = build_model("qwen3")
    root = tmp_path_factory.mktemp("served")
    folder = save_model(model, root / "model")
    modules = {name: ADAPTERS[name].save(model, root / name) for name in ("whole", "some")}

    def run() -> LLM:
        llm = LLM(folder, check=ServingChecker, block_size=4, num_blocks=24, lora_modules=modules)
        llm.generate(PROMPTS, SamplingParams(max_tokens=3), ADAPTER_NAMES)
        return llm

    return run


def test_a_right_engine_has_no_finding(serve: Callable[[], LLM]) -> None:
    checker = serve().observer
    assert isinstance(checker, ServingChecker)
    assert checker.worker.adapter_numbers == {"whole": 0, "some": 1}


def run_all_without(adapters: Numbers) -> Numbers:
    return None


def swap_sometimes(adapters: Numbers) -> Numbers:
    """Swap two adapters in decodes."""
    if adapters is None or len(adapters) > len(PROMPTS):
        return adapters
    return torch.tensor([1, 0, -1])[adapters]


def share_one(adapters: Numbers) -> Numbers:
    return None if adapters is None else adapters.clamp(max=0)


def lend_to_rows_without(adapters: Numbers) -> Numbers:
    return None if adapters is None else adapters.clamp(min=0)


def run_one_without(adapters: Numbers) -> Numbers:
    return None if adapters is None else torch.tensor([-1, 1, -1])[adapters]


def change_the_last_token(adapters: Numbers) -> Numbers:
    if adapters is None:
        return None
    adapters = adapters.clone()
    adapters[-1] = 1
    return adapters


@pytest.mark.parametrize(
    "change",
    [
        run_all_without, swap_sometimes, share_one, run_one_without, lend_to_rows_without,
        change_the_last_token,
    ],
)  # fmt: skip
def test_a_token_that_runs_with_a_wrong_adapter_is_found(
    serve: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch, change: Callable[[Numbers], Numbers]
) -> None:
    build: Any = Batch.build_inputs

    def plant(self: Batch, *args: Any) -> Inputs:
        made: Inputs = build(self, *args)
        return replace(made, adapters=change(made.adapters))

    monkeypatch.setattr(Batch, "build_inputs", plant)
    with pytest.raises(CheckFailedError, match="P6 token_runs_with_the_adapter_of_its_request"):
        serve()
