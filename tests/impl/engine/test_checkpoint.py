"""Loading a checkpoint: supported folders, and errors that name what is wrong."""

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

NAN = float("nan")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
PROMPTS = make_prompts()[:8]
PARAMS = SamplingParams(max_tokens=8)


def serve(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
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
        ("mistral", {"sliding_window": None}),
        ("mistral", {"head_dim": 32, "num_key_value_heads": 1}),
    ],
)
def test_every_shape_of_a_family_gives_the_tokens_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = build_model(family, **changes)
    assert serve(save_model(model, tmp_path)) == generate(model, PROMPTS, 8).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_checkpoint_is_the_same_model(family: str, tmp_path: Path) -> None:
    model = build_model(family)
    save_model(model, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert serve(tmp_path) == generate(model, PROMPTS, 8).token_ids


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_loaded_as_saved(dtype: torch.dtype, tmp_path: Path) -> None:
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
    assert serve(tmp_path, dtype="float32") == generate(model.float(), PROMPTS, 8).token_ids


def test_the_older_spelling_of_a_config_is_read(tmp_path: Path) -> None:
    model = build_model("qwen2")
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert serve(tmp_path) == generate(model, PROMPTS, 8).token_ids


def test_generation_config_has_the_end_of_sequence_tokens(tmp_path: Path) -> None:
    model = build_model("llama")
    save_model(model, tmp_path)
    (whole,) = LLM(tmp_path).generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))
    ends = [1, whole.token_ids[3]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (cut,) = LLM(tmp_path).generate([PROMPTS[0]], SamplingParams(max_tokens=8))
    assert cut.token_ids == whole.token_ids[:4]
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize(("ends", "expected"), [([1, 5], (1, 5)), (5, (5,)), ([], ()), (None, ())])
def test_a_config_may_have_several_end_of_sequence_tokens(
    tmp_path: Path, ends: object, expected: tuple[int, ...]
) -> None:
    folder = save_model(build_model("llama"), tmp_path)
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=ends)
    assert LLM(folder).model_config.eos_token_ids == expected


def test_a_single_file_is_preferred_to_an_index_as_in_transformers(tmp_path: Path) -> None:
    model = build_model("llama")
    save_model(build_model("llama", initializer_range=0.1), tmp_path, max_shard_size="100KB")
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    assert serve(tmp_path) == generate(model, PROMPTS, 8).token_ids


def test_a_tied_model_may_store_its_embedding_twice(tmp_path: Path) -> None:
    model = build_model("llama", tie_word_embeddings=True)
    folder = save_model(model, tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert serve(folder) == generate(model, PROMPTS, 8).token_ids


def test_a_window_without_a_size_is_ignored(tmp_path: Path) -> None:
    model = build_model("qwen2", use_sliding_window=False)
    folder = save_model(model, tmp_path)
    change_config(folder, use_sliding_window=True, sliding_window=None, max_window_layers=0)
    assert serve(folder) == generate(model, PROMPTS, 8).token_ids


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
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def put_nan(tensors: dict[str, Any]) -> None:
    tensors[GATE][3, 5] = float("nan")


def narrow(tensors: dict[str, Any]) -> None:
    tensors[GATE] = tensors[GATE][:, :-1].contiguous()


def make_fp8(tensors: dict[str, Any]) -> None:
    tensors[GATE] = tensors[GATE].to(torch.float8_e4m3fn)


def make_integers(tensors: dict[str, Any]) -> None:
    tensors[GATE] = tensors[GATE].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE), f"tensor '{GATE}' is missing"),
        (narrow, rf"'{GATE}' is of shape \(128, 63\), config.json asks for \(128, 64\)"),
        (put_nan, f"'{GATE}' holds NaN or infinity"),
        (make_integers, f"'{GATE}' is torch.int8: must be a float of 32 or 16 bits"),
        (make_fp8, f"'{GATE}' is torch.float8_e4m3fn: must be a float of 32 or 16 bits"),
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
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor = null: must be a "),
        ({"rope_scaling": "yarn"}, 'rope_scaling = "yarn": must be an object'),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0: must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": NAN}}, "factor = NaN: must be a number"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, 'theta = "1e4": must be a number above 1'),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta = 0: must be a number above 1"),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor = 1.0: must be a number above 1",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: must be 1"),
        ({"architectures": 5}, "architecture 5 is not supported"),
        ({"attention_bias": "false"}, 'attention_bias = "false": must be true or false'),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings = "false": must be true or false'),
        ({"rms_norm_eps": "x"}, 'rms_norm_eps = "x": must be a number above 0'),
        ({"head_dim": 24}, "head_dim = 24: heads of 24 are not supported"),
        ({"sliding_window": 4}, "sliding_window = 4: is not supported for this architecture"),
        ({"layer_types": ["sliding_attention"] * 2}, "must name full_attention for 2 layers"),
        ({"layer_types": 5}, "layer_types = 5: must name full_attention for 2 layers"),
    ],
)
def test_a_wrong_field_of_the_config_is_named(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message):
        LLM(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sliding_window": 4, "layer_types": 5},
            "layer_types = 5: must name sliding_attention or",
        ),
        ({"sliding_window": 4, "layer_types": [{}, {}]}, "must name sliding_attention or full"),
        ({"use_sliding_window": False}, "must name full_attention for 2 layers"),
        (
            {"layer_types": None, "max_window_layers": "1"},
            'max_window_layers = "1": must be an int',
        ),
        ({"sliding_window": 0}, "sliding_window = 0: must be an int of at least 1"),
        (
            {"layer_types": ["sliding_attention", "chunked_attention"]},
            "must name sliding_attention or full_attention for 2 layers",
        ),
    ],
)
def test_a_wrong_window_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = save_model(build_model("qwen2"), tmp_path)
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message):
        LLM(folder)


def test_all_layers_of_mistral_have_the_window_or_none(tmp_path: Path) -> None:
    folder = save_model(build_model("mistral"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]
    (folder / "config.json").write_text(json.dumps(config))
    assert LLM(folder).model_config.sliding_windows == (4096, 4096)
    change_config(folder, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(CheckpointError, match="must name sliding_attention for 2 layers"):
        LLM(folder)
    change_config(folder, sliding_window=None)
    with pytest.raises(CheckpointError, match="must name full_attention for 2 layers"):
        LLM(folder)


@pytest.mark.parametrize("wrong", ["x", -1, [1, None], {"a": 1}, 2.0, True])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_id_that_is_not_a_token_is_named(
    folder: Path, name: str, wrong: object
) -> None:
    (folder / "generation_config.json").write_text("{}")
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": wrong}))
    with pytest.raises(CheckpointError, match=rf"{name}: eos_token_id = .*: must be a token id or"):
        LLM(folder)


def test_an_output_head_that_differs_from_its_tied_embedding_is_named(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=f"'{HEAD}' is not the embedding"):
        LLM(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": 5}, {"weight_map": {"a": 5, "b": "c"}}])
def test_an_index_without_files_is_named(folder: Path, index: object) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index.json: (weight_map|must hold a JSON object)"):
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
def test_a_folder_without_a_required_file_is_rejected(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        LLM(folder)


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_config_that_is_not_json_is_rejected(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read as JSON"):
        LLM(folder)


def test_a_missing_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM(tmp_path / "nowhere")


def test_weights_that_overflow_a_narrow_dtype_are_rejected(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors[GATE].fill_(1e30))
    with pytest.raises(CheckpointError, match=r"does not fit torch.float16"):
        LLM(folder, dtype="float16")
