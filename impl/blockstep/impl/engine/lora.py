"""LoRA: the adapter in a local folder, as peft writes it, checked against the model it adapts.

    adapter_config.json        which modules, which rank and scale
    adapter_model.safetensors  base_model.model.<module>.lora_A.weight [rank, in], and lora_B

An adapted module computes W x + scale B A x. Anything that would change this formula (a bias, DoRA,
whole modules) is refused, and so is a tensor without a module, or a module without its tensors:
half an adapter gives plausible nonsense, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockstep.impl.engine.checkpoint import TensorReader
from blockstep.impl.engine.config import ModelConfig
from blockstep.impl.engine.config_json import Fields, read_json
from blockstep.impl.engine.errors import CheckpointError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ALL_LINEAR = "all-linear"
"""A value of `target_modules`: every linear module but the head."""
NOT_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "layer_replication": ([], None),
    "alora_invocation_tokens": ([], None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
}
"""Supported values of fields that would otherwise change what is computed."""

Place = tuple[int, str]
"""Layer, and name of the module in it."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The low-rank product that an adapter adds to one module: `up @ down @ input`."""

    down: torch.Tensor
    """[rank, in]"""
    up: torch.Tensor
    """[out, rank], scaled."""


@dataclass(frozen=True, slots=True)
class Lora:
    """One adapter."""

    factors: Mapping[Place, Factors]


def get_modules(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each linear module of a layer."""
    hidden, inner = model.hidden_size, model.intermediate_size
    return {
        "self_attn.q_proj": (model.q_size, hidden),
        "self_attn.k_proj": (model.kv_size, hidden),
        "self_attn.v_proj": (model.kv_size, hidden),
        "self_attn.o_proj": (hidden, model.q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def load_lora(
    folder: Path, model: ModelConfig, max_lora_rank: int, dtype: torch.dtype, device: str
) -> Lora:
    """Read an adapter of `model`; the scale is multiplied into `up` in float32.

    Raises:
        CheckpointError: no such folder, a file that is missing or unreadable, a field that is not
            supported, a module that the model lacks, a rank above `max_lora_rank`, or a tensor that
            is missing, unknown, not finite or of a wrong shape.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; name one that peft has saved an adapter in"
        )
    fields = Fields(folder / CONFIG, read_json(folder / CONFIG))
    for name, known in NOT_SUPPORTED.items():
        if fields.data.get(name) not in known:
            raise fields.error(name, f"is not supported; {known[0]!r} is")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder}: has no {WEIGHTS}; save the adapter as safetensors")
    factors = {}
    with TensorReader(folder, dtype, device, [folder / WEIGHTS], CONFIG) as reader:
        for layer, name in _list_targets(fields, model):
            module = f"model.layers.{layer}.{name}"
            rank, scale = _get_rank_and_scale(fields, module)
            if rank > max_lora_rank:
                raise fields.error(
                    "r", f"{module} is of rank {rank}, above max_lora_rank = {max_lora_rank}"
                )
            num_out, num_in = get_modules(model)[name]
            down = reader.read(f"{PREFIX}{module}.lora_A.weight", rank, num_in)
            up = reader.read(f"{PREFIX}{module}.lora_B.weight", num_out, rank, scale=scale)
            factors[layer, name] = Factors(down, up)
        reader.expect_all_read()
    return Lora(factors)


def _list_targets(fields: Fields, model: ModelConfig) -> list[Place]:
    """Return the modules that the adapter's config names, minus the excluded ones."""
    targets = fields.get("target_modules")
    is_list = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    if not targets or not (is_list or isinstance(targets, str)):
        raise fields.error("target_modules", "must name modules: a list of names, or a pattern")
    modules = get_modules(model)
    layers = _list_layers(fields, model)
    if isinstance(targets, list):
        known = {name.rpartition(".")[2] for name in modules}
        for target in targets:
            if target.rpartition(".")[2] not in known:
                raise fields.error("target_modules", f"{target!r} is none of {sorted(known)}")
    excluded = fields.get("exclude_modules", [])
    places = [
        (layer, name)
        for layer in layers
        for name in modules
        if _is_named(targets, f"model.layers.{layer}.{name}", fields)
        and not _is_named(excluded, f"model.layers.{layer}.{name}", fields)
    ]
    if not places:
        raise fields.error("target_modules", f"must name some of {sorted(modules)}")
    return places


def _list_layers(fields: Fields, model: ModelConfig) -> list[int]:
    chosen = fields.get("layers_to_transform")
    if chosen is None:
        return list(range(model.num_layers))
    layers = chosen if isinstance(chosen, list) else [chosen]
    if not all(type(layer) is int and 0 <= layer < model.num_layers for layer in layers):
        raise fields.error(
            "layers_to_transform", f"the model has layers 0 to {model.num_layers - 1}"
        )
    return sorted({*layers})


def _is_named(names: Any, module: str, fields: Fields) -> bool:
    """Whether `names` selects a module: a list with its name or its end, or a pattern."""
    if isinstance(names, list):
        return any(module == name or module.endswith(f".{name}") for name in names)
    if names == ALL_LINEAR:
        return True
    return _matches(names, module, fields)


def _get_rank_and_scale(fields: Fields, module: str) -> tuple[int, float]:
    """Return a module's rank and its scale: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
    ranks, rank_key = _find_own(fields, "rank_pattern", module)
    alphas, alpha_key = _find_own(fields, "alpha_pattern", module)
    rank = fields.count("r") if rank_key is None else ranks.count(rank_key)
    alpha = fields.number("lora_alpha") if alpha_key is None else alphas.number(alpha_key)
    return rank, alpha / (math.sqrt(rank) if fields.flag("use_rslora") else rank)


def _find_own(fields: Fields, name: str, module: str) -> tuple[Fields, str | None]:
    """Return a field with values per pattern, and its first pattern that matches the module."""
    values = fields.get(name, {})
    if not isinstance(values, dict):
        raise fields.error(name, "must be an object: a value for each pattern")
    key = next((key for key in values if _matches(rf"(.*\.)?({key})", module, fields)), None)
    return Fields(fields.path, values, f"{name}."), key


def _matches(pattern: Any, module: str, fields: Fields) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except (re.error, TypeError) as error:
        raise CheckpointError(f"{fields.path}: {pattern!r}: is no pattern: {error}") from error
