"""Random models of two layers, saved as checkpoints; fixed seeds, so always the same ones."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

logging.disable_progress_bar()

EOS = 1
NUM_PROMPTS = 64
MAX_TOKENS = 16
VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide, so that the likeliest token is far ahead of the next
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A kind of model, and how its tiny one differs from the others."""

    config: Any
    model: Any
    more: dict[str, Any]
    seed: int


FAMILIES = {
    "llama": Family(LlamaConfig, LlamaForCausalLM, {"head_dim": 16}, 1),
    "qwen2": Family(
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        2,
    ),
    "qwen3": Family(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}, 3),
    "mistral": Family(MistralConfig, MistralForCausalLM, {"sliding_window": 9}, 4),
}


def build_model(family: str, **changes: Any) -> Any:
    """A model in float32; its biases and norms are random, too, so that each of them matters."""
    kind = FAMILIES[family]
    torch.manual_seed(kind.seed)
    model = kind.model(kind.config(**{**SHAPE, **kind.more, **changes})).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.3)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
    return model


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """Write it as a checkpoint, returns the folder."""
    model.save_pretrained(folder, **options)
    return folder


def save_perturbed(model: Any, folder: Path, std: float = 0.02) -> Path:
    """Write a copy with noise on its weights: a draft model that is right now and then."""
    torch.manual_seed(99)
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=std)
    save_model(model, folder)
    model.load_state_dict(kept)
    return folder


def save_tokenizer(folder: Path) -> Tokenizer:
    """Write a tokenizer with one token per byte, for a model of 260 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1, "<a>": 2, "<b>": 3}
    vocab |= {letter: number for number, letter in enumerate(alphabet, 4)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def make_llama_tokenizer() -> Tokenizer:
    """A tokenizer as Llama 2 has: words begin with a space, and bytes stand for what it lacks."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁b"]
    vocab = {word: number for number, word in enumerate([*words, *"abcdefgh"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@dataclass(frozen=True)
class Expected:
    """Greedy outputs of transformers."""

    token_ids: list[tuple[int, ...]]
    """Per prompt, up to and with the end-of-sequence token."""
    logits: Any
    """[num_prompts, max_tokens, vocab_size]; after the end they mean nothing."""
    margin: float
    """The smallest difference between the two highest logits of a token before the end."""


def generate(model: Any, prompts: list[list[int]], max_tokens: int) -> Expected:
    """`model.generate` on all prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    made = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    outputs = [
        tuple(row[: row.index(EOS) + 1] if EOS in row else row)
        for row in made.sequences[:, longest:].tolist()
    ]
    logits = torch.stack(made.logits, dim=1)
    best = logits.topk(2, dim=-1).values
    gaps = best[..., 0] - best[..., 1]
    margin = min(float(gaps[row, : len(tokens)].min()) for row, tokens in enumerate(outputs))
    return Expected(outputs, logits, margin)


def make_prompts() -> list[list[int]]:
    """Return prompts; half of them share their first 16 or 33 tokens, and 1 to 19 others follow."""
    draw = random.Random(3)
    shared = [draw.randrange(2, VOCAB_SIZE) for _ in range(40)]
    return [
        shared[: draw.choice((0, 16, 33))]
        + [draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randrange(1, 20))]
        for _ in range(NUM_PROMPTS)
    ]


@dataclass(frozen=True)
class Checkpoint:
    """A tiny model on disk, and a noisy copy that can draft for it."""

    family: str
    model: Any
    folder: Path
    draft_folder: Path
    expected: Expected


def make_checkpoint(family: str, folder: Path, **changes: Any) -> Checkpoint:
    """Everything that tests need of a family."""
    model = build_model(family, **changes)
    return Checkpoint(
        family,
        model,
        save_model(model, folder / "model"),
        save_perturbed(model, folder / "draft"),
        generate(model, make_prompts(), MAX_TOKENS),
    )
