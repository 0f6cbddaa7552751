"""Sessions under check: random clients get the right answers, and seeded bugs are found.

A single request with the tokens that the session kept and the new input as its prompt gives the
expected answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_support.adapters import ADAPTERS
from engine_support.drawn import draw_settings
from engine_support.models import VOCAB_SIZE, Checkpoint, make_checkpoint, make_prompts

from blockstep.conformance.engines.serving import CheckFailedError, ServingChecker
from blockstep.impl.engine import LLM, Completion, RequestError, SamplingParams, Session
from blockstep.impl.engine.input_batch import Batch, BatchRow, StepRow
from blockstep.spec.vocabulary import FinishReason, NewRow

NAMES = ("some", "whole")
"""Names of the adapters."""
NUM_TESTS, NUM_RUNS = 2, 60
"""Number of runs in `make test`, and in all with `make soak`."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    names = ("qwen3", "qwen2")
    return [make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in names]


@pytest.fixture(scope="module")
def modules(
    checkpoints: list[Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Path]]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        {name: ADAPTERS[name].save(one.model, root / one.family / name) for name in NAMES}
        for one in checkpoints
    ]


@dataclass
class Talk:
    """A session with its inputs, their parameters and its completions."""

    session: Session
    adapter: str | None
    asked: list[SamplingParams]
    inputs: list[list[int]]
    completions: list[Completion] = field(default_factory=list)


class Clients:
    """Clients that open, continue, read and end sessions, and send other requests."""

    def __init__(self, draw: random.Random, llm: LLM) -> None:
        self.draw = draw
        self.llm = llm
        self.talks: list[Talk] = []
        self.others: list[str] = []

    def run(self) -> None:
        acts = [self.open, self.send, self.send, self.send, self.listen, self.ask, self.end]
        for _ in range(self.draw.randrange(20, 60)):
            try:
                self.draw.choice(acts)()
            except RequestError:
                continue
            for _ in range(self.draw.randrange(4)):
                self.llm.step()
        for talk in self.talks:
            self.listen_to(talk)
            if self.draw.random() < 0.5:
                talk.session.close()
        while self.llm.has_unfinished_requests:
            self.llm.step()

    def draw_input(self) -> tuple[list[int], SamplingParams]:
        draw = self.draw
        prompt = draw.choice(make_prompts())[: draw.randrange(1, 24)]
        params = SamplingParams(
            max_tokens=draw.randrange(1, 12),
            temperature=draw.choice((0.0, 0.0, 0.7)),
            seed=draw.randrange(1000),
            stop_token_ids=tuple(draw.randrange(VOCAB_SIZE) for _ in range(5)),
        )
        return prompt, params

    def draw_adapter(self) -> str | None:
        return self.draw.choice((None, *self.llm.settings.lora_modules))

    def open(self) -> None:
        (prompt, params), adapter = self.draw_input(), self.draw_adapter()
        priority = self.draw.randrange(3)
        session = self.llm.open_session(prompt, params, priority, adapter)
        self.talks.append(Talk(session, adapter, [params], [prompt]))

    def send(self) -> None:
        if self.talks:
            talk, (prompt, params) = self.draw.choice(self.talks), self.draw_input()
            talk.session.send(prompt, params)
            talk.asked.append(params)
            talk.inputs.append(prompt)

    def listen(self) -> None:
        if self.talks:
            talk = self.draw.choice(self.talks)
            talk.completions.append(talk.session.receive())

    def listen_to(self, talk: Talk) -> None:
        """Receive all completions that are due."""
        try:
            while True:
                talk.completions.append(talk.session.receive())
        except RequestError:
            return

    def ask(self) -> None:
        prompt, params = self.draw_input()
        self.others.append(self.llm.add_request(prompt, params, 1, self.draw_adapter()))

    def end(self) -> None:
        if self.talks and self.draw.random() < 0.3:
            session = self.draw.choice(self.talks).session
            self.draw.choice((session.close, session.abort))()
        elif self.others and self.draw.random() < 0.3:
            self.llm.abort(self.draw.choice(self.others))


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_TESTS),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(NUM_TESTS, NUM_RUNS)),
    ],
)
def test_every_session_gets_its_own_answers(
    checkpoints: list[Checkpoint], modules: list[dict[str, Path]], seed: int
) -> None:
    draw, which = random.Random(seed), seed % 2
    settings = draw_settings(draw, checkpoints[which])
    settings |= {"lora_modules": modules[which], "max_loras": draw.choice((0, 1, 2))}
    folder = checkpoints[which].folder
    llm = LLM(folder, check=ServingChecker, enable_sessions=True, **settings)
    clients = Clients(draw, llm)
    clients.run()
    lone = LLM(
        folder, enable_prefix_caching=False, max_model_len=settings["max_model_len"],
        lora_modules=modules[which],
    )  # fmt: skip
    assert clients.talks or clients.others
    for talk in clients.talks:
        kept: tuple[int, ...] = ()
        ended_early = len(talk.completions) < len(talk.inputs) or not talk.completions
        assert not ended_early or not talk.session.is_open
        for made, params, prompt in zip(talk.completions, talk.asked, talk.inputs, strict=False):
            whole = (*kept, *prompt)
            assert made.prompt_token_ids == whole
            (expected,) = lone.generate(whole, params, talk.adapter)
            if made.finish_reason is FinishReason.ABORT:
                assert made is talk.completions[-1]
                assert made.token_ids == expected.token_ids[: len(made.token_ids)]
            else:
                assert made.token_ids == expected.token_ids
                assert made.finish_reason is expected.finish_reason
            kept = (*whole, *made.token_ids[:-1])


# Seeded bugs in what the worker does when a session continues.


def serve(checkpoint: Checkpoint) -> None:
    """Run a session that continues with its blocks, and once more after they were reclaimed."""
    llm = LLM(
        checkpoint.folder, check=ServingChecker, enable_sessions=True, block_size=4,
        num_blocks=9, max_model_len=32,
    )  # fmt: skip
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    session = llm.open_session([2, 3, 4, 5, 6], params)
    session.send([7, 8])
    session.receive()
    session.receive()
    llm.generate([[9] * 26], params)
    session.send([10])
    session.receive()
    assert llm.get_stats().preemptions == 0


def test_a_right_worker_has_no_finding(checkpoints: list[Checkpoint]) -> None:
    serve(checkpoints[0])


def keep_the_last_token(batch: Batch, step: StepRow, old: BatchRow, tokens: Any) -> None:
    place = step.row.num_computed - step.end + step.first
    batch.arrays.token_ids[step.row.index, place] = tokens[old.num_known - 1]


def compute_everything_again(batch: Batch, step: StepRow, old: BatchRow, tokens: Any) -> None:
    step.first = 0


def keep_the_old_table(batch: Batch, step: StepRow, old: BatchRow, tokens: Any) -> None:
    batch.arrays.block_tables[0, step.row.index, 0] += 1


@pytest.mark.parametrize(
    ("defect", "sentence"),
    [
        (keep_the_last_token, "model_runs_the_tokens_of_the_plan"),
        (compute_everything_again, "pass_runs_the_rows_of_the_plan"),
        (keep_the_old_table, "token_is_written_to_its_slot|attended_slot"),
    ],
)
def test_a_worker_that_continues_a_session_wrongly_is_found(
    checkpoints: list[Checkpoint], monkeypatch: pytest.MonkeyPatch, defect: Any, sentence: str
) -> None:
    start: Any = Batch._start_new

    def plant(self: Batch, new: NewRow, wanted: Any) -> StepRow:
        old = self.rows.get(new.request_id)
        tokens = None if old is None else self.arrays.token_ids[old.index].copy()
        step: StepRow = start(self, new, wanted)
        if old is not None:
            defect(self, step, old, tokens)
        return step

    monkeypatch.setattr(Batch, "_start_new", plant)
    with pytest.raises(CheckFailedError, match=sentence):
        serve(checkpoints[0])
