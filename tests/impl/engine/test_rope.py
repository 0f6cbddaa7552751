"""Rotary embeddings: the angles of every variant equal those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.models import SHAPE, build_model, generate, make_prompts, save_model
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockstep.impl.engine import LLM, SamplingParams, SettingsError
from blockstep.impl.engine.config_json import Fields
from blockstep.impl.engine.rope import get_rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-untruncated": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn-factor": {**YARN, "attention_factor": 1.3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_angles_equal_those_of_transformers(name: str) -> None:
    config = LlamaConfig(**SHAPE, head_dim=32, rope_parameters=VARIANTS[name])
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.arange(200)[None]
    cos, sin = theirs(torch.zeros(1), positions)
    fields = Fields(Path("config.json"), {"rope_parameters": VARIANTS[name]})
    table = get_rope(fields, 32, 256).build_table(200, torch.float32, "cpu")
    torch.testing.assert_close(table[:, :16], cos[0, :, :16], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(table[:, 16:], sin[0, :, :16], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama3", "yarn", "linear"])
def test_a_model_with_a_variant_generates_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    prompts = make_prompts()[:8]
    model = build_model("llama", rope_parameters=VARIANTS[name])
    llm = LLM(save_model(model, tmp_path))
    made = [one.token_ids for one in llm.generate(prompts, SamplingParams(max_tokens=8))]
    assert made == generate(model, prompts, 8).token_ids


def test_the_older_config_spelling_gives_the_same_angles() -> None:
    newer = Fields(Path("config.json"), {"rope_parameters": LLAMA3})
    older_numbers = {**LLAMA3, "type": LLAMA3["rope_type"]}
    del older_numbers["rope_type"], older_numbers["rope_theta"]
    older = Fields(Path("config.json"), {"rope_scaling": older_numbers, "rope_theta": 10000.0})
    assert get_rope(newer, 32, 256) == get_rope(older, 32, 256)


YARN_HERE = {"rope_type": "yarn", "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": YARN_HERE, "original_max_position_embeddings": 64},
        {
            "rope_scaling": {**YARN_HERE, "original_max_position_embeddings": 128},
            "original_max_position_embeddings": 32,
        },
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": None,
                "original_max_position_embeddings": 64,
            }
        },
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_parameters": DEFAULT},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": None}},
    ],
)
def test_repeated_and_misplaced_settings_are_read_as_transformers_reads_them(
    given: dict[str, Any],
) -> None:
    given = {"rope_theta": 5000.0, **given}
    fields = Fields(Path("config.json"), copy.deepcopy(given))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**SHAPE, head_dim=32, **given))
    rope = get_rope(fields, 32, SHAPE["max_position_embeddings"])
    torch.testing.assert_close(torch.tensor(rope.inv_freq), theirs.inv_freq, rtol=1e-4, atol=0)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling)


def test_linear_scaling_multiplies_the_maximum_length(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    llm = LLM(save_model(build_model("llama", rope_parameters=linear), tmp_path))
    assert llm.config.max_model_len == 512


def test_yarn_gives_the_original_length_times_the_factor(tmp_path: Path) -> None:
    stretched = {**YARN, "factor": 8.0}
    llm = LLM(save_model(build_model("llama", rope_parameters=stretched), tmp_path))
    assert llm.config.max_model_len == 512


def test_dynamic_scaling_ends_at_the_original_length(tmp_path: Path) -> None:
    folder = save_model(build_model("llama", rope_parameters=VARIANTS["dynamic"]), tmp_path)
    assert LLM(folder).config.max_model_len == 256
    with pytest.raises(SettingsError, match="made for 256 positions"):
        LLM(folder, max_model_len=257)
