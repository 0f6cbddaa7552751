"""LoRA adapters as peft writes them, with random numbers, and models that they are merged into."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WRITTEN: dict[str, Any] = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "tiny", "bias": "none",
    "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16,
    "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None, "modules_to_save": None,
    "peft_type": "LORA", "r": 4, "rank_pattern": {}, "revision": None, "target_modules": [],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
"""Fields that a file of peft has."""


@dataclass(frozen=True)
class Adapter:
    """A random adapter: modules by the pattern of their names, each of a rank and with an alpha."""

    seed: int
    modules: str
    config: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    """Ranks of the modules that do not have the common one."""
    alphas: dict[str, float] = field(default_factory=dict)

    def get_scale(self, name: str, rank: int) -> float:
        """Return the scale of the adapter's product in a module."""
        config = {**WRITTEN, **self.config}
        alpha = self.alphas.get(name, config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if config["use_rslora"] else rank))

    def make_factors(self, model: Any) -> dict[str, tuple[Any, Any, float]]:
        """Return A, B and the scale of each module."""
        draw = torch.Generator().manual_seed(self.seed)
        made = {}
        for name, module in model.named_modules():
            if not re.fullmatch(self.modules, name):
                continue
            rank = self.ranks.get(name, {**WRITTEN, **self.config}["r"])
            num_out, num_in = module.weight.shape
            down = torch.randn(rank, num_in, generator=draw) / math.sqrt(num_in)
            up = torch.randn(num_out, rank, generator=draw) / 4
            made[name] = (down, up, self.get_scale(name, rank))
        assert made
        return made

    def save(self, model: Any, folder: Path) -> Path:
        """Write it as peft does; returns the folder."""
        folder.mkdir(parents=True)
        tensors = {}
        for name, (down, up, _) in self.make_factors(model).items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        config = {**WRITTEN, **self.config}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    @contextmanager
    def merged(self, model: Any) -> Iterator[Any]:
        """Return a copy of the model with the adapter merged into its weights."""
        whole = copy.deepcopy(model)
        with torch.no_grad():
            for name, (down, up, scale) in self.make_factors(model).items():
                whole.get_submodule(name).weight.add_(scale * up @ down)
        yield whole


LAYERS = r"model\.layers\.\d+\."
ADAPTERS = {
    "whole": Adapter(11, LAYERS + r".*_proj", {"target_modules": list(ALL)}),
    "some": Adapter(
        12,
        LAYERS + r".*\.(q_proj|v_proj|down_proj)",
        {"target_modules": ["v_proj", "q_proj", "mlp.down_proj"], "r": 3, "use_rslora": True},
    ),
    "patterned": Adapter(
        13,
        r"model\.layers\.1\.(self_attn\.[ko]_proj|mlp\.up_proj)",
        {
            "target_modules": r".*\.(k_proj|o_proj|up_proj)",
            "layers_to_transform": 1,
            "rank_pattern": {"o_proj": 2, "layers.0.self_attn.k_proj": 9},
            "alpha_pattern": {r"mlp\.up_pro.": 5, "^model.layers.1.self_attn.o_proj": 7.5},
        },
        {"model.layers.1.self_attn.o_proj": 2},
        {"model.layers.1.mlp.up_proj": 5, "model.layers.1.self_attn.o_proj": 7.5},
    ),
}
"""Adapters with different modules, ranks and scales."""
