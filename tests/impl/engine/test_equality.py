"""Greedy tokens equal those of transformers, with small pools, drafts and frames in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_support.models import (
    MAX_TOKENS,
    Checkpoint,
    build_model,
    make_checkpoint,
    save_model,
)
from engine_support.storms import ASYNC, STORMS

from blockstep.impl.engine import LLM, RequestError, SamplingParams
from blockstep.spec.vocabulary import GroupKind, SpecMethod

FULL, WINDOW = GroupKind.FULL, GroupKind.SLIDING_WINDOW
GROUPS = {"qwen2": [FULL, WINDOW], "mistral": [WINDOW]}
"""KV groups of the families that have windows."""
MARGIN_MIN = 1e-4
"""Smallest difference of logits near 5: 100 times the error of float32 sums in another order."""


def get_draft(checkpoint: Checkpoint, settings: dict[str, Any]) -> dict[str, Any]:
    wants = settings.get("spec_method") is SpecMethod.DRAFT_MODEL
    return {"draft_model": checkpoint.draft_folder} if wants else {}


def test_no_token_is_a_near_tie(checkpoint: Checkpoint) -> None:
    assert checkpoint.expected.margin > MARGIN_MIN
    assert len(set(checkpoint.expected.token_ids)) > 50


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", STORMS)
def test_greedy_tokens_equal_those_of_transformers(
    checkpoint: Checkpoint, prompts: list[list[int]], name: str
) -> None:
    storm = STORMS[name]
    settings = storm.get_settings(checkpoint.family)
    llm = LLM(checkpoint.folder, **settings, **get_draft(checkpoint, settings))
    completions = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    assert [one.token_ids for one in completions] == checkpoint.expected.token_ids
    assert storm.get_missing(llm.get_stats()) == []
    assert [group.kind for group in llm.config.groups] == GROUPS.get(checkpoint.family, [])


@pytest.mark.parametrize("name", [name for name in STORMS if "num_blocks" in STORMS[name].settings])
def test_the_pool_of_a_storm_is_the_smallest_possible(
    checkpoint: Checkpoint, prompts: list[list[int]], name: str
) -> None:
    settings = STORMS[name].get_settings(checkpoint.family)
    settings |= {**get_draft(checkpoint, settings), "num_blocks": settings["num_blocks"] - 1}
    llm = LLM(checkpoint.folder, **settings)
    with pytest.raises(RequestError, match=r"at its longest it needs \d+ blocks"):
        llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))


# Three groups, and a draft model with a window of its own.


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a checkpoint with two window layers for each full attention layer."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    folder = tmp_path_factory.mktemp("layered")
    return make_checkpoint("qwen2", folder, num_hidden_layers=6, layer_types=kinds)


def draws(num_prompts: int) -> Any:
    return pytest.param(num_prompts, marks=[pytest.mark.soak] * (num_prompts > 16))


@pytest.mark.parametrize("num_prompts", [draws(10), draws(64)])
def test_unequal_numbers_of_layers_give_several_groups_of_a_kind(
    layered: Checkpoint, prompts: list[list[int]], num_prompts: int
) -> None:
    assert layered.expected.margin > MARGIN_MIN
    settings = {**STORMS["async-ngram"].settings, "num_blocks": 52}
    llm = LLM(layered.folder, **settings)
    made = llm.generate(prompts[:num_prompts], SamplingParams(max_tokens=MAX_TOKENS))
    assert [one.token_ids for one in made] == layered.expected.token_ids[:num_prompts]
    assert [group.kind for group in llm.config.groups] == [WINDOW, WINDOW, FULL]
    stats = llm.get_stats()
    assert min(stats.preemptions, stats.prefix_cache_hits, stats.drafts_accepted) > 0


@pytest.mark.parametrize("num_prompts", [draws(6), draws(64)])
def test_a_draft_model_has_windows_of_its_own(
    layered: Checkpoint, prompts: list[list[int]], tmp_path: Path, num_prompts: int
) -> None:
    llm = LLM(
        layered.folder,
        **ASYNC,
        block_size=4,
        num_blocks=100,
        max_model_len=84,
        max_num_batched_tokens=16,
        spec_method="draft_model",
        num_speculative_tokens=2,
        draft_model=save_model(build_model("mistral"), tmp_path),
    )
    made = llm.generate(prompts[:num_prompts], SamplingParams(max_tokens=MAX_TOKENS))
    assert [one.token_ids for one in made] == layered.expected.token_ids[:num_prompts]
    assert [group.sliding_window for group in llm.config.groups] == [7, 7, 0, 9]
    assert llm.get_stats().drafts_scheduled > 0
