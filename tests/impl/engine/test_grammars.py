"""Grammars in the engine: tokens equal those of transformers under the library's masks."""

from __future__ import annotations

import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import LLM, RequestError, SamplingParams, SettingsError
from blockstep.impl.engine import grammars as module
from blockstep.impl.engine.grammars import Grammars, mask_logits
from blockstep.spec.vocabulary import FinishReason, SpecMethod

needs_library = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="needs the extra [grammars]: llguidance"
)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
)
PARAMS = {
    "regex": SamplingParams(regex="(ab|ba)(ab|ba){2,9}", max_tokens=24),
    "schema": SamplingParams(json_schema=SCHEMA, max_tokens=40),
    "choice": SamplingParams(choice=("yes", "no", 'a "quote"', "äh"), max_tokens=20),
    "drawn": SamplingParams(regex="[a-f]{3,12}", temperature=3.0, seed=7, max_tokens=20),
    "free": SamplingParams(max_tokens=12),
}
PROMPTS = ["Say something.", "ab ab ab", "{}", "Which letters?", "Anything"]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 3},
    "draft": {"spec_method": SpecMethod.DRAFT_MODEL, "num_speculative_tokens": 3},
    "async": {"max_frames_in_flight": 2},
    "async-ngram": {
        "spec_method": SpecMethod.NGRAM,
        "num_speculative_tokens": 3,
        "max_frames_in_flight": 2,
    },
    "short": {"num_blocks": 13, "block_size": 4, "scheduler_reserve_full_isl": False},
}


def follow_transformers(folder: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    """Return the most likely allowed tokens, one by one, by the logits of transformers."""
    llguidance = import_module("llguidance")

    llm = LLM(folder)
    assert llm.tokenizer is not None
    tokens = llguidance.LLTokenizer(llm.tokenizer.to_str(), n_vocab=260, eos_token=1)
    maker = llguidance.LLMatcher
    source = (
        maker.grammar_from_regex(params.regex)
        if params.regex
        else maker.grammar_from_json_schema(params.json_schema)
    )
    matcher = maker(tokens, source)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    text = list(prompt)
    while len(text) - len(prompt) < params.max_tokens:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(260) if mask[token // 8] >> token % 8 & 1]
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, -1]
        token = max(allowed, key=lambda one: float(logits[one]))
        text.append(token)
        assert matcher.consume_token(token)
        if token == 1:
            break
    return text[len(prompt) :]


@needs_library
@pytest.mark.parametrize("name", ["regex", "schema"])
def test_tokens_equal_those_of_transformers_under_the_librarys_masks(
    speaking: Path, name: str
) -> None:
    llm, params = LLM(speaking), PARAMS[name]
    (made,) = llm.generate(PROMPTS[0], params)
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode(PROMPTS[0]).ids
    assert list(made.token_ids) == follow_transformers(speaking, prompt, params)


@pytest.fixture(scope="module")
def plainly(speaking: Path) -> list[tuple[int, ...]]:
    """Return the outputs of all prompts together, one token a step."""
    made = LLM(speaking).generate(PROMPTS, list(PARAMS.values()))
    return [one.token_ids for one in made]


@needs_library
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak] * (name in ("plain", "async", "draft")))
        for name in SETTINGS
    ],
)
def test_drafts_frames_in_flight_and_preemption_change_no_token(
    speaking: Path, plainly: list[tuple[int, ...]], name: str
) -> None:
    settings = dict(SETTINGS[name])
    if name == "draft":
        settings["draft_model"] = speaking
    llm = LLM(speaking, check=ServingChecker, **settings)
    made = llm.generate(PROMPTS, list(PARAMS.values()))
    assert [one.token_ids for one in made] == plainly
    stats = llm.get_stats()
    assert (stats.drafts_accepted > 0) == ("spec_method" in settings)
    assert (stats.preemptions > 0) == (name == "short")


@needs_library
def test_an_output_matches_its_grammar(speaking: Path) -> None:
    texts = [one.text for one in LLM(speaking).generate(PROMPTS, list(PARAMS.values()))]
    assert re.fullmatch("((ab|ba)(ab|ba){2,9}|(ab|ba)+[ab]?)", texts[0])
    assert texts[2] in ("yes", "no", 'a "quote"', "äh")
    assert re.fullmatch("[a-f]{3,12}", texts[3])


@needs_library
def test_a_schema_is_followed_to_its_end(speaking: Path) -> None:
    params = SamplingParams(json_schema=SCHEMA, max_tokens=200, temperature=1.0, seed=1)
    (made,) = LLM(speaking).generate("{}", params)
    if made.finish_reason is FinishReason.STOP:
        found = json.loads(made.text)
        assert type(found["ok"]) is bool
        assert found["n"] <= 99
    else:
        assert made.text.lstrip().startswith("{")


@needs_library
def test_log_probabilities_are_computed_before_the_mask(speaking: Path) -> None:
    free, held = (SamplingParams(max_tokens=1, logprobs=2, regex=it) for it in (None, "[xyz]"))
    first, second = LLM(speaking).generate(["Say something."] * 2, [free, held])
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert {*first.logprobs[0].items()} <= {*second.logprobs[0].items()}
    assert second.text in "xyz"


@needs_library
def test_a_request_without_an_allowed_token_finishes_with_a_reason(
    speaking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(speaking)
    monkeypatch.setattr(module.Matcher, "error", property(lambda _: "too complex"))
    held, free = llm.generate(PROMPTS[:2], [PARAMS["regex"], PARAMS["free"]])
    assert held.finish_reason is FinishReason.ERROR
    assert len(held.token_ids) == 1
    assert free.finish_reason is not FinishReason.ERROR


@needs_library
@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        (SamplingParams(regex="a("), "(?s)grammar: .*unclosed group"),
        (SamplingParams(json_schema="{"), "grammar: expected"),
        (SamplingParams(json_schema='{"type": "nothing"}'), "grammar: "),
        (SamplingParams(regex="a", ignore_eos=True), "end-of-sequence token: do not ignore it"),
        (SamplingParams(regex="\ud800"), "grammar: .*surrogates not allowed"),
        (SamplingParams(choice=("a", "\ud800")), "grammar: .*surrogates not allowed"),
        (SamplingParams(json_schema='{"enum": ["\ud800"]}'), "grammar: .*not JSON"),
    ],
)
def test_an_invalid_grammar_is_rejected(
    speaking: Path, params: SamplingParams, complaint: str
) -> None:
    llm = LLM(speaking)
    name = llm.add_request("text")
    for ask in (llm.add_request, llm.generate):
        with pytest.raises(RequestError, match=complaint):
            ask("text", params)
    assert [*llm._live] == [name]


def test_errors_name_what_a_grammar_requires(
    speaking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        Grammars(None, 10, (1,)).begin(SamplingParams(regex="a"))
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    llm = LLM(speaking)
    with pytest.raises(RequestError, match=r"pip install 'blockstep\[grammars\]'"):
        llm.add_request("text", SamplingParams(choice=("a",)))
    assert Grammars(None, 10, ()).begin(SamplingParams()) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": ""},
        {"json_schema": {}},
        {"choice": ["a"]},
        {"choice": ("",)},
        {"choice": (None,)},
        {"regex": "a", "choice": ("a",)},
    ],
)
def test_wrong_params_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"must be|give one of them"):
        SamplingParams(**fields)


def test_a_mask_changes_neither_other_rows_nor_its_argument() -> None:
    logits = torch.arange(12.0).reshape(3, 4)
    before = logits.clone()
    masked = mask_logits(logits, [0, 2], [bytes([0b0101, 0]), bytes([0b1000, 0])])
    ninf = -torch.inf
    assert masked.tolist() == [[0, ninf, 2, ninf], [4, 5, 6, 7], [ninf, ninf, ninf, 11]]
    assert logits.equal(before)
    assert mask_logits(logits, [], []) is logits
