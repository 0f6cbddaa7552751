"""Branches: n outputs equal those of n requests, and beams equal those of transformers.

This holds with small pools, drafts and frames in flight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_support.models import EOS, Checkpoint
from engine_support.storms import ASYNC, SMALL

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import (
    LLM,
    BeamSearchParams,
    BeamSequence,
    RequestError,
    SamplingParams,
    SettingsError,
)
from blockstep.impl.engine.beams import BeamSearch
from blockstep.spec.vocabulary import FinishReason, SpecMethod, TokenIds

NARROW: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 16}
STORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small pool": {**NARROW, "num_blocks": 17},
    "without a cache": {**NARROW, "num_blocks": 17, "enable_prefix_caching": False},
    "ahead": {**NARROW, **ASYNC, "num_blocks": 17},
    "drafts": {
        **NARROW,
        "num_blocks": 18,
        "spec_method": SpecMethod.NGRAM,
        "num_speculative_tokens": 3,
    },
    "drafts ahead": {
        **NARROW,
        **ASYNC,
        "num_blocks": 18,
        "spec_method": SpecMethod.NGRAM,
        "num_speculative_tokens": 3,
    },
}
"""Pools that hold one of the longest requests and little more."""


def search_there(
    checkpoint: Checkpoint, prompt: list[int], params: BeamSearchParams
) -> list[tuple[TokenIds, float]]:
    """Return the beams of transformers with their scores, up to the end-of-sequence token."""
    found = checkpoint.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = [tuple(row[len(prompt) :]) for row in found.sequences.tolist()]
    ends = [text.index(EOS) + 1 if EOS in text else len(text) for text in texts]
    cut = [text[:end] for text, end in zip(texts, ends, strict=True)]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("storm", STORMS)
def test_beams_equal_those_of_transformers(
    qwen3: Checkpoint, prompts: list[list[int]], storm: str
) -> None:
    llm = LLM(qwen3.folder, check=ServingChecker, enable_forks=True, **STORMS[storm])
    asked = [prompt for prompt in prompts if len(prompt) <= 40][:8]
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    for prompt, found in zip(asked, llm.beam_search(asked, params), strict=True):
        expected = search_there(qwen3, prompt, params)
        assert [one.token_ids for one in found] == [text for text, _ in expected]
        assert [one.score for one in found] == pytest.approx([s for _, s in expected], abs=1e-4)
    assert (llm.get_stats().preemptions > 0) == ("num_blocks" in STORMS[storm])
    assert not llm.has_unfinished_requests
    assert not llm._completions


@pytest.mark.parametrize("family", ["windows"])
@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(4, 12, length_penalty=2.0),
        BeamSearchParams(2, 12, length_penalty=-1.0),
        BeamSearchParams(4, 12, early_stopping=True),
        BeamSearchParams(2, 5),
    ],
)
def test_beams_finish_like_those_of_transformers(
    request: pytest.FixtureRequest,
    prompts: list[list[int]],
    params: BeamSearchParams,
    family: str,
) -> None:
    checkpoint = request.getfixturevalue(family)
    llm = LLM(checkpoint.folder, check=ServingChecker, enable_forks=True, block_size=4)
    asked = prompts[:5]
    for prompt, found in zip(asked, llm.beam_search(asked, params), strict=True):
        expected = search_there(checkpoint, prompt, params)
        assert [one.token_ids for one in found] == [text for text, _ in expected]


@pytest.mark.parametrize("storm", STORMS)
def test_n_outputs_of_a_prompt_equal_those_of_n_requests(
    qwen3: Checkpoint, prompts: list[list[int]], storm: str
) -> None:
    asked = [prompt for prompt in prompts if len(prompt) <= 40][:8]
    one = SamplingParams(max_tokens=10, temperature=1.0, seed=5, top_k=20)
    alone = LLM(qwen3.folder).generate(
        [prompt for prompt in asked for _ in range(3)],
        [replace(one, seed=5 + i) for _ in asked for i in range(3)],
    )
    llm = LLM(qwen3.folder, check=ServingChecker, enable_forks=True, **STORMS[storm])
    together = llm.generate(asked, replace(one, n=3))
    assert [it.token_ids for it in together] == [it.token_ids for it in alone]
    assert [it.prompt_token_ids for it in together] == [it.prompt_token_ids for it in alone]
    assert len({it.token_ids for it in together}) > len(asked)


def test_n_outputs_are_returned_if_the_first_token_is_the_last(qwen3: Checkpoint) -> None:
    llm = LLM(qwen3.folder, check=ServingChecker, enable_forks=True)
    params = SamplingParams(n=3, max_tokens=1, temperature=1.0)
    found = llm.generate([[5, 6, 7]], params)
    assert [it.finish_reason for it in found] == [FinishReason.LENGTH] * 3


def test_branches_share_the_prompt(qwen3: Checkpoint) -> None:
    """Six outputs of a prompt of 40 tokens fit in a pool for two separate requests."""
    llm = LLM(qwen3.folder, enable_forks=True, **{**SMALL, "num_blocks": 24})
    prompt = [*range(2, 42)]
    llm.generate([prompt], SamplingParams(n=6, max_tokens=4, temperature=1.0, seed=1))
    assert llm.get_stats().preemptions == 0


def test_branches_need_enable_forks(qwen3: Checkpoint) -> None:
    llm = LLM(qwen3.folder)
    with pytest.raises(RequestError, match="enable_forks=True"):
        llm.beam_search([[5]], BeamSearchParams(2))
    with pytest.raises(RequestError, match="enable_forks=True"):
        llm.generate([[5]], SamplingParams(n=2))
    with pytest.raises(RequestError, match="use generate for several outputs"):
        llm.add_request([5], SamplingParams(n=2))
    assert not llm.has_unfinished_requests


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("max_tokens", 0),
        ("length_penalty", "1"),
        ("early_stopping", 1),
        ("ignore_eos", None),
    ],
)
def test_wrong_beam_search_params_are_rejected(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        BeamSearchParams(**{"beam_width": 2, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [None, {}, SamplingParams()])
def test_a_rejected_beam_search_leaves_other_requests_running(
    qwen3: Checkpoint, params: Any
) -> None:
    llm = LLM(qwen3.folder, enable_forks=True)
    name = llm.add_request([5, 6], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="must be BeamSearchParams"):
        llm.beam_search([[5]], params)
    assert llm.is_live(name)


def test_a_beam_width_above_the_vocabulary_size_finds_all_tokens(qwen3: Checkpoint) -> None:
    llm = LLM(qwen3.folder, enable_forks=True)
    (found,) = llm.beam_search([[5]], BeamSearchParams(2**31 - 1, max_tokens=1))
    assert sorted(one.token_ids for one in found) == [(token,) for token in range(128)]


def test_a_search_continues_while_a_better_beam_is_possible() -> None:
    search = BeamSearch(BeamSearchParams(2, 3), eos_token_ids=(9,))
    assert search.num_candidates == 4
    (first, second) = search.advance([{1: -0.1, 9: -2.0, 2: -3.0, 3: -4.0}])
    assert (first.token_id, second.token_id) == (1, 2)
    assert search.found == [BeamSequence((9,), -2.0, FinishReason.STOP)]
    going_on = search.advance([{9: -0.2, 4: -2.5, 5: -4.0}, {6: -0.5, 9: -0.6}])
    assert [(one.beam, one.token_id) for one in going_on] == [(0, 4), (1, 6)]
    assert [text.token_ids for text in search.found] == [(1, 9), (9,)]
    assert not search.is_done, "-2.6 over two tokens is better than -2.0 over one"
    assert search.advance([{7: -3.0}, {7: -1.0}]) == []
    assert search.is_done
    assert [text.token_ids for text in search.found] == [(1, 9), (2, 6, 7)]
    assert search.found[1].score == pytest.approx(-4.5 / 3)
    assert search.found[1].finish_reason is FinishReason.LENGTH


def test_a_search_ends_when_all_live_beams_are_worse() -> None:
    search = BeamSearch(BeamSearchParams(1, 3, length_penalty=0.0), eos_token_ids=(9,))
    search.advance([{9: -0.5, 1: -1.0}])
    assert search.is_done
    search = BeamSearch(BeamSearchParams(1, 3, length_penalty=3.0), eos_token_ids=(9,))
    search.advance([{9: -2.0, 1: -1.5}])
    assert not search.is_done, "the most likely beam continues, so no beam has finished"
