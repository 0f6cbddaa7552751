"""The model engine with the device's scheduler: tokens are right, and `--check` finds nothing."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support.models import MAX_TOKENS, Checkpoint, make_checkpoint, make_prompts
from engine_support.storms import STORMS

from blockstep.conformance.engines.serving import CheckFailedError, ServingChecker
from blockstep.impl.device import engine as device_engine
from blockstep.impl.device.engine import DeviceEngine
from blockstep.impl.device.launch import FOLDER, Numpied
from blockstep.impl.engine import LLM, SamplingParams, SettingsError

PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
NUM_PROMPTS = 12
PLAYED = ("plain", "chunked", "small-pool", "ngram", "async", "async-ngram")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def load(checkpoint: Checkpoint, name: str, **more: Any) -> LLM:
    settings = STORMS[name].get_settings(checkpoint.family) | more
    llm = LLM(checkpoint.folder, check=ServingChecker, scheduler="device", **settings)
    assert isinstance(llm.observer, ServingChecker)
    return llm


@pytest.mark.parametrize("name", PLAYED)
def test_tokens_are_those_of_transformers(checkpoint: Checkpoint, name: str) -> None:
    llm = load(checkpoint, name)
    made = llm.generate(make_prompts()[:NUM_PROMPTS], PARAMS)
    assert [one.token_ids for one in made] == checkpoint.expected.token_ids[:NUM_PROMPTS]
    stats = llm.get_stats()
    assert stats.preemptions or "num_blocks" not in STORMS[name].settings
    assert stats.drafts_accepted or "spec_method" not in STORMS[name].settings


@pytest.mark.parametrize("name", ["small-pool", "async"])
def test_an_abort_changes_no_other_request(checkpoint: Checkpoint, name: str) -> None:
    llm = load(checkpoint, name)
    names = [llm.add_request(prompt, PARAMS) for prompt in make_prompts()[:8]]
    for _ in range(4):
        llm.step()
    llm.abort(*names[::3])
    while llm.has_unfinished_requests:
        llm.step()
    expected = checkpoint.expected.token_ids
    for number, one in enumerate(names):
        tokens = llm.pop_completion(one).token_ids
        if number % 3:
            assert tokens == expected[number]
        else:
            assert tokens == expected[number][: len(tokens)]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("pool", "(last - 1 - step)", "(first + step)"),
        ("pool", "tl.store(s.ring + place, NONE, mask=is_read & (refs == 0))", "touched += 0"),
    ],
)
def test_a_bug_in_a_kernel_is_found_while_serving(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str
) -> None:
    text = (FOLDER / f"{module}.py").read_text()
    assert text.count(old) == 1
    planted = Numpied(changed={module: text.replace(old, new)})
    monkeypatch.setattr(device_engine, "get_numpied", lambda: planted)
    with pytest.raises(CheckFailedError):
        load(checkpoint, "small-pool").generate(make_prompts()[:NUM_PROMPTS], PARAMS)


def test_the_scheduler_is_the_one_asked_for(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint.folder, scheduler="device")
    assert isinstance(llm._scheduler, DeviceEngine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduler": "gpu"}, "scheduler = 'gpu': must be one of host, device"),
        ({"scheduler": "device", "enable_sessions": True}, "has no sessions; use host"),
        ({"scheduler": "device", "max_loras": 1}, "'device': max_loras: .*no cap on adapters"),
    ],
)
def test_unsupported_settings_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("blockstep.impl.engine.loading.load_weights", None)
    with pytest.raises(SettingsError, match=message):
        LLM(checkpoint.folder, **settings)
