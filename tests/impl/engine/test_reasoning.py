"""Reasoning: a grammar applies after the token that ends reasoning, with and without drafts."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import LLM, SamplingParams, SettingsError
from blockstep.impl.engine.grammars import Matcher
from blockstep.spec.vocabulary import SpecMethod

pytestmark = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="needs the extra [grammars]: llguidance"
)
CHOICE = SamplingParams(choice=("yes", "no", "never"), max_tokens=24)
FREE = SamplingParams(max_tokens=24)
PROMPTS = ["Say something.", "ab ab ab", "Which letters?"]
DRAFTS: dict[str, Any] = {"num_speculative_tokens": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"spec_method": SpecMethod.NGRAM, **DRAFTS},
    "draft": {"spec_method": SpecMethod.DRAFT_MODEL, **DRAFTS},
    "async": {"max_frames_in_flight": 2},
    "async-ngram": {"spec_method": SpecMethod.NGRAM, "max_frames_in_flight": 2, **DRAFTS},
    "async-draft": {"spec_method": SpecMethod.DRAFT_MODEL, "max_frames_in_flight": 2, **DRAFTS},
    "short": {"num_blocks": 13, "block_size": 4, "scheduler_reserve_full_isl": False},
}
TESTED = ("draft", "async-ngram", "short")


@pytest.fixture(scope="module")
def free(speaking: Path) -> list[tuple[int, ...]]:
    """Return the outputs of the model without a grammar."""
    return [one.token_ids for one in LLM(speaking).generate(PROMPTS, FREE)]


@pytest.fixture(scope="module")
def marker(free: list[tuple[int, ...]]) -> int:
    """Return a token that the model generates after a while for the first prompt."""
    return next(token for place, token in enumerate(free[0]) if free[0].index(token) == place > 3)


@pytest.fixture(scope="module")
def expected(speaking: Path, marker: int) -> list[list[int]]:
    """Return the most likely tokens by the logits of transformers, masked after the marker."""
    library: Any = import_module("llguidance")
    tokenizer = LLM(speaking).tokenizer
    assert tokenizer is not None
    tokens = library.LLTokenizer(tokenizer.to_str(), n_vocab=260, eos_token=1)
    source = library.LLMatcher.grammar_from_lark('start: "yes" | "no" | "never"')
    model = AutoModelForCausalLM.from_pretrained(speaking, torch_dtype=torch.float32)
    made = []
    for prompt in PROMPTS:
        text, generated, matcher = tokenizer.encode(prompt).ids, list[int](), None
        while len(generated) < CHOICE.max_tokens and generated[-1:] != [1]:
            with torch.inference_mode():
                logits = model(torch.tensor([[*text, *generated]])).logits[0, -1]
            allowed: Any = range(260)
            if matcher is not None:
                mask = matcher.compute_bitmask()
                allowed = [token for token in allowed if mask[token // 8] >> token % 8 & 1]
            generated.append(max(allowed, key=lambda token: float(logits[token])))
            if matcher is not None:
                assert matcher.consume_token(generated[-1])
            elif generated[-1] == marker:
                matcher = library.LLMatcher(tokens, source)
        made.append(generated)
    return made


def test_the_expected_output_follows_the_grammar_after_the_marker(
    free: list[tuple[int, ...]], expected: list[list[int]], marker: int
) -> None:
    place = free[0].index(marker) + 1
    assert tuple(expected[0][:place]) == free[0][:place]
    assert tuple(expected[0][place:]) != free[0][place : len(expected[0])]
    assert expected[0][-1] == 1


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name not in TESTED)) for name in SETTINGS],
)
def test_a_grammar_applies_after_the_end_of_reasoning(
    speaking: Path, expected: list[list[int]], marker: int, name: str
) -> None:
    settings: dict[str, Any] = {"num_blocks": 60, **SETTINGS[name]}
    if "draft" in name:
        settings["draft_model"] = speaking
    llm = LLM(speaking, check=ServingChecker, reasoning_end_token=marker, **settings)
    made = llm.generate(PROMPTS, CHOICE)
    assert [list(one.token_ids) for one in made] == expected
    stats = llm.get_stats()
    assert (stats.preemptions > 0) == (name == "short")
    assert stats.drafts_accepted > 0 or "draft" not in name


def test_reasoning_may_have_ended_in_the_prompt(speaking: Path, marker: int) -> None:
    llm = LLM(speaking, reasoning_end_token=marker, enable_sessions=True, num_blocks=60)
    assert llm.tokenizer is not None
    prompt = [*llm.tokenizer.encode("Well?").ids, marker]
    (made,) = llm.generate(prompt, CHOICE)
    assert made.text in ("yes", "no", "never")
    session = llm.open_session(prompt, FREE)
    session.send("And?", CHOICE)
    session.receive()
    assert session.receive().text in ("yes", "no", "never")


def test_a_session_reasons_only_before_its_first_answer(speaking: Path, marker: int) -> None:
    llm = LLM(speaking, reasoning_end_token=marker, enable_sessions=True, num_blocks=60)
    session = llm.open_session(PROMPTS[0], CHOICE)
    session.send("Sure?", CHOICE)
    first, second = session.receive(), session.receive()
    assert marker in first.token_ids
    assert second.text in ("yes", "no", "never")


def test_a_grammar_can_apply_during_reasoning(speaking: Path, marker: int) -> None:
    llm = LLM(speaking, reasoning_end_token=marker, enable_in_reasoning=True, num_blocks=60)
    (made,) = llm.generate(PROMPTS[0], CHOICE)
    assert made.text in ("yes", "no", "never")


def test_the_end_of_reasoning_may_be_given_as_text_or_id(speaking: Path) -> None:
    llm = LLM(speaking, reasoning_end_token="<a>", num_blocks=60)
    assert llm.config.reasoning_end_token_id == 2
    assert LLM(speaking, reasoning_end_token=0, num_blocks=60).config.reasoning_end_token_id == 0


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"reasoning_end_token": "</think>"}, "'</think>': is not a token of the model"),
        ({"reasoning_end_token": 260}, "260: is not a token of the model"),
        ({"reasoning_end_token": -1}, "-1: is not a token of the model"),
        ({"reasoning_end_token": True}, "True: is not a token of the model"),
        ({"enable_in_reasoning": True}, "enable_in_reasoning"),
        ({"reasoning_end_token": 2, "enable_in_reasoning": 1}, "enable_in_reasoning = 1: must be"),
    ],
)
def test_wrong_settings_are_rejected(
    speaking: Path, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        LLM(speaking, **settings)


class Inner:
    """A grammar of 5, then 6, then anything."""

    def __init__(self, read: list[int] | None = None) -> None:
        self.read = read or []

    def deep_copy(self) -> Inner:
        return Inner([*self.read])

    def compute_bitmask(self) -> bytes:
        return bytes([len(self.read)])

    def try_consume_tokens(self, tokens: list[int]) -> int:
        if not self._accepts(tokens[0]):
            return 0
        self.read.append(tokens[0])
        return 1

    def consume_token(self, token: int) -> None:
        self.read.append(token)

    def validate_tokens(self, tokens: list[int]) -> int:
        probe = self.deep_copy()
        return next(
            (at for at, one in enumerate(tokens) if not probe.try_consume_tokens([one])),
            len(tokens),
        )

    def _accepts(self, token: int) -> bool:
        return len(self.read) > 1 or token == (5, 6)[len(self.read)]


END = 9


@pytest.mark.parametrize(
    ("drafts", "masks", "accepted"),
    [
        ([], [None], 0),
        ([3], [None, None], 1),
        ([END], [None, b"\0"], 1),
        ([3, END, 5, 6], [None, None, b"\0", b"\1", b"\2"], 4),
        ([3, END, 5, 5, 6], [None, None, b"\0", b"\1", b"\1", b"\1"], 3),
        ([END, END], [None, b"\0", b"\0"], 1),
    ],
)
def test_masks_and_drafts_around_the_end_of_reasoning(
    drafts: list[int], masks: list[bytes | None], accepted: int
) -> None:
    inner = Inner()
    matcher = Matcher(inner, (1,), END)
    assert matcher.get_masks(drafts) == masks
    assert matcher.count_accepted(drafts) == accepted
    assert inner.read == []
    matcher.advance([3, END, 5])
    assert inner.read == [5]
    assert matcher.get_masks([6, 3]) == [b"\1", b"\2", b"\3"]
    matcher.advance([END, 1, 4])
    assert inner.read == [5, END, 1]


def test_each_prompt_is_searched_from_its_start() -> None:
    matcher = Matcher(Inner(), (1,), END)
    matcher.read_prompt([3, END, 4])
    assert matcher.get_masks([]) == [b"\0"]
    matcher.read_prompt([3])
    assert matcher.get_masks([]) == [None]
    held = Matcher(Inner(), (1,))
    held.read_prompt([3])
    assert held.get_masks([]) == [b"\0"]
