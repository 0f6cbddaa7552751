"""Drafts in the engine: proposers, rejected drafts, and draft models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_support.models import Checkpoint, build_model, save_model

from blockstep.impl.engine import LLM, SamplingParams, SettingsError
from blockstep.impl.engine.input_batch import Batch, StepRow
from blockstep.impl.engine.speculation import OnPass, find_continuation


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 1, 2], (3, 1, 2)),
        ([1, 2, 3, 9, 2, 3, 8, 2, 3], (8, 2, 3)),  # the last occurrence
        ([5, 1, 2, 7, 2, 1, 2], (7, 2, 1)),  # the longer tail
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], (9, 1, 2)),
        ([7, 7, 7], (7,)),  # as far as the text goes
        ([1, 2, 3], ()),
        ([1], ()),
    ],
)
def test_an_ngram_is_continued_like_its_last_occurrence(
    tokens: list[int], drafts: tuple[int, ...]
) -> None:
    assert find_continuation(np.array(tokens), 3) == drafts


class WrongProposer:
    """Proposes tokens that the model will not choose: its last token plus one."""

    def propose(self, batch: Batch, step: Sequence[StepRow], on_pass: OnPass) -> None:
        for scheduled in step:
            if scheduled.samples:
                last = int(batch.get_tokens(scheduled.row)[-1])
                scheduled.row.proposal = tuple((last + more) % 128 for more in (1, 2, 3))


@pytest.mark.parametrize("depth", [1, 2])
def test_rejected_drafts_change_no_token(
    checkpoint: Checkpoint, prompts: list[list[int]], depth: int
) -> None:
    llm = LLM(
        checkpoint.folder,
        spec_method="ngram",
        num_speculative_tokens=3,
        max_frames_in_flight=depth,
        block_size=4,
        num_blocks=60,
    )
    llm._runner.proposer = WrongProposer()
    completions = llm.generate(prompts[:16], SamplingParams(max_tokens=16))
    assert [one.token_ids for one in completions] == checkpoint.expected.token_ids[:16]
    stats = llm.get_stats()
    assert stats.drafts_accepted < stats.drafts_scheduled / 10


def test_all_drafts_of_the_model_itself_are_accepted(
    checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    llm = LLM(
        checkpoint.folder,
        spec_method="draft_model",
        num_speculative_tokens=4,
        draft_model=checkpoint.folder,
    )
    completions = llm.generate(prompts, SamplingParams(max_tokens=16))
    assert [one.token_ids for one in completions] == checkpoint.expected.token_ids
    stats = llm.get_stats()
    assert stats.drafts_accepted == stats.drafts_scheduled > 500


def test_a_smaller_model_of_another_family_can_draft(
    qwen3: Checkpoint, prompts: list[list[int]], tmp_path: Any
) -> None:
    small = build_model("llama", num_hidden_layers=1, num_key_value_heads=1)
    llm = LLM(
        qwen3.folder,
        spec_method="draft_model",
        num_speculative_tokens=2,
        draft_model=save_model(small, tmp_path),
    )
    completions = llm.generate(prompts[:8], SamplingParams(max_tokens=16))
    assert [one.token_ids for one in completions] == qwen3.expected.token_ids[:8]


def test_a_draft_model_with_another_vocabulary_is_rejected(
    qwen3: Checkpoint, tmp_path: Any
) -> None:
    other = save_model(build_model("llama", vocab_size=64), tmp_path)
    with pytest.raises(SettingsError, match="draft_model: has 64 tokens and the model 128"):
        LLM(qwen3.folder, spec_method="draft_model", num_speculative_tokens=2, draft_model=other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec_method": "eagle", "num_speculative_tokens": 2}, "'eagle': is not supported"),
        ({"spec_method": "ngram"}, "num_speculative_tokens = 0"),
        ({"num_speculative_tokens": 2}, "must be 0 if and only if spec_method is none"),
        ({"spec_method": "draft_model", "num_speculative_tokens": 2}, "draft_model: must be given"),
        ({"spec_method": "medusa"}, "spec_method = 'medusa': must be one of none, ngram"),
    ],
)
def test_contradictory_settings_are_rejected(
    qwen3: Checkpoint, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        LLM(qwen3.folder, **settings)
