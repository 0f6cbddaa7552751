"""Settings of the model engine, drawn."""

from __future__ import annotations

import random
from typing import Any

from engine_support.models import Checkpoint


def draw_settings(draw: random.Random, checkpoint: Checkpoint) -> dict[str, Any]:
    """A small pool, mostly, and anything else."""
    block_size, max_model_len = draw.choice((1, 2, 4, 16)), draw.choice((20, 40, 84))
    method = draw.choice(("none", "ngram", "draft_model"))
    num_drafts = 0 if method == "none" else draw.choice((1, 2, 4))
    num_tables = 2 if checkpoint.family == "qwen2" else 1
    needed = num_tables * -(-(max_model_len + 2 * num_drafts) // block_size) + 1
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": needed + draw.choice((0, 0, 1, 5, 40)),
        "max_num_seqs": draw.choice((1, 2, 4, 16)),
        "max_num_batched_tokens": draw.choice((1, 3, 16, 100)),
        "long_prefill_token_threshold": draw.choice((0, 0, 3)),
        "enable_prefix_caching": draw.random() < 0.8,
        "scheduler_reserve_full_isl": draw.random() < 0.5,
        "policy": draw.choice(("fcfs", "priority")),
        "max_frames_in_flight": draw.choice((1, 2, 3)),
        "spec_method": method,
        "num_speculative_tokens": num_drafts,
        "draft_model": checkpoint.draft_folder if method == "draft_model" else None,
    }
