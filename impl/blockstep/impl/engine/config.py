"""Config: the shape of a model, read from `config.json` and `generation_config.json`.

Four families share one shape and differ in the few fields of `FAMILIES`. Field names are those of
the files. An unsupported value is refused, never ignored: a checkpoint computed with a wrong
formula gives plausible nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockstep.impl.engine.config_json import Fields, read_json
from blockstep.impl.engine.errors import CheckpointError
from blockstep.impl.engine.rope import Rope, get_rope
from blockstep.kernels.arguments import HEAD_SIZES

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
DTYPES = ("float32", "float16", "bfloat16")
GENERATION = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of `generation_config.json` that vLLM takes for requests that do not set them."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder: everything that its forward pass depends on."""

    architecture: str
    """One of `FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Divides `num_heads`; the quotient is the number of query heads per KV head (GQA)."""
    head_size: int
    rms_norm_eps: float
    max_model_len: int
    """Positions that the model was trained for, after RoPE scaling."""
    rope: Rope
    sliding_windows: tuple[int | None, ...]
    """Per layer: keys that a query sees, including its own; None for all."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each query and key head is normed before RoPE."""
    dtype: str
    """The dtype of the saved weights, one of `DTYPES`."""
    eos_token_ids: tuple[int, ...] = ()
    unused_sampling: tuple[str, ...] = ()
    """Sampling defaults of `generation_config.json`, as `name=value`. They are not applied: a
    request says how it is sampled, and is greedy otherwise."""

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_size


def load_config(folder: Path) -> ModelConfig:
    """Read the shape of the model in `folder`.

    Raises:
        CheckpointError: no folder, no or unreadable `config.json`, an unknown architecture, or a
            field that is missing, of a wrong value or not supported.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name a local Hugging Face model folder")
    data = read_json(folder / "config.json")
    architecture = data.get("architectures")
    if isinstance(architecture, list) and architecture:
        architecture = architecture[0]
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{folder}: architecture {architecture!r} is not supported; use one of {FAMILIES}"
        )
    fields = Fields(folder / "config.json", data)
    if data.get("quantization_config"):
        raise fields.error("quantization_config", "quantised weights are not supported")
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "must be 'silu'")
    is_llama, is_qwen2, is_qwen3, is_mistral = (architecture == name for name in FAMILIES)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads {num_heads}")
    head_size = fields.count("head_dim", 0 if hidden_size % num_heads else hidden_size // num_heads)
    if head_size not in HEAD_SIZES:
        raise fields.error("head_dim", f"heads of {head_size} are not supported; {HEAD_SIZES} are")
    bias = not is_mistral and fields.flag("attention_bias")
    longest = 2048 if is_llama else 131072 if is_mistral else 32768
    max_position_embeddings = fields.count("max_position_embeddings", longest)
    rope = get_rope(fields, head_size, max_position_embeddings)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_model_len=rope.max_model_len,
        rope=rope,
        sliding_windows=_get_sliding_windows(fields, is_llama, is_mistral),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=is_qwen2 or bias,
        o_bias=bias and not is_qwen2,
        mlp_bias=is_llama and fields.flag("mlp_bias"),
        qk_norm=is_qwen3,
        dtype=_get_dtype(fields),
        eos_token_ids=_get_eos(folder, fields),
        unused_sampling=_list_unused_sampling(folder),
    )


def _get_sliding_windows(
    fields: Fields, is_llama: bool, is_mistral: bool
) -> tuple[int | None, ...]:
    """Return the window of each layer: all or none (Mistral), or some (Qwen).

    Older Qwen files name the first layer with a window (`max_window_layers`), newer ones list every
    layer.
    """
    num_layers = fields.count("num_hidden_layers")
    window = None
    if is_mistral or fields.flag("use_sliding_window", is_llama):
        given = fields.data.get("sliding_window", None if is_llama else 4096)
        window = None if given is None else fields.count("sliding_window", 4096)
    if is_llama and window is not None:
        raise fields.error("sliding_window", "is not supported for this architecture")
    first = num_layers
    if window is not None:
        first = 0 if is_mistral else fields.count("max_window_layers", 28, least=0)
    kinds = fields.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    known = ["full_attention"]
    if window is not None:
        known = ["sliding_attention"] + ([] if is_mistral else known)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not all(k in known for k in kinds)
    ):
        raise fields.error("layer_types", f"must name {' or '.join(known)} for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _get_dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") else "torch_dtype"
    dtype = fields.get(name, "float32")
    if dtype not in DTYPES:
        raise fields.error(name, f"must be one of {DTYPES}")
    return str(dtype)


def _list_unused_sampling(folder: Path) -> tuple[str, ...]:
    """Return the sampling defaults of `generation_config.json`, as `name=value`."""
    path = folder / GENERATION
    found = read_json(path) if path.is_file() else {}
    return tuple(f"{name}={found[name]}" for name in SAMPLING if found.get(name) is not None)


def _get_eos(folder: Path, fields: Fields) -> tuple[int, ...]:
    """Return the end-of-sequence tokens: those of `generation_config.json`, else the model's."""
    path = folder / GENERATION
    if path.is_file():
        generation = Fields(path, read_json(path))
        fields = fields if generation.get("eos_token_id") is None else generation
    eos = fields.get("eos_token_id", [])
    tokens = eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise fields.error("eos_token_id", "must be a token id or a list of them")
    return tuple(tokens)
