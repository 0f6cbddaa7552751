"""Steps in arrays and in objects: equal tokens, and the choice between both."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.models import MAX_TOKENS, Checkpoint

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import LLM, Chunk, Completion, SamplingParams
from blockstep.impl.engine.input_batch import StepRow
from blockstep.impl.engine.model import Model
from blockstep.impl.engine.outputs import StepChunks
from blockstep.impl.engine.runner import Runner
from blockstep.impl.host.jit import IS_COMPILED
from blockstep.spec.vocabulary import FinishReason

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="only the host engine has arrays")
SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 12}
"""Less than a third of what all requests take."""
Serve = Callable[[LLM], tuple[list[list[Chunk]], list[Completion]]]


def compare(folder: Path, serve: Serve, **settings: Any) -> LLM:
    """Serve in arrays and in objects with the same scheduler; both outputs must be equal."""
    arrays, objects = LLM(folder, **settings), LLM(folder, **settings)
    objects._arrays = None
    chunks, completions = serve(arrays)
    expected_chunks, expected = serve(objects)
    assert completions == expected
    assert chunks == expected_chunks
    assert arrays._scheduler.snapshot() == objects._scheduler.snapshot()
    return arrays


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_arrays_and_objects_generate_equal_tokens(
    qwen3: Checkpoint, prompts: list[list[int]], depth: int
) -> None:
    def serve(llm: LLM) -> tuple[list[list[Chunk]], list[Completion]]:
        names = [llm.add_request(one, SamplingParams(max_tokens=MAX_TOKENS)) for one in prompts]
        chunks = []
        while llm.has_unfinished_requests:
            chunks.append([*llm.step()])
        return chunks, [llm.pop_completion(name) for name in names]

    llm = compare(
        qwen3.folder, serve, max_frames_in_flight=depth, max_num_batched_tokens=24, **SMALL
    )
    stats = llm.get_stats()
    assert stats.preemptions > 3
    assert stats.prefix_cache_hits > 50
    assert [
        one.token_ids for one in llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    ] == qwen3.expected.token_ids


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_of_all_kinds_run_together(speaking: Path, depth: int) -> None:
    """Requests are drawn, with log probabilities, stop strings and grammars, streamed and aborted.

    Requests that need objects arrive and finish, so steps of both kinds follow each other.
    """
    pytest.importorskip("llguidance")
    plain = SamplingParams(max_tokens=12, ignore_eos=True)
    drawn = replace(plain, temperature=0.9, seed=3)

    def serve(llm: LLM) -> tuple[list[list[Chunk]], list[Completion]]:
        names, chunks = [], []
        later = [
            replace(drawn, stop=("e", "a")), replace(plain, logprobs=2), drawn,
            SamplingParams(max_tokens=5, regex="[ab]{3}"), plain, replace(drawn, logprobs=0),
            replace(plain, regex="[cd]{2}", ignore_eos=False),
        ]  # fmt: skip
        names += [llm.add_request("What is a block?", plain) for _ in range(3)]
        for number, params in enumerate(later):
            names.append(llm.add_request(f"No. {number}: a block is", params))
            chunks += [[*llm.step()] for _ in range(3)]
            if number == 4:
                llm.abort(names[1])
        streamed = list(llm.stream("Tell me", drawn))
        while llm.has_unfinished_requests:
            chunks.append([*llm.step()])
        return [*chunks, streamed], [llm.pop_completion(name) for name in names]

    settings: dict[str, Any] = {"max_frames_in_flight": depth, "block_size": 4, "num_blocks": 30}
    compare(speaking, serve, **settings)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_keeps_its_tokens(
    qwen3: Checkpoint, prompts: list[list[int]], depth: int
) -> None:
    llm = LLM(qwen3.folder, max_frames_in_flight=depth)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    names = [llm.add_request(prompt, params) for prompt in prompts[:3]]
    for _ in range(4):
        llm.step()
    llm.abort(names[1])
    made = llm.pop_completion(names[1])
    assert made.finish_reason is FinishReason.ABORT
    assert len(made.token_ids) == 4
    assert made.token_ids == llm.generate(prompts[1], params)[0].token_ids[:4]


def test_text_of_generate_is_decoded_at_the_end(speaking: Path) -> None:
    """All of the text is in the last chunk, which other clients see."""
    llm, params = LLM(speaking), SamplingParams(max_tokens=8, ignore_eos=True)
    (whole,) = llm.generate("abc", params)
    name = llm.add_request("abc", params)
    llm._live[name].output.reads_late = True
    texts = []
    while llm.has_unfinished_requests:
        texts += [chunk.text for chunk in llm.step()]
    assert texts == [*[""] * 7, whole.text]
    assert llm.pop_completion(name).text == whole.text == "".join(texts)
    assert whole.text
    name = llm.add_request("abc", params)
    llm._live[name].output.reads_late = True
    for _ in range(3):
        llm.step()
    llm.abort(name)
    aborted = llm.pop_completion(name)
    assert aborted.text
    assert llm.tokenizer is not None
    assert aborted.text == llm.tokenizer.decode(list(aborted.token_ids))


def test_no_object_is_created_for_a_row_that_only_continues(
    monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, prompts: list[list[int]]
) -> None:
    llm = LLM(qwen3.folder)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    names = [llm.add_request(prompt, params) for prompt in prompts[:4]]
    monkeypatch.setattr(StepRow, "__init__", None)
    monkeypatch.setattr(StepChunks, "_get", None)
    steps = [llm.step() for _ in range(7)]
    monkeypatch.undo()
    last = llm.step()
    assert all(isinstance(step, StepChunks) for step in [*steps, last])
    assert [len(step) for step in steps] == [4] * 7
    assert [chunk.finish_reason for chunk in last] == [FinishReason.LENGTH] * 4
    assert steps[2][1] == Chunk(names[1], llm.pop_completion(names[1]).token_ids[2:3])
    assert steps[0][1:] == list(steps[0])[1:]
    assert steps[0] != steps[1]
    assert llm.step() == []


@pytest.mark.parametrize("depth", [1, 2])
def test_more_running_requests_cost_no_more_calls(
    monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, depth: int
) -> None:
    """Python and C calls in twelve steps are counted, block boundaries included.

    The reference of attention loops over rows, so the forward pass is stubbed.
    """
    hidden = torch.zeros(200, 64)
    monkeypatch.setattr(Model, "forward", lambda self, inputs: hidden[: len(inputs.token_ids)])

    def count_calls(running: int) -> int:
        llm = LLM(qwen3.folder, device="cpu", block_size=4, max_frames_in_flight=depth)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        for number in range(running):
            llm.add_request([2 + number, 3, 4, 5, 6], params)
        for _ in range(4):
            llm.step()
        counts: Counter[str] = Counter()
        gc.collect()
        gc.disable()  # what it calls is not of the steps
        sys.setprofile(lambda frame, event, arg: counts.update((event,)))
        try:
            steps = [llm.step() for _ in range(12)]
        finally:
            sys.setprofile(None)
            gc.enable()
        assert [len(step) for step in steps] == [running] * 12
        return counts["call"] + counts["c_call"]

    count_calls(2)  # what is done once only
    assert count_calls(40) == count_calls(4)


@pytest.mark.parametrize(
    ("settings", "params", "has_arrays"),
    [
        ({}, SamplingParams(), True),
        ({"max_frames_in_flight": 2}, SamplingParams(temperature=1.0), True),
        ({"enable_forks": True}, SamplingParams(), False),
        ({"check": ServingChecker}, SamplingParams(), False),
        ({"enable_sessions": True}, SamplingParams(), False),
        ({"spec_method": "ngram", "num_speculative_tokens": 2}, SamplingParams(), False),
        ({}, SamplingParams(regex="[ab]+"), False),
    ],
)
def test_requests_decide_whether_a_step_is_planned_in_arrays(
    monkeypatch: pytest.MonkeyPatch,
    speaking: Path,
    settings: dict[str, Any],
    params: SamplingParams,
    has_arrays: bool,
) -> None:
    if params.has_grammar:
        pytest.importorskip("llguidance")
    kinds: list[str] = []
    for name in ("dispatch", "dispatch_arrays"):
        really = getattr(Runner, name)

        def dispatch(self: Runner, plan: Any, name: str = name, really: Any = really) -> None:
            kinds.append(name)
            really(self, plan)

        monkeypatch.setattr(Runner, name, dispatch)
    LLM(speaking, **settings).generate("abc", params)
    assert set(kinds) == {"dispatch_arrays" if has_arrays else "dispatch"}
