"""Checkpoint: the weights of a local Hugging Face folder, checked, and fused for fewer matmuls.

    *.safetensors --shape, dtype, finite--> tensors --fuse--> qkv = [q; k; v], gate_up = [gate; up]

A tensor that is missing, unknown, not finite or of a wrong shape is refused by its name: otherwise
each of these defects would show as plausible nonsense in the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from blockstep.impl.engine.config import ModelConfig
from blockstep.impl.engine.config_json import read_json
from blockstep.impl.engine.errors import CheckpointError
from blockstep.kernels.arguments import FLOATS

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNUSED = ("rotary_emb.inv_freq",)
"""Endings of tensors that older files contain and no model uses."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer; matrices are [out, in]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size]"""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor
    """[vocab_size, hidden_size]; the embedding itself if the two are tied."""


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: str
) -> ModelWeights:
    """Read every weight of `config` from `folder`.

    Raises:
        CheckpointError: no weights, a file that is truncated or no safetensors file, or a tensor
            that is missing, unknown, of a wrong shape, or not finite.
    """
    with TensorReader(folder, dtype, device, _find_files(folder)) as reader:
        hidden = config.hidden_size
        embedding = reader.read("model.embed_tokens.weight", config.vocab_size, hidden)
        layers = tuple(_read_layer(reader, config, n) for n in range(config.num_layers))
        norm = reader.read("model.norm.weight", hidden)
        if config.tie_word_embeddings:
            lm_head = embedding
            reader.expect_equal("lm_head.weight", embedding)
        else:
            lm_head = reader.read("lm_head.weight", config.vocab_size, hidden)
        reader.expect_all_read()
    return ModelWeights(embedding, layers, norm, lm_head)


def _read_layer(reader: TensorReader, config: ModelConfig, number: int) -> LayerWeights:
    prefix = f"model.layers.{number}."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size, head_size = config.q_size, config.kv_size, config.head_size

    def one(name: str, *shape: int) -> torch.Tensor:
        return reader.read(prefix + name, *shape)

    def fused(kind: str, parts: dict[str, int], *rest: int) -> torch.Tensor:
        return torch.cat([one(f"{name}.{kind}", size, *rest) for name, size in parts.items()])

    qkv = {
        f"self_attn.{name}_proj": size
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size))
    }
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    return LayerWeights(
        input_norm=one("input_layernorm.weight", hidden),
        qkv=fused("weight", qkv, hidden),
        qkv_bias=fused("bias", qkv) if config.qkv_bias else None,
        q_norm=one("self_attn.q_norm.weight", head_size) if config.qk_norm else None,
        k_norm=one("self_attn.k_norm.weight", head_size) if config.qk_norm else None,
        o=one("self_attn.o_proj.weight", hidden, q_size),
        o_bias=one("self_attn.o_proj.bias", hidden) if config.o_bias else None,
        post_norm=one("post_attention_layernorm.weight", hidden),
        gate_up=fused("weight", gate_up, hidden),
        gate_up_bias=fused("bias", gate_up) if config.mlp_bias else None,
        down=one("mlp.down_proj.weight", hidden, inner),
        down_bias=one("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
    )


class TensorReader:
    """Reads tensors by name from the safetensors `files` of a folder; a context manager.

    `config` is the name of the file that determines the shapes, for messages.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        files: Iterable[Path],
        config: str = "config.json",
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.files = files
        self.config = config
        self.unread: set[str] = set()
        self._stack = ExitStack()
        self._file_of: dict[str, tuple[Path, Any]] = {}

    def __enter__(self) -> Self:
        for path in self.files:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise CheckpointError(
                    f"{path}: cannot be read as safetensors ({error}); is it truncated? "
                    "fetch it again"
                ) from error
            self._file_of.update((name, (path, file)) for name in file.keys())  # noqa: SIM118
        self.unread = {name for name in self._file_of if not name.endswith(UNUSED)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return the tensor `name`, of exactly this shape, in the reader's dtype and on its device.

        It is multiplied by `scale` before it is rounded to the dtype.
        """
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} is missing; are all shards there?"
            )
        path, file = self._file_of[name]
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} is of shape {found}, {self.config} asks for {shape}"
            )
        tensor = file.get_tensor(name)
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{path}: tensor {name!r} is {tensor.dtype}: must be a float of 32 or 16 bits"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{path}: tensor {name!r} holds NaN or infinity; fetch it again")
        self.unread.discard(name)
        converted = (tensor if scale == 1 else tensor.float() * scale).to(self.dtype)
        if not bool(torch.isfinite(converted).all()):
            raise CheckpointError(
                f"{path}: tensor {name!r} does not fit {self.dtype}; use bfloat16 or float32"
            )
        return converted.to(self.device)

    def expect_equal(self, name: str, tied: torch.Tensor) -> None:
        """Raise `CheckpointError` if tensor `name` exists and differs from the tensor it is tied
        to."""
        if name in self.unread and not torch.equal(self.read(name, *tied.shape), tied):
            raise CheckpointError(
                f"{self._file_of[name][0]}: tensor {name!r} is not the embedding, but config.json "
                "says tie_word_embeddings; set it to false, or take the tensor out"
            )

    def expect_all_read(self) -> None:
        """Raise `CheckpointError` if the files contain a tensor that was not read."""
        if self.unread:
            name = min(self.unread)
            raise CheckpointError(
                f"{self._file_of[name][0]}: tensor {name!r} is not one of this architecture; "
                f"is {self.config} that of another model?"
            )


def _find_files(folder: Path) -> Iterator[Path]:
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():  # before the index, as in transformers
        yield single
    elif index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(n, str) for n in shards.values()):
            raise CheckpointError(f"{index}: weight_map must name the file of each tensor")
        yield from (folder / shard for shard in sorted({*shards.values()}))
    else:
        raise CheckpointError(
            f"{folder}: neither {SINGLE} nor {INDEX}; convert the model to safetensors"
        )
