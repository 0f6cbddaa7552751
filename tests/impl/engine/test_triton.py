"""The engine with the Triton kernels: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch
from engine_support.models import Checkpoint
from kernel_support.interpreter import speed_up

from blockstep.impl.engine import LLM, SamplingParams
from blockstep.kernels import use_backend

pytest.importorskip("triton", reason="Triton has no wheels but for Linux")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    speed_up()


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_triton_kernels_generate_the_same_tokens(
    qwen3: Checkpoint, prompts: list[list[int]], num_drafts: int
) -> None:
    """The run has a chunked prefill, a prefix hit, a decode, and verified drafts."""
    chosen = sorted(range(64), key=lambda row: len(prompts[row]))[:3]
    llm = LLM(
        qwen3.folder,
        device=DEVICE,
        block_size=4,
        num_blocks=30,
        max_model_len=84,
        max_num_batched_tokens=9,
        spec_method="ngram" if num_drafts else "none",
        num_speculative_tokens=num_drafts,
    )
    with use_backend("triton"):
        made = llm.generate([prompts[row] for row in chosen], SamplingParams(max_tokens=3))
    for row, one in zip(chosen, made, strict=True):
        assert one.token_ids == qwen3.expected.token_ids[row][:3]
