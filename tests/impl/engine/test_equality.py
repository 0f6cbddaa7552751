"""The engine says exactly what transformers says, whatever is done to its memory and its order."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support.models import MAX_TOKENS, Checkpoint
from engine_support.storms import STORMS

from blockstep.impl.engine import LLM, SamplingParams
from blockstep.spec.vocabulary import SpecMethod

MARGIN_MIN = 1e-4
"""Of logits near 5: a hundred times what float32 sums in another order may differ by."""


def get_draft(checkpoint: Checkpoint, settings: dict[str, Any]) -> dict[str, Any]:
    wants = settings.get("spec_method") is SpecMethod.DRAFT_MODEL
    return {"draft_model": checkpoint.draft_folder} if wants else {}


def test_no_token_is_a_near_tie(checkpoint: Checkpoint) -> None:
    assert checkpoint.expected.margin > MARGIN_MIN
    assert len(set(checkpoint.expected.token_ids)) > 50


@pytest.mark.parametrize("name", STORMS)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Checkpoint, prompts: list[list[int]], name: str
) -> None:
    storm = STORMS[name]
    llm = LLM(checkpoint.folder, **storm.settings, **get_draft(checkpoint, storm.settings))
    completions = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    assert [one.token_ids for one in completions] == checkpoint.expected.token_ids
    assert storm.get_missing(llm.get_stats()) == []
