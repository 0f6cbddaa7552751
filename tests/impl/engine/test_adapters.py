"""Adapters: each request gets the tokens of transformers with its adapter merged in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.adapters import ADAPTERS
from engine_support.models import (
    MAX_TOKENS,
    Checkpoint,
    Expected,
    build_model,
    generate,
    save_model,
)
from engine_support.storms import STORMS

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import LLM, RequestError, SamplingParams, SettingsError
from blockstep.impl.engine.adapters import NO_ADAPTER, Columns
from blockstep.impl.engine.input_batch import Batch
from blockstep.impl.engine.model import Inputs

NUM_PROMPTS = 32
MARGIN_MIN = 1e-4
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
CHOSEN = [[None, *ADAPTERS][number * 7 % 5 % 4] for number in range(NUM_PROMPTS)]
"""The adapter of each prompt. Neighbours share prefixes, and mostly have different adapters."""
TESTED = {("small-pool", 0), ("async-ngram", 2)}
"""Storms and values of max_loras that are a test; the others are a soak."""


@pytest.fixture(scope="module")
def folders(qwen3: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: one.save(qwen3.model, root / name) for name, one in ADAPTERS.items()}


@pytest.fixture(scope="module")
def merged(qwen3: Checkpoint, prompts: list[list[int]]) -> dict[str | None, Expected]:
    """Return the model's outputs for all prompts, without an adapter and with each one."""
    made: dict[str | None, Expected] = {None: qwen3.expected}
    for name, adapter in ADAPTERS.items():
        with adapter.merged(qwen3.model) as model:
            made[name] = generate(model, prompts[:NUM_PROMPTS], MAX_TOKENS)
    return made


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Return the adapters of each pass, read where inputs are built, since graphs hide them."""
    found: list[set[int]] = []
    build: Any = Batch.build_inputs

    def look(self: Batch, *given: Any) -> Inputs:
        inputs: Inputs = build(self, *given)
        found.append(set() if inputs.adapters is None else {*inputs.adapters.tolist()})
        return inputs

    monkeypatch.setattr(Batch, "build_inputs", look)
    return found


def test_adapters_change_what_is_generated(merged: dict[str | None, Expected]) -> None:
    for number in range(NUM_PROMPTS):
        assert len({one.token_ids[number] for one in merged.values()}) == 4
    assert min(one.margin for one in merged.values()) > MARGIN_MIN


@pytest.mark.parametrize(
    ("name", "max_loras"),
    [
        pytest.param(name, most, marks=[pytest.mark.soak] * ((name, most) not in TESTED))
        for name in STORMS
        for most in (0, 1, 2)
    ],
)
def test_each_request_has_its_adapter(
    qwen3: Checkpoint,
    prompts: list[list[int]],
    folders: dict[str, Path],
    merged: dict[str | None, Expected],
    seen: list[set[int]],
    name: str,
    max_loras: int,
) -> None:
    storm = STORMS[name]
    settings = storm.get_settings(qwen3.family)
    if name.endswith("draft-model"):
        settings["draft_model"] = qwen3.draft_folder
    llm = LLM(
        qwen3.folder, check=ServingChecker, lora_modules=folders, max_loras=max_loras, **settings
    )
    made = llm.generate(prompts[:NUM_PROMPTS], PARAMS, CHOSEN)
    assert [one.token_ids for one in made] == [
        merged[adapter].token_ids[number] for number, adapter in enumerate(CHOSEN)
    ]
    stats = llm.get_stats()
    assert stats.preemptions > 0 or "num_blocks" not in settings
    most = max(len(numbers - {NO_ADAPTER}) for numbers in seen)
    assert min(2, max_loras or 3) <= most <= (max_loras or 3)
    assert any(len(numbers) > most for numbers in seen)  # and a request without an adapter


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_adapters_work_in_other_model_families(
    family: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    """These families have biases, no norms of heads, or windows."""
    model = build_model(family, **({"attention_bias": True} if family == "llama" else {}))
    folder = save_model(model, tmp_path / "model")
    modules = {"one": ADAPTERS["some"].save(model, tmp_path / "one")}
    with ADAPTERS["some"].merged(model) as whole:
        expected = generate(whole, prompts[:6], 8)
    assert expected.margin > MARGIN_MIN
    llm = LLM(folder, lora_modules=modules, block_size=4, max_num_batched_tokens=24)
    made = llm.generate(prompts[:6], SamplingParams(max_tokens=8), "one")
    assert [one.token_ids for one in made] == expected.token_ids


def test_no_block_is_shared_between_adapters(
    qwen3: Checkpoint, prompts: list[list[int]], folders: dict[str, Path]
) -> None:
    prompt = max(prompts, key=len)
    llm = LLM(qwen3.folder, lora_modules=folders, block_size=4)
    chosen = [None, "some", "whole", "some", None]
    made = [llm.generate(prompt, SamplingParams(max_tokens=2), name)[0] for name in chosen]
    hits = [one.num_cached_tokens for one in made]
    assert hits[:3] == [0, 0, 0]
    assert hits[3] == hits[4] == (len(prompt) - 1) // 4 * 4
    assert made[3].token_ids == made[1].token_ids
    (streamed,) = llm.stream(prompt, SamplingParams(max_tokens=1), "whole")
    assert streamed.token_ids == made[2].token_ids[:1]


def test_an_adapter_that_overflows_changes_no_other_request() -> None:
    """Columns of other adapters are overwritten, since infinity times 0 is not a number."""
    columns = Columns(
        down=torch.tensor([[3e38, 3e38], [1.0, 2.0]]),
        up=torch.tensor([[1.0, 1.0], [1.0, 10.0]]),
        owners=torch.tensor([0, 1]),
    )
    output = torch.ones(3, 2)
    columns.add_to(output, torch.full((3, 2), 2.0), torch.tensor([NO_ADAPTER, 1, 0]))
    assert output[:2].tolist() == [[1, 1], [7, 61]]
    assert output[2].isinf().all()


@pytest.mark.parametrize("adapter", ["other", "", 3, ["some"]])
def test_an_unknown_adapter_is_rejected(
    qwen3: Checkpoint, folders: dict[str, Path], adapter: Any
) -> None:
    llm = LLM(qwen3.folder, lora_modules={"some": folders["some"]})
    with pytest.raises(RequestError, match=r"must be one of lora_modules: 'some'"):
        llm.add_request([2, 3], adapter=adapter)
    with pytest.raises(RequestError, match=r"1 prompts and 2 adapter"):
        llm.generate([[2, 3]], adapter=["some", "some"])
    assert not llm.has_unfinished_requests


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lora_modules": ["folder"]}, "must be a mapping of names to folders"),
        ({"lora_modules": {"": "folder"}}, "must be a mapping of names to folders"),
        ({"max_lora_rank": 0}, "max_lora_rank = 0: must be an int of at least 1"),
        ({"max_loras": -1}, "max_loras"),
    ],
)
def test_wrong_settings_are_rejected(
    qwen3: Checkpoint, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        LLM(qwen3.folder, **settings)
