"""Loading LoRA folders: factors and scales, and errors that name what is not supported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.adapters import ADAPTERS, ALL, Adapter
from engine_support.models import build_model, save_model
from safetensors.torch import load_file, save_file

from blockstep.impl.engine import CheckpointError
from blockstep.impl.engine.adapters import FUSED, stack_adapters
from blockstep.impl.engine.config import ModelConfig, load_config
from blockstep.impl.engine.lora import Lora, get_modules, load_lora

QKV = "model.layers.0.self_attn.{}_proj"


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model("qwen3")


@pytest.fixture(scope="module")
def shape(model: Any, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_config(save_model(model, tmp_path_factory.mktemp("model")))


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    return ADAPTERS["some"].save(model, tmp_path / "some")


def load(folder: Path, shape: ModelConfig, rank: int = 16, dtype: str = "float32") -> Lora:
    return load_lora(folder, shape, rank, getattr(torch, dtype), "cpu")


@pytest.mark.parametrize("name", ADAPTERS)
def test_factors_equal_those_in_the_file(
    model: Any, shape: ModelConfig, tmp_path: Path, name: str
) -> None:
    adapter = ADAPTERS[name]
    read = load(adapter.save(model, tmp_path / name), shape).factors
    made = adapter.make_factors(model)
    assert {f"model.layers.{layer}.{module}" for layer, module in read} == {*made}
    for (layer, module), factors in read.items():
        down, up, scale = made[f"model.layers.{layer}.{module}"]
        assert factors.down.equal(down)
        torch.testing.assert_close(factors.up, up * scale)


def test_scales_are_multiplied_in_before_rounding(
    model: Any, shape: ModelConfig, folder: Path
) -> None:
    adapter = ADAPTERS["some"]
    _, up, scale = adapter.make_factors(model)["model.layers.1.self_attn.q_proj"]
    read = load(folder, shape, dtype="bfloat16").factors[1, "self_attn.q_proj"].up
    assert read.equal((up * scale).bfloat16())
    assert not read.equal(up.bfloat16() * scale)


def test_stacked_columns_add_the_output_of_each_rows_adapter(
    model: Any, shape: ModelConfig, tmp_path: Path
) -> None:
    loras = [load(one.save(model, tmp_path / name), shape) for name, one in ADAPTERS.items()]
    stacked = stack_adapters(loras, shape.num_layers, get_modules(shape))
    assert [sorted(layer) for layer in stacked] == [sorted(FUSED)] * 2
    columns = stacked[0]["qkv"]
    taken = torch.randn(4, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    output = torch.zeros(4, shape.q_size + 2 * shape.kv_size)
    columns.add_to(output, taken, torch.tensor([1, 0, -1, 2]))
    for row, name in ((0, "some"), (1, "whole")):
        made = ADAPTERS[name].make_factors(model)
        expected = []
        for part, size in (("q", shape.q_size), ("k", shape.kv_size), ("v", shape.kv_size)):
            down, up, scale = made.get(QKV.format(part), (taken.new_zeros(1, 64), None, 1.0))
            up = taken.new_zeros(size, 1) if up is None else up
            expected.append(scale * up @ down @ taken[row])
        torch.testing.assert_close(output[row], torch.cat(expected))
    assert not output[2].any()
    assert not output[3].any()  # "patterned" has nothing in the first layer


def test_all_linear_and_exclude_modules_select_modules_like_peft(
    model: Any, shape: ModelConfig, tmp_path: Path
) -> None:
    excluded = ["up_proj", "0.mlp.down_proj", "proj"]  # whole names only: the last is none
    config = {"target_modules": "all-linear", "exclude_modules": excluded}
    pattern = (
        r"model\.layers\.(0\.(self_attn\.._proj|mlp\.gate_proj)"
        r"|1\.(self_attn\.._proj|mlp\.(gate|down)_proj))"
    )
    read = load(Adapter(1, pattern, config).save(model, tmp_path / "one"), shape)
    assert len(read.factors) == 11


Change = Callable[[dict[str, Any]], dict[str, Any]]


def with_fields(**fields: Any) -> Change:
    return lambda config: {**config, **fields}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (with_fields(peft_type="IA3"), r'peft_type = "IA3": is not supported; \'LORA\' is'),
        (with_fields(peft_type=None), "peft_type = null: is not supported"),
        (with_fields(bias="all"), 'bias = "all": is not supported'),
        (with_fields(use_dora=True), "use_dora = true: is not supported; False is"),
        (with_fields(lora_bias=True), "lora_bias = true: is not supported"),
        (with_fields(fan_in_fan_out=True), "fan_in_fan_out = true: is not supported"),
        (with_fields(modules_to_save=["lm_head"]), r"modules_to_save = .*: is not supported"),
        (with_fields(trainable_token_indices=[3]), "trainable_token_indices"),
        (with_fields(r=17), r"r = 17: model.layers.0.self_attn.q_proj is of rank 17, above max_l"),
        (with_fields(rank_pattern={"v_proj": 40}), r"v_proj is of rank 40, above max_lora_rank"),
        (with_fields(r=0), "r = 0: must be an int of at least 1"),
        (with_fields(r=None), "r = null: must be an int"),
        (with_fields(lora_alpha="x"), "lora_alpha = .*: must be a number above 0"),
        (with_fields(rank_pattern={"q_proj": "a"}), "rank_pattern.q_proj = .*: must be an int"),
        (with_fields(rank_pattern=["q_proj"]), "rank_pattern = .*: must be an object"),
        (with_fields(alpha_pattern={"(": 1}), r"is no pattern"),
        (with_fields(use_rslora=3), "use_rslora = 3: must be true or false"),
        (with_fields(target_modules=None), "target_modules = null: must name modules"),
        (with_fields(target_modules=[]), "target_modules = .*: must name modules"),
        (with_fields(target_modules=[3]), "target_modules = .*: must name modules"),
        (with_fields(target_modules="("), r"'\(': is no pattern"),
        (with_fields(target_modules="c_attn"), "target_modules = .*: must name some of"),
        (with_fields(target_modules=["q_proj", "c_attn"]), r"'c_attn' is none of \['down_proj'"),
        (with_fields(target_modules=["q_proj", "lm_head"]), r"'lm_head' is none of"),
        (with_fields(layers_to_transform=[0, 2]), "the model has layers 0 to 1"),
        (with_fields(layers_to_transform=True), "the model has layers 0 to 1"),
        (with_fields(target_modules=[*ALL]), r"k_proj.lora_A.weight' is missing"),
        (with_fields(layers_to_transform=0), r"layers.1\S* is not one of this architecture"),
        (with_fields(r=2), r"is of shape \(3, 64\), adapter_config.json asks for \(2, 64\)"),
    ],
)
def test_unsupported_config_fields_are_rejected(
    folder: Path, shape: ModelConfig, change: Change, complaint: str
) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=complaint) as raised:
        load(folder, shape)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensor: tensor[:, :-1].contiguous(), r"shape \(3, 63\).* asks for \(3, 64\)"),
        (lambda tensor: tensor / 0, "holds NaN or infinity"),
        (lambda tensor: tensor.int(), "must be a float"),
    ],
)
def test_a_wrong_tensor_is_rejected(
    folder: Path, shape: ModelConfig, change: Callable[[Any], Any], complaint: str
) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
    save_file({**tensors, name: change(tensors[name])}, path)
    with pytest.raises(CheckpointError, match=complaint):
        load(folder, shape)


def test_a_missing_file_is_named(folder: Path, shape: ModelConfig) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        load(folder, shape)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: cannot be read"):
        load(folder, shape)
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        load(folder / "nowhere", shape)


def test_an_unknown_tensor_is_rejected(folder: Path, shape: ModelConfig) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), "base_model.model.lm_head.lora_A.weight": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"lm_head.lora_A.weight' is not one of this arch"):
        load(folder, shape)
