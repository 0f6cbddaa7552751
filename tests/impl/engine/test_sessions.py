"""Sessions in the engine: answers equal those of transformers to the kept text and the input."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_support.adapters import ADAPTERS
from engine_support.models import VOCAB_SIZE, Checkpoint, generate
from engine_support.storms import STORMS
from tokenizers import processors

from blockstep.conformance.engines.serving import ServingChecker
from blockstep.impl.engine import LLM, RequestError, SamplingParams, Session, SettingsError
from blockstep.impl.engine.input_batch import NUM_ROWS_FIRST
from blockstep.impl.engine.staging import ArrayStep, Staging
from blockstep.spec.vocabulary import FinishReason

MAX_TOKENS = 7
NUM_SESSIONS, NUM_INPUTS = 12, 3
STOPS = tuple(range(2, VOCAB_SIZE, 11))
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=STOPS)
MARGIN_MIN = 1e-4
TESTED = ("small-pool", "async-ngram", "draft-model")
"""Storms that are a test; the others are a soak."""
Turns = list[list[list[int]]]


def make_inputs(prompts: list[list[int]]) -> Turns:
    """Return, by input, the prompts of all sessions. The first ones share prefixes."""
    draw = random.Random(5)
    first = [prompt[:24] for prompt in prompts[:NUM_SESSIONS]]
    more = [
        [[draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randrange(1, 9))] for _ in first]
        for _ in range(NUM_INPUTS - 1)
    ]
    return [first, *more]


@pytest.fixture(scope="module")
def inputs(prompts: list[list[int]]) -> Turns:
    return make_inputs(prompts)


@pytest.fixture(scope="module")
def answers(qwen3: Checkpoint, inputs: Turns) -> list[list[tuple[int, ...]]]:
    """Return, by input, the answers of transformers to each session."""
    made: list[list[tuple[int, ...]]] = []
    kept: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]
    for of_all in inputs:
        whole = [[*before, *one] for before, one in zip(kept, of_all, strict=True)]
        expected = generate(qwen3.model, whole, MAX_TOKENS)
        assert expected.margin > MARGIN_MIN
        made.append([cut(tokens) for tokens in expected.token_ids])
        kept = [[*one, *tokens[:-1]] for one, tokens in zip(whole, made[-1], strict=True)]
    return made


def cut(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens up to the first stop token."""
    end = next((number for number, token in enumerate(tokens, 1) if token in STOPS), len(tokens))
    return tokens[:end]


def test_answers_finish_in_different_ways(answers: list[list[tuple[int, ...]]]) -> None:
    for of_all in answers:
        assert {tokens[-1] in STOPS for tokens in of_all} == {True, False}


def talk(llm: LLM, inputs: Turns, draw: random.Random) -> list[list[tuple[int, ...]]]:
    """Run sessions side by side: some send all inputs at once, others wait for each answer."""
    sessions: list[Session] = []
    is_eager: list[bool] = []
    received: list[list[tuple[int, ...]]] = [[] for _ in inputs[0]]
    for number, first in enumerate(inputs[0]):
        sessions.append(llm.open_session(first, PARAMS))
        is_eager.append(draw.random() < 0.5)
        if is_eager[-1]:
            for of_all in inputs[1:]:
                sessions[-1].send(of_all[number])
        for _ in range(draw.randrange(3)):
            llm.step()
    for turn in range(len(inputs)):
        order = list(range(len(sessions)))
        draw.shuffle(order)
        for number in order:
            if turn and not is_eager[number]:
                sessions[number].send(inputs[turn][number], PARAMS)
            if draw.random() < 0.3:
                received[number].append(sessions[number].receive().token_ids)
        for number in order:
            if len(received[number]) <= turn:
                received[number].append(
                    tuple(t for chunk in sessions[number].stream() for t in chunk.token_ids)
                )
    assert not llm.has_unfinished_requests
    assert llm.step() == []
    for session in sessions:
        assert session.is_open
        session.close()
        assert not session.is_open
    return received


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name not in TESTED)) for name in STORMS]
)
def test_answers_equal_those_of_transformers(
    qwen3: Checkpoint, inputs: Turns, answers: list[list[tuple[int, ...]]], name: str
) -> None:
    settings: dict[str, Any] = STORMS[name].get_settings(qwen3.family)
    if name.endswith("draft-model"):
        settings["draft_model"] = qwen3.draft_folder
    llm = LLM(qwen3.folder, check=ServingChecker, enable_sessions=True, **settings)
    received = talk(llm, inputs, random.Random(name))
    assert received == [list(of_one) for of_one in zip(*answers, strict=True)]
    stats = llm.get_stats()
    assert stats.prefix_cache_hits > 0 or name == "no-cache"
    assert stats.preemptions > 0 or "num_blocks" not in settings


# What a client may do. One model, a pool of 12 blocks of 4 tokens.


@pytest.fixture
def llm(qwen3: Checkpoint) -> LLM:
    return LLM(
        qwen3.folder, check=ServingChecker, enable_sessions=True, block_size=4, num_blocks=13,
        max_model_len=40,
    )  # fmt: skip


def generate_alone(llm: LLM, prompt: list[int], **params: Any) -> tuple[int, ...]:
    """Return the output of a single request with this prompt."""
    (made,) = llm.generate(prompt, SamplingParams(**params))
    return made.token_ids


def test_an_answer_has_the_prompt_it_answers(llm: LLM) -> None:
    with llm.open_session([2, 3, 4], SamplingParams(max_tokens=4)) as session:
        first = session.receive()
        assert not llm.has_unfinished_requests
        session.send([5, 6])
        assert llm.has_unfinished_requests
        second = session.receive()
        assert session.is_open
    assert not session.is_open
    assert first.finish_reason is second.finish_reason is FinishReason.LENGTH
    assert first.request_id == second.request_id == session.request_id
    assert second.prompt_token_ids == (2, 3, 4, *first.token_ids[:-1], 5, 6)
    assert second.token_ids == generate_alone(llm, list(second.prompt_token_ids), max_tokens=4)


def test_only_tokens_of_further_input_are_computed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where inputs are built, since a replay on a GPU does not call `Model.forward`."""
    counts: list[int] = []
    build: Any = Staging.build

    def count(self: Staging, step: ArrayStep, *given: Any) -> Any:
        counts.append(int(step.counts.sum()))
        return build(self, step, *given)

    monkeypatch.setattr(Staging, "build", count)
    session = llm.open_session([2, 3, 4, 5, 6], SamplingParams(max_tokens=3))
    session.receive()
    session.send([7, 8])
    session.receive()
    assert counts == [5, 1, 1, 2, 1, 1]


def test_tokens_of_a_session_are_prefix_hits_for_others(llm: LLM) -> None:
    session = llm.open_session([2, 3, 4, 5, 6], SamplingParams(max_tokens=4))
    generated = session.receive().token_ids
    (made,) = llm.generate([2, 3, 4, 5, 6, *generated[:-1], 9], SamplingParams(max_tokens=1))
    assert made.num_cached_tokens == 8
    assert session.is_open


@pytest.mark.parametrize("ahead", [1, 2])
def test_each_input_has_its_own_params(qwen3: Checkpoint, ahead: int) -> None:
    llm = LLM(
        qwen3.folder, check=ServingChecker, enable_sessions=True, block_size=4, num_blocks=30,
        max_frames_in_flight=ahead,
    )  # fmt: skip
    asked = [
        SamplingParams(max_tokens=5, temperature=0.9, seed=3, logprobs=2),
        SamplingParams(max_tokens=2, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=1.5, top_k=9, seed=4),
    ]
    session = llm.open_session([2, 3, 4], asked[0])
    session.send([7, 8], asked[1])
    session.send([9], asked[2])
    answers = [session.receive() for _ in asked]
    for params, answer in zip(asked, answers, strict=True):
        (alone,) = llm.generate(answer.prompt_token_ids, params)
        assert answer.token_ids == alone.token_ids
        assert (answer.logprobs is None) == (params.logprobs is None)
    assert answers[0].logprobs is not None
    assert len(answers[0].logprobs) == len(answers[0].token_ids)
    session.send([11])  # as the input before, not as the first
    assert session.receive().logprobs is None


def test_a_session_keeps_its_adapter(qwen3: Checkpoint, tmp_path: Path) -> None:
    modules = {"some": ADAPTERS["some"].save(qwen3.model, tmp_path / "some")}
    llm = LLM(
        qwen3.folder, check=ServingChecker, enable_sessions=True, block_size=4, num_blocks=30,
        lora_modules=modules,
    )  # fmt: skip
    session = llm.open_session([2, 3, 4], SamplingParams(max_tokens=4), adapter="some")
    session.send([5, 6])
    session.receive()
    second = session.receive()
    params, whole = SamplingParams(max_tokens=4), list(second.prompt_token_ids)
    alone = llm.generate([whole, whole], params, ["some", None])
    assert [one.token_ids == second.token_ids for one in alone] == [True, False]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_an_aborted_session_returns_its_generated_tokens(qwen3: Checkpoint, ahead: int) -> None:
    llm = LLM(
        qwen3.folder, check=ServingChecker, enable_sessions=True, block_size=4, num_blocks=13,
        max_model_len=40, max_frames_in_flight=ahead,
    )  # fmt: skip
    whole = generate_alone(llm, [2, 3, 4], max_tokens=12, ignore_eos=True)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    session = llm.open_session([2, 3, 4], params)
    session.send([5, 6])
    num_generated = 0
    while num_generated < 4:
        num_generated += sum(len(chunk.token_ids) for chunk in llm.step())
    session.abort()
    session.abort()
    answer = session.receive()
    assert answer.finish_reason is FinishReason.ABORT
    assert answer.token_ids == whole[:4]
    for act in (session.receive, lambda: next(session.stream())):
        with pytest.raises(RequestError, match="has ended"):
            act()
    with pytest.raises(RequestError, match="no unfinished request"):
        session.send([7])
    assert not llm.has_unfinished_requests
    assert generate_alone(llm, [2, 3, 4], max_tokens=12, ignore_eos=True) == whole


def test_a_stream_of_an_aborted_session_yields_generated_tokens(llm: LLM) -> None:
    session = llm.open_session([2, 3, 4], SamplingParams(max_tokens=9, ignore_eos=True))
    streamed = session.stream()
    first = next(streamed)
    llm.step()
    session.abort()
    assert [chunk.finish_reason for chunk in streamed] == [None, FinishReason.ABORT]
    assert first.request_id == session.request_id
    with pytest.raises(RequestError, match="has ended"):
        session.receive()


def test_an_input_has_one_answer(llm: LLM) -> None:
    session = llm.open_session([2, 3, 4], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="n = 2: use generate for several outputs"):
        session.send([5], SamplingParams(n=2))
    with pytest.raises(RequestError, match="params = 0: must be SamplingParams"):
        session.send([5], 0)  # type: ignore[arg-type]
    session.receive()
    assert not llm.has_unfinished_requests


def test_a_session_continues_after_a_stream_was_closed(llm: LLM) -> None:
    session = llm.open_session([2, 3, 4], SamplingParams(max_tokens=4, ignore_eos=True))
    expected = generate_alone(llm, [2, 3, 4], max_tokens=4, ignore_eos=True)
    first = next(session.stream())
    rest = [*session.stream()]
    assert (*first.token_ids, *(t for chunk in rest for t in chunk.token_ids)) == expected
    session.send([5])
    for chunk in session.stream():
        if chunk.finish_reason is not None:
            break  # the last one: nothing of this answer is left
    session.send([6])
    before = session.receive()
    assert before.prompt_token_ids[-1] == 6
    session.send([7])
    streamed = [token for chunk in session.stream() for token in chunk.token_ids]
    whole = [*before.prompt_token_ids, *before.token_ids[:-1], 7]
    assert tuple(streamed) == generate_alone(llm, whole, max_tokens=4, ignore_eos=True)
    session.send([7])
    next(session.stream())
    assert len(session.receive().token_ids) == 4  # whole, whatever was streamed of it


def test_a_closed_session_answers_inputs_sent_before(llm: LLM) -> None:
    session = llm.open_session([2, 3, 4], SamplingParams(max_tokens=3))
    session.send([5])
    session.close()
    session.close()
    with pytest.raises(RequestError, match="is not a session that takes more input"):
        session.send([6])
    assert session.is_open
    assert [len(session.receive().token_ids) for _ in range(2)] == [3, 3]
    assert not session.is_open
    session.close()
    with pytest.raises(RequestError, match="has ended"):
        session.receive()
    assert llm.step() == []


@pytest.mark.parametrize("end", [Session.close, Session.abort])
def test_closing_an_idle_session_finishes_it_at_once(
    llm: LLM, end: Callable[[Session], None]
) -> None:
    session = llm.open_session([2, 3, 4], SamplingParams(max_tokens=3))
    session.receive()
    end(session)
    assert not session.is_open
    with pytest.raises(RequestError, match="has ended"):
        session.receive()


def test_a_session_takes_one_row_of_the_batch(llm: LLM) -> None:
    with llm.open_session([2], SamplingParams(max_tokens=1)) as session:
        session.receive()
        for _ in range(NUM_ROWS_FIRST):
            session.send([3])
            session.receive()
    assert len(llm._runner.batch.arrays.token_ids) == NUM_ROWS_FIRST


def test_an_idle_session_continues_after_its_blocks_were_reclaimed(llm: LLM) -> None:
    """Three sessions fill the pool, a request that needs all blocks runs, then they continue."""
    params = SamplingParams(max_tokens=4)
    sessions = [llm.open_session([number] * 9, params) for number in (2, 3, 4)]
    first = [session.receive() for session in sessions]
    with pytest.raises(RequestError, match="every input has its answer"):
        sessions[0].receive()
    assert len(generate_alone(llm, [7] * 30, max_tokens=10, ignore_eos=True)) == 10
    for session, answer in zip(sessions, first, strict=True):
        session.send([8, 9])
        second = session.receive()
        assert second.prompt_token_ids == (*answer.prompt_token_ids, *answer.token_ids[:-1], 8, 9)
        session.close()
        assert second.token_ids == generate_alone(llm, list(second.prompt_token_ids), max_tokens=4)


@pytest.mark.parametrize("is_resting", [True, False])
def test_a_session_continues_after_an_input_that_never_fits(llm: LLM, is_resting: bool) -> None:
    session = llm.open_session([2] * 9, SamplingParams(max_tokens=4))
    if is_resting:
        session.receive()
    with pytest.raises(RequestError, match=r"input of 29 tokens: .*leaves no room"):
        session.send([3] * 29)
    for prompt, complaint in (([], "is empty"), ([500], "tokens 0 to 127"), ("a", "tokenizer")):
        with pytest.raises(RequestError, match=complaint):
            session.send(prompt)
    with pytest.raises(RequestError, match="must be SamplingParams"):
        session.send([3], 7)  # type: ignore[arg-type]
    session.send([3])
    answers = [session.receive() for _ in range(1 if is_resting else 2)]
    assert answers[-1].prompt_token_ids[-1] == 3


def test_unsupported_session_params_are_rejected(qwen3: Checkpoint, speaking: Path) -> None:
    with pytest.raises(RequestError, match="enable_sessions=True"):
        LLM(qwen3.folder).open_session([2, 3])
    llm = LLM(speaking, enable_sessions=True)
    with pytest.raises(RequestError, match="a session stops at tokens only"):
        llm.open_session("abc", SamplingParams(stop=("a",)))
    session = llm.open_session("abc")
    with pytest.raises(RequestError, match="a session stops at tokens only"):
        session.send("abc", SamplingParams(stop=("a",)))
    with pytest.raises(SettingsError, match="enable_sessions = 3: must be"):
        LLM(qwen3.folder, enable_sessions=3)


def test_an_interrupt_aborts_sessions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    resting = llm.open_session([2, 3], SamplingParams(max_tokens=2))
    resting.receive()
    running = llm.open_session([4, 5], SamplingParams(max_tokens=5))
    llm.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm._runner, "dispatch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            running.receive()
    assert not resting.is_open
    answer = running.receive()
    assert answer.finish_reason is FinishReason.ABORT
    assert len(answer.token_ids) == 1
    with llm.open_session([4, 5], SamplingParams(max_tokens=5)) as session:
        assert session.receive().token_ids[:1] == answer.token_ids


def test_a_session_takes_and_returns_text(speaking: Path) -> None:
    """Further input has no begin-of-text token, and half a character waits for the rest."""
    llm = LLM(speaking, enable_sessions=True, num_blocks=40)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with llm.open_session("abc", params) as session:
        session.send("äh")
        first, second = session.receive(), session.receive()
    bos, *abc = tokenizer.encode("abc").ids
    assert first.prompt_token_ids == (bos, *abc)
    assert second.prompt_token_ids[-3:] == tuple(tokenizer.encode("äh").ids[1:])
    assert 0 not in second.prompt_token_ids[1:]
    for answer in (first, second):
        (alone,) = llm.generate(answer.prompt_token_ids, params)
        assert answer.text == alone.text


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs the extra [grammars]")
@pytest.mark.parametrize("settings", [{}, {"max_frames_in_flight": 2, "spec_method": "ngram"}])
def test_each_input_has_its_own_grammar(speaking: Path, settings: dict[str, Any]) -> None:
    if settings:
        settings = {**settings, "num_speculative_tokens": 3}
    llm = LLM(
        speaking, check=ServingChecker, enable_sessions=True, num_blocks=20, max_model_len=200,
        **settings,
    )  # fmt: skip
    asked = [
        SamplingParams(choice=("yes", "no"), max_tokens=20),
        SamplingParams(regex="(ab){3,5}", max_tokens=20),
        SamplingParams(choice=("yes", "no"), max_tokens=20),
    ]
    session = llm.open_session("Is it?", asked[0])
    for params in asked[1:]:
        session.send("Why?", params)
    texts = [session.receive().text for _ in asked]
    assert texts[0] in ("yes", "no")
    assert re.fullmatch("(ab){3,5}", texts[1])
    assert texts[2] in ("yes", "no")
