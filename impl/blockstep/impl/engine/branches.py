"""Branches: requests that go on as several, for several outputs to a prompt and for beams.

A branch shares the KV of what it has in common with its parent. It begins when no plan in flight
names that; where the parent has ended meanwhile, the branch is a request like others, whose tokens
the prefix cache may know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockstep.impl.engine.batch import Wanted
from blockstep.impl.engine.beams import BeamSearch
from blockstep.impl.engine.errors import RequestError
from blockstep.impl.engine.outputs import Live, Output
from blockstep.impl.engine.steps import Steps
from blockstep.spec.vocabulary import (
    Abort,
    FinishReason,
    Fork,
    Request,
    RequestId,
    Submit,
    TokenIds,
)


@dataclass(slots=True)
class Beam:
    """A request that follows one text of a search, and may be ahead of it."""

    output: Output
    num_before: int
    """Tokens of the text that it began with."""
    num_chosen: int
    """Tokens of the text."""

    @property
    def is_ready(self) -> bool:
        """Whether it is known what may follow the text."""
        return self.num_before + len(self.output.token_ids) > self.num_chosen

    @property
    def next_token(self) -> int:
        """The likeliest, with which it has gone on."""
        return self.output.token_ids[self.num_chosen - self.num_before]

    @property
    def continuations(self) -> dict[int, float]:
        """The likeliest tokens behind the text, and their log probabilities."""
        return self.output.logprobs[self.num_chosen - self.num_before]


class Branches(Steps):
    """Makes branches between two steps."""

    def expect_forks(self, what: str) -> None:
        """Raises `RequestError` where a request cannot go on as several."""
        if not self.config.enable_forks:
            raise RequestError(f"{what}: load the model with enable_forks=True")

    def branch(self, parent: Request, wanted: Wanted, token_ids: TokenIds = ()) -> Output:
        """Another request like `parent`, which has begun; its outputs begin with `token_ids`.

        What it gains behind these is its output. Nothing may end it before that.
        """
        with self._whole():
            if self._frames:
                self._drain()
            name = f"request-{self._num_requests}"
            self._num_requests += 1
            child = replace(parent, request_id=name)
            if parent.request_id in self._live:
                self._apply(Fork(parent.request_id, name, token_ids))
            else:
                child = replace(
                    child,
                    prompt_token_ids=(*parent.prompt_token_ids, *token_ids),
                    max_tokens=parent.max_tokens - len(token_ids),
                )
                self._submit(Submit(child), f"prompt of {len(child.prompt_token_ids)} tokens")
            self._live[name] = Live(self._begin(child, wanted))
            return self._live[name].output

    def awaits_first_token(self, name: RequestId) -> bool:
        """Whether a request has no output yet, and may get one."""
        live = self._live.get(name)
        return live is not None and not live.output.token_ids

    def drop(self, names: Sequence[RequestId]) -> None:
        """Nobody asks for these any more."""
        with self._whole():
            alive = tuple(name for name in names if name in self._live)
            if alive:
                self._apply(Abort(alive))
            for name in alive:
                self._end(name, FinishReason.ABORT)
            for name in names:
                self._completions.pop(name, None)

    def _drain(self) -> None:
        """Take the answers of all plans in flight, and make no further one."""
        while self._frames:
            self._take_answer(self._frames.popleft())


class Sampling:
    """Several outputs to one prompt: once there is the first token of one, others branch off."""

    def __init__(self, llm: Branches, request: Request, others: Sequence[Wanted]) -> None:
        self.llm = llm
        self.request = request
        self.others = list(others)
        """Outputs that have not begun."""
        self.names = [request.request_id]

    def begin_others(self) -> None:
        """Let the others begin, if it is time."""
        if not self.others or self.llm.awaits_first_token(self.request.request_id):
            return
        for wanted in self.others:
            self.names.append(self.llm.branch(self.request, wanted).request.request_id)
        self.others.clear()


class Searching:
    """A search for the likeliest continuations of one prompt, and the requests that follow it.

    Args:
        llm: who serves them.
        search: what is chosen.
        output: of a request for the prompt.
    """

    def __init__(self, llm: Branches, search: BeamSearch, output: Output) -> None:
        self.llm = llm
        self.search = search
        self.request = output.request
        self.wanted = output.wanted
        self.beams = [Beam(output, 0, 0)]

    @property
    def names(self) -> list[RequestId]:
        """Of its requests."""
        return [beam.output.request.request_id for beam in self.beams]

    def advance(self) -> None:
        """Follow the next tokens, as often as they are known."""
        while not self.search.is_done and all(beam.is_ready for beam in self.beams):
            chosen = self.search.advance([beam.continuations for beam in self.beams])
            before, kept = self.beams, {}
            for one in chosen:
                if before[one.beam].next_token == one.token_id:
                    kept[one.beam] = one
            texts = zip(chosen, self.search.beams, strict=False)
            self.beams = [
                self._follow(before[one.beam], text, is_kept=kept.get(one.beam) is one)
                for one, text in texts
            ]
            left = [beam for place, beam in enumerate(before) if place not in kept]
            self.llm.drop([beam.output.request.request_id for beam in left])

    def _follow(self, beam: Beam, text: TokenIds, *, is_kept: bool) -> Beam:
        """The request that has gone on with the last token already, or a branch of it."""
        if is_kept:
            return Beam(beam.output, beam.num_before, len(text))
        parent = beam.output.request
        num_prompt = len(parent.prompt_token_ids) - len(self.request.prompt_token_ids)
        output = self.llm.branch(parent, self.wanted, text[num_prompt:])
        return Beam(output, len(text), len(text))
