"""The benchmark of the model engine: both sides generate the same tokens."""

from __future__ import annotations

import pytest
from benchmarks import generate


def test_both_sides_generate_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {
        **generate.SHAPE,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    monkeypatch.setattr(generate, "SHAPE", tiny)
    monkeypatch.setattr(generate, "VOCAB_SIZE", 128)
    monkeypatch.setattr(generate, "NUM_NEW_TOKENS", 4)
    figures = generate.measure(rounds=1, threads=1)
    assert figures.num_prompts_alike == figures.num_prompts == 16
    assert figures.blockstep_tokens_per_second > 0
    assert figures.ratio == pytest.approx(figures.ratio_least)
