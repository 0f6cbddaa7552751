"""What a folder may hold, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.models import FAMILIES, build_model, generate, make_prompts, save_model
from safetensors.torch import load_file, save_file

from blockstep.impl.engine import LLM, CheckpointError, SamplingParams

PROMPTS = make_prompts()[:8]
PARAMS = SamplingParams(max_tokens=8)


def say(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
    return [one.token_ids for one in LLM(folder, **settings).generate(PROMPTS, PARAMS)]


# What can be loaded.


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
        ("qwen2", {"max_window_layers": 0, "sliding_window": 3}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ],
)
def test_every_shape_of_a_family_is_computed_as_transformers_does(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = build_model(family, **changes)
    assert say(save_model(model, tmp_path)) == generate(model, PROMPTS, 8).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_checkpoint_is_the_same_model(family: str, tmp_path: Path) -> None:
    model = build_model(family)
    save_model(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert say(tmp_path) == generate(model, PROMPTS, 8).token_ids


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_loaded_as_it_was_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_model("qwen3").to(dtype)
    llm = LLM(save_model(model, tmp_path))
    (one,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, logprobs=1))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    assert one.logprobs is not None
    (logprobs,) = one.logprobs
    for token, value in logprobs.items():
        assert value == pytest.approx(float(logits.log_softmax(-1)[token]), abs=0.15)


def test_weights_can_be_widened(tmp_path: Path) -> None:
    model = build_model("llama").to(torch.bfloat16)
    save_model(model, tmp_path)
    assert say(tmp_path, dtype="float32") == generate(model.float(), PROMPTS, 8).token_ids


def test_the_older_spelling_of_a_config_is_read(tmp_path: Path) -> None:
    model = build_model("qwen2")
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert say(tmp_path) == generate(model, PROMPTS, 8).token_ids


def test_generation_config_says_what_ends_a_text(tmp_path: Path) -> None:
    model = build_model("llama")
    save_model(model, tmp_path)
    (whole,) = LLM(tmp_path).generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))
    ends = [1, whole.token_ids[3]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (cut,) = LLM(tmp_path).generate([PROMPTS[0]], SamplingParams(max_tokens=8))
    assert cut.token_ids == whole.token_ids[:4]
    assert cut.finish_reason == "stop"


# What is refused.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(build_model("llama"), tmp_path)


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


GATE = "model.layers.1.mlp.gate_proj.weight"


def put_nan(tensors: dict[str, Any]) -> None:
    tensors[GATE][3, 5] = float("nan")


def narrow(tensors: dict[str, Any]) -> None:
    tensors[GATE] = tensors[GATE][:, :-1].contiguous()


def make_integers(tensors: dict[str, Any]) -> None:
    tensors[GATE] = tensors[GATE].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE), f"tensor '{GATE}' is missing"),
        (narrow, rf"'{GATE}' is of shape \(128, 63\), config.json asks for \(128, 64\)"),
        (put_nan, f"'{GATE}' holds NaN or infinity"),
        (make_integers, f"'{GATE}' is torch.int8: must be a float"),
        (
            lambda tensors: tensors.update(scale=torch.ones(1)),
            "'scale' is not one of this architecture",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        LLM(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not support"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu": must be .silu.'),
        ({"hidden_size": "64"}, 'hidden_size = "64": must be an int of at least 1'),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide num_attention_heads 4"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        ({"dtype": "float64"}, 'dtype = "float64": must be one of'),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "angles per kind of layer are not supported",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear needs the number 'factor'"),
    ],
)
def test_a_wrong_field_of_the_config_is_named(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message):
        LLM(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be .* truncated"):
        LLM(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(build_model("llama"), tmp_path, max_shard_size="100KB")
    min(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of.*cannot be read"):
        LLM(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_without_a_part_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        LLM(folder)


def test_a_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read as JSON"):
        LLM(folder)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM(tmp_path / "nowhere")


def test_weights_that_a_narrow_type_cannot_hold_are_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors[GATE].fill_(1e30))
    with pytest.raises(CheckpointError, match=r"does not fit torch.float16"):
        LLM(folder, dtype="float16")
