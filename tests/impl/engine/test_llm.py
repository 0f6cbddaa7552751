"""The LLM class: generate, stream, abort, interrupts, stop strings, and rejected input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support.models import MAX_TOKENS, Checkpoint, build_model, save_model

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import (
    LLM,
    EngineError,
    RequestError,
    SamplingParams,
    Settings,
    SettingsError,
)
from blockstep.impl.engine.runner import Runner
from blockstep.impl.engine.schedulers import Scheduler
from blockstep.spec.vocabulary import Abort, Event, FinishReason, Observation, Submit

EIGHT = SamplingParams(max_tokens=8)


# Generate and stream.


def test_generate_takes_one_prompt_or_several(qwen3: Checkpoint, prompts: list[list[int]]) -> None:
    llm = LLM(qwen3.folder)
    (alone,) = llm.generate(prompts[0], EIGHT)
    together = llm.generate(prompts[:3], EIGHT)
    assert alone.token_ids == together[0].token_ids
    assert [one.prompt_token_ids for one in together] == list(map(tuple, prompts[:3]))


def test_each_prompt_may_have_its_own_params(qwen3: Checkpoint, prompts: list[list[int]]) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    made = LLM(qwen3.folder).generate(prompts[:2], params)
    assert [len(one.token_ids) for one in made] == [1, 5]
    assert {one.finish_reason for one in made} == {FinishReason.LENGTH}


def test_settings_may_be_one_object(qwen3: Checkpoint) -> None:
    settings = Settings(block_size=8, num_blocks=5)
    assert LLM(qwen3.folder, settings=settings).config.block_size == 8
    with pytest.raises(SettingsError, match=r"put \['block_size'\] into them"):
        LLM(qwen3.folder, settings=settings, block_size=4)
    with pytest.raises(SettingsError, match="unexpected keyword argument 'blocksize'"):
        LLM(qwen3.folder, blocksize=4)


def test_a_stream_yields_what_generate_returns(speaking: Path) -> None:
    llm = LLM(speaking)
    (whole,) = llm.generate("What is a block?", EIGHT)
    chunks = list(llm.stream("What is a block?", EIGHT))
    assert len(chunks) == 8
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + [FinishReason.LENGTH]


def test_text_is_that_of_the_tokenizer(speaking: Path) -> None:
    llm = LLM(speaking)
    (one,) = llm.generate("A page of memory", SamplingParams(max_tokens=30, ignore_eos=True))
    assert llm.tokenizer is not None
    assert one.text == llm.tokenizer.decode(list(one.token_ids))


def test_closing_a_stream_aborts_its_request(qwen3: Checkpoint, prompts: list[list[int]]) -> None:
    llm = LLM(qwen3.folder)
    stream = llm.stream(prompts[0], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.has_unfinished_requests
    assert llm.step() == []


def test_interleaved_streams_get_all_of_their_tokens(
    qwen3: Checkpoint, prompts: list[list[int]]
) -> None:
    llm = LLM(qwen3.folder)
    whole = llm.generate(prompts[:3], EIGHT)
    first, second = llm.stream(prompts[0], EIGHT), llm.stream(prompts[1], EIGHT)
    chunks = [next(first), next(second)]
    (third,) = llm.generate(prompts[2], EIGHT)
    assert third.token_ids == whole[2].token_ids
    for start, rest, expected in zip(chunks, (first, second), whole, strict=False):
        made = [start, *rest]
        assert sum((chunk.token_ids for chunk in made), ()) == expected.token_ids
        assert made[-1].finish_reason is expected.finish_reason


def test_threads_may_share_a_model(qwen3: Checkpoint, prompts: list[list[int]]) -> None:
    llm = LLM(qwen3.folder)
    expected = [one.token_ids for one in llm.generate(prompts[:12], EIGHT)]

    def serve(prompt: list[int]) -> tuple[int, ...]:
        return sum((chunk.token_ids for chunk in llm.stream(prompt, EIGHT)), ())

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(serve, prompts[:12])) == expected
        made = pool.map(lambda prompt: llm.generate(prompt, EIGHT)[0].token_ids, prompts[:12])
        assert list(made) == expected


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", ["_choose", "_settle", "_accept"])
def test_an_interrupt_aborts_only_the_running_call(
    monkeypatch: pytest.MonkeyPatch,
    qwen3: Checkpoint,
    prompts: list[list[int]],
    place: str,
    depth: int,
) -> None:
    llm = LLM(
        qwen3.folder, max_frames_in_flight=depth, spec_method="ngram", num_speculative_tokens=2
    )
    name = llm.add_request(prompts[5], EIGHT)
    llm.step()
    calls = iter(range(100))
    really = getattr(Runner, place)

    def interrupt(self: Runner, *given: Any) -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return really(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Runner, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts[:3], EIGHT)
    assert not llm.has_unfinished_requests
    other = llm.pop_completion(name)
    assert other.finish_reason in (FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH)
    expected = [one[:8] for one in qwen3.expected.token_ids]
    assert other.token_ids == expected[5][: len(other.token_ids)]
    assert [one.token_ids for one in llm.generate(prompts[:6], EIGHT)] == expected[:6]
    assert not llm._completions


@pytest.mark.parametrize("event", [Submit, Abort])
def test_an_interrupt_leaves_engine_and_scheduler_consistent(
    monkeypatch: pytest.MonkeyPatch,
    qwen3: Checkpoint,
    prompts: list[list[int]],
    event: type,
) -> None:
    llm = LLM(qwen3.folder)
    name = llm.add_request(prompts[0], EIGHT)
    scheduler = type(llm._scheduler)
    really: Any = scheduler.apply

    def interrupt(self: Scheduler, given: Event) -> Observation:
        answer: Observation = really(self, given)
        if isinstance(given, event):
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.add_request(prompts[1], EIGHT) if event is Submit else llm.abort(name)
    assert llm.pop_completion(name).finish_reason is FinishReason.ABORT
    assert llm.step() == []
    assert llm.generate(prompts[1], EIGHT)[0].token_ids == qwen3.expected.token_ids[1][:8]
    assert not llm._scheduler.snapshot().requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_numbers_that_overflow_are_reported(
    tmp_path: Path, method: str, temperature: float
) -> None:
    model = build_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(6e4)
    folder = save_model(model, tmp_path)
    settings: dict[str, Any] = {"spec_method": method}
    if method == "draft_model":
        settings |= {"num_speculative_tokens": 2, "draft_model": folder}
    llm = LLM(folder, dtype="float16", **settings)
    with pytest.raises(EngineError, match=r"not finite: the model overflows torch.float16"):
        llm.generate([[2, 3, 4]], SamplingParams(temperature=temperature))
    assert not llm.has_unfinished_requests


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_finishes_one_request_and_no_other(
    qwen3: Checkpoint, prompts: list[list[int]], depth: int
) -> None:
    llm = LLM(qwen3.folder, max_frames_in_flight=depth)
    names = [
        llm.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in prompts[:3]
    ]
    llm.step()
    llm.step()
    llm.abort(names[1], "unknown")
    llm.abort(names[1])
    while llm.has_unfinished_requests:
        assert all(chunk.request_id != names[1] for chunk in llm.step())
    aborted = llm.pop_completion(names[1])
    assert aborted.finish_reason is FinishReason.ABORT
    assert aborted.token_ids == qwen3.expected.token_ids[1][: len(aborted.token_ids)]
    for row in (0, 2):
        assert llm.pop_completion(names[row]).token_ids == qwen3.expected.token_ids[row]
    with pytest.raises(RequestError, match="was taken already"):
        llm.pop_completion(names[0])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((0, 0), None),
        ((0, "unknown", "unknown"), None),
        ((["request-0"],), r"\['request-0'\] is not a request's id"),
        ((5,), "5 is not a request's id"),
    ],
)
def test_abort_accepts_repeated_and_unknown_ids(
    qwen3: Checkpoint, prompts: list[list[int]], names: tuple[Any, ...], message: str | None
) -> None:
    llm = LLM(qwen3.folder)
    known = [llm.add_request(prompt, EIGHT) for prompt in prompts[:2]]
    given = [known[name] if name == 0 else name for name in names]
    if message is None:
        llm.abort(*given)
        assert llm.pop_completion(known[0]).finish_reason is FinishReason.ABORT
    else:
        with pytest.raises(RequestError, match=message):
            llm.abort(*given)
    while llm.has_unfinished_requests:
        llm.step()
    assert llm.pop_completion(known[1]).token_ids == qwen3.expected.token_ids[1][:8]


@pytest.mark.parametrize("how", ["abort", "failure"])
@pytest.mark.parametrize("scheduler", ["host", "device"])
def test_a_stream_reports_an_abort_or_failure_by_another_caller(
    monkeypatch: pytest.MonkeyPatch, speaking: Path, scheduler: str, how: str
) -> None:
    """It also yields text that was held back as a possible start of a stop string."""
    llm = LLM(speaking, scheduler=scheduler, steps_per_fence=2)
    free = SamplingParams(max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate("abc", free)
    first = next(llm.stream("abc", free))
    stop = (whole.text[: len(first.text) + 1] + "~", whole.text[1] + "~")
    stream = llm.stream("abc", replace(free, stop=stop))
    chunks = [next(stream)]
    (name,) = llm._live
    if how == "abort":
        llm.abort(name)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(LLM, "_step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("x", EIGHT)
    chunks += stream
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is FinishReason.ABORT
    tokens = sum((chunk.token_ids for chunk in chunks), ())
    assert tokens == whole.token_ids[: len(tokens)]
    assert llm.tokenizer is not None
    assert "".join(chunk.text for chunk in chunks) == llm.tokenizer.decode(list(tokens))
    assert not llm._completions


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_requests_can_be_added_while_others_run(
    qwen3: Checkpoint, prompts: list[list[int]]
) -> None:
    llm = LLM(qwen3.folder, max_num_seqs=4)
    names = []
    for prompt in prompts[:24]:
        names.append(llm.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)))
        llm.step()
    while llm.has_unfinished_requests:
        llm.step()
    made = [llm.pop_completion(name).token_ids for name in names]
    assert made == qwen3.expected.token_ids[:24]


def test_a_lower_priority_is_served_first(qwen3: Checkpoint, prompts: list[list[int]]) -> None:
    llm = LLM(qwen3.folder, policy="priority", max_num_seqs=1)
    for number, prompt in enumerate(prompts[:4]):
        llm.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True), priority=-number)
    ended = []
    while llm.has_unfinished_requests:
        ended += [chunk.request_id for chunk in llm.step() if chunk.finish_reason]
    assert ended == [f"request-{number}" for number in (3, 2, 1, 0)]


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_plan_that_only_preempts_is_progress(qwen3: Checkpoint, ahead: int) -> None:
    """The request that lacks blocks preempts itself, and the step admits no other request."""
    llm = LLM(
        qwen3.folder, policy="priority", block_size=4, num_blocks=5, max_model_len=16,
        max_frames_in_flight=ahead, check=ServingChecker,
    )  # fmt: skip
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    texts = [list(range(2, 8)), list(range(20, 26))]
    names = []
    for place, text in enumerate(texts):
        names.append(llm.add_request(text, params, 1 - place))
        llm.step()
    while llm.has_unfinished_requests:
        llm.step()
    made = [llm.pop_completion(name).token_ids for name in names]
    assert made == [one.token_ids for one in LLM(qwen3.folder).generate(texts, params)]
    assert llm.get_stats().preemptions > 0


def test_the_batch_grows_with_the_number_of_requests(
    qwen3: Checkpoint, prompts: list[list[int]]
) -> None:
    llm = LLM(qwen3.folder)
    llm.generate(prompts, SamplingParams(max_tokens=2))
    assert len(llm._runner.batch.arrays.token_ids) >= 64


# Ends.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_stop_string_ends_the_text(speaking: Path, depth: int, drafts: int) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=2, ignore_eos=True)
    (whole,) = LLM(speaking).generate("abc", params)
    assert whole.text.isprintable() or len(whole.text) > 10
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 2]
    settings: dict[str, Any] = {"max_frames_in_flight": depth}
    if drafts:
        settings |= {"spec_method": "ngram", "num_speculative_tokens": drafts}
    llm = LLM(speaking, **settings)
    stopping = SamplingParams(
        max_tokens=40, temperature=0.8, seed=2, ignore_eos=True, stop=("no such text", stop)
    )
    (cut,) = llm.generate("abc", stopping)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    chunks = list(llm.stream("abc", stopping))
    assert sum((chunk.token_ids for chunk in chunks), ()) == cut.token_ids
    assert "".join(chunk.text for chunk in chunks) == cut.text


def test_a_stop_token_ends_the_output(qwen3: Checkpoint, prompts: list[list[int]]) -> None:
    llm = LLM(qwen3.folder)
    (whole,) = llm.generate(prompts[0], SamplingParams(max_tokens=8, ignore_eos=True))
    stop = whole.token_ids[4]
    (cut,) = llm.generate(
        prompts[0], SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,))
    )
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert cut.finish_reason is FinishReason.STOP


def test_tokens_after_a_stop_string_are_dropped(speaking: Path) -> None:
    plain = LLM(speaking)
    llm = LLM(speaking, spec_method="draft_model", num_speculative_tokens=5, draft_model=speaking)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)
    (whole,) = plain.generate("abc", params)
    stops = [letter for letter in whole.text if letter.isascii()]
    assert len(set(stops)) > 5
    for stop in stops:
        stopping = replace(params, stop=(stop,))
        (cut,), (expected,) = llm.generate("abc", stopping), plain.generate("abc", stopping)
        assert cut.token_ids == expected.token_ids
        assert cut.text == expected.text
        assert cut.logprobs is not None
        assert len(cut.logprobs) == len(cut.token_ids)
    assert llm.get_stats().drafts_accepted > 0


def test_a_stop_token_is_not_part_of_the_text(speaking: Path) -> None:
    llm = LLM(speaking)
    (whole,) = llm.generate("abc", EIGHT)
    stop = whole.token_ids[5]
    assert llm.tokenizer is not None
    kept = whole.token_ids[: whole.token_ids.index(stop)]
    params = SamplingParams(max_tokens=8, stop_token_ids=(stop,))
    (cut,) = llm.generate("abc", params)
    assert cut.token_ids == (*kept, stop)
    assert cut.text == llm.tokenizer.decode(list(kept))
    assert "".join(chunk.text for chunk in llm.stream("abc", params)) == cut.text


def test_max_model_len_ends_the_output(qwen3: Checkpoint) -> None:
    llm = LLM(qwen3.folder, max_model_len=12)
    (one,) = llm.generate([2, 3, 4], SamplingParams(max_tokens=99, ignore_eos=True))
    assert len(one.token_ids) == 9
    assert one.finish_reason is FinishReason.LENGTH


# Logprobs.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_logprobs_equal_those_of_transformers(
    checkpoint: Checkpoint, prompts: list[list[int]], method: str, depth: int
) -> None:
    settings: dict[str, Any] = {"spec_method": method, "max_frames_in_flight": depth}
    if method == "draft_model":
        settings |= {"num_speculative_tokens": 3, "draft_model": checkpoint.draft_folder}
    llm = LLM(checkpoint.folder, **settings)
    params = [SamplingParams(max_tokens=MAX_TOKENS, logprobs=3), SamplingParams(max_tokens=4)] * 4
    made = llm.generate(prompts[:8], params)
    assert [one.logprobs is None for one in made] == [False, True] * 4
    expected = checkpoint.expected.logits.log_softmax(-1)
    for row, one in enumerate(made):
        if one.logprobs is None:
            continue
        assert len(one.logprobs) == len(one.token_ids)
        for place, (token, logprobs) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
            theirs = expected[row, place]
            assert set(theirs.topk(3).indices.tolist()) | {token} == set(logprobs)
            values = torch.tensor([logprobs[t] for t in logprobs])
            torch.testing.assert_close(values, theirs[list(logprobs)], rtol=1e-3, atol=1e-3)


# Prefix hits.


def test_cached_tokens_are_counted(qwen3: Checkpoint) -> None:
    llm = LLM(qwen3.folder, block_size=4)
    prompt = list(range(2, 20))
    (first,) = llm.generate(prompt, EIGHT)
    (second,) = llm.generate(prompt, EIGHT)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert first.token_ids == second.token_ids


# What is refused.


def test_a_prompt_longer_than_the_cache_is_rejected(
    qwen3: Checkpoint, prompts: list[list[int]]
) -> None:
    llm = LLM(qwen3.folder, block_size=4, num_blocks=5, max_model_len=64)
    with pytest.raises(RequestError, match=r"prompt of 40 tokens: .*block"):
        llm.generate(list(range(2, 42)), EIGHT)
    assert not llm.has_unfinished_requests
    assert len(llm.generate([2, 3, 4], EIGHT)) == 1


def test_a_prompt_longer_than_max_model_len_is_rejected(qwen3: Checkpoint) -> None:
    llm = LLM(qwen3.folder, max_model_len=16)
    with pytest.raises(RequestError, match=r"prompt of 16 tokens: .*max_model_len"):
        llm.generate(list(range(2, 18)), EIGHT)


def test_a_bad_prompt_withdraws_the_other_prompts_of_the_call(qwen3: Checkpoint) -> None:
    llm = LLM(qwen3.folder)
    with pytest.raises(RequestError, match="token 128: the model has tokens 0 to 127"):
        llm.generate([[2, 3], [2, 128]], EIGHT)
    assert not llm.has_unfinished_requests
    assert llm.generate([[2, 3]], EIGHT)[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("text", EIGHT, "a text needs the model's tokenizer.json"),
        ([[2], []], EIGHT, "prompt of 0 tokens"),
        ([2, "3"], EIGHT, "token '3'"),
        (None, EIGHT, "prompt None: must be a text, or a list of token ids"),
        (5, EIGHT, "prompt 5: must be"),
        ([1.0], EIGHT, r"prompt 1.0: must be"),
        (["x", None], EIGHT, "a text needs the model's tokenizer.json"),
        ([[2], None], EIGHT, "prompt None: must be"),
        (b"abc", EIGHT, "prompt b'abc': must be"),
        ([128], EIGHT, "token 128: the model has tokens 0 to 127"),
        ({"prompt": "x"}, EIGHT, "must be a text, or a list of token ids"),
        (torch.tensor([1, 2]), EIGHT, r"prompt tensor\(\[1, 2\]\): must be"),
        ([2], {"max_tokens": 3}, "params = {'max_tokens': 3}: must be SamplingParams"),
        ([2], 5, "params = 5: must be SamplingParams, or a list of them"),
        ([2], [5], "params = 5: must be SamplingParams"),
        ([2], SamplingParams(stop=("x",)), "stop: the model has no tokenizer.json"),
    ],
)
def test_a_wrong_request_is_rejected(
    qwen3: Checkpoint, prompt: Any, params: SamplingParams, message: str
) -> None:
    llm = LLM(qwen3.folder)
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, params)
    assert not llm.has_unfinished_requests


def test_half_a_surrogate_pair_is_rejected(speaking: Path) -> None:
    with pytest.raises(RequestError, match=r"prompt 'a.*': is not Unicode text"):
        LLM(speaking).generate("a\ud800")


def test_the_number_of_params_must_equal_that_of_prompts(qwen3: Checkpoint) -> None:
    with pytest.raises(RequestError, match="2 prompts and 1 params"):
        LLM(qwen3.folder).generate([[2], [3]], [EIGHT])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 1}, "num_blocks = 1: must be an int from 2"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes = 100: a block takes"),
        ({"block_size": 0}, "block_size = 0"),
        ({"max_model_len": 1000}, "max_model_len = 1000: the model was made for 256 positions"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_frames_in_flight": 0}, "max_frames_in_flight = 0"),
        ({"device": "tpu"}, "device = 'tpu': must be auto, cpu or cuda"),
        ({"dtype": "int8"}, "dtype = 'int8': must be auto or one of"),
        ({"seed": -1}, "seed = -1"),
        ({"max_model_len": 0}, "max_model_len = 0: must be an int of at least 1"),
        ({"max_model_len": "8"}, "max_model_len = '8': must be an int"),
        ({"num_blocks": "x"}, "num_blocks = 'x': must be an int"),
        ({"kv_cache_bytes": 1e9}, "kv_cache_bytes = 1000000000.0: must be an int"),
        ({"max_num_seqs": None}, "max_num_seqs = None: must be an int"),
        ({"num_blocks": 5, "kv_cache_bytes": 10**6}, "num_blocks and kv_cache_bytes: .*give one"),
        ({"policy": "lifo"}, "policy = 'lifo': must be one of fcfs, priority"),
        ({"lora_modules": {"a": 5}}, "must be a mapping of names to folders"),
        ({"disable_hybrid_kv_cache_manager": "no"}, "'no': must be a bool"),
        ({"kv_store": "/run/me/kv"}, "kv_store = '/run/me/kv': must have the methods"),
    ],
)
def test_impossible_settings_are_rejected_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("blockstep.impl.engine.loading.load_weights", None)
    with pytest.raises(SettingsError, match=message):
        LLM(qwen3.folder, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_rejected(qwen3: Checkpoint) -> None:
    with pytest.raises(SettingsError, match="torch sees no GPU here; use cpu"):
        LLM(qwen3.folder, device="cuda")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_without_triton_is_rejected(
    monkeypatch: pytest.MonkeyPatch, qwen3: Checkpoint, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("blockstep.impl.engine.loading.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"a GPU needs Triton.* install 'blockstep\[gpu\]'"):
        LLM(qwen3.folder, device=device)


def test_all_errors_are_engine_errors() -> None:
    assert all(issubclass(error, EngineError) for error in (RequestError, SettingsError))
