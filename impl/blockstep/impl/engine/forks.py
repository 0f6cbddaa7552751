"""Branches: requests that fork, for several outputs to a prompt (`n`) and for beam search.

A branch shares the KV of the token sequence that it has in common with its parent. It starts when
no frame is in flight. If the parent has finished meanwhile, the branch is submitted as a request of
its own, and may hit the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockstep.impl.engine.beams import BeamSearch
from blockstep.impl.engine.engine_loop import Steps
from blockstep.impl.engine.errors import RequestError
from blockstep.impl.engine.outputs import Live, Output
from blockstep.impl.engine.rows import Wanted
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
    """A request that follows one beam of a search; it may have sampled tokens past the beam."""

    output: Output
    num_before: int
    """Tokens of the beam that were the request's outputs when it started."""
    num_chosen: int
    """Tokens of the beam now."""

    @property
    def is_ready(self) -> bool:
        """Whether the request has sampled past the beam, so that the beam's continuations are
        known."""
        return self.num_before + len(self.output.token_ids) > self.num_chosen

    @property
    def next_token(self) -> int:
        """The token that the request itself sampled after the beam."""
        return self.output.token_ids[self.num_chosen - self.num_before]

    @property
    def continuations(self) -> dict[int, float]:
        """Log probabilities of the likeliest tokens after the beam."""
        return self.output.logprobs[self.num_chosen - self.num_before]


class Branches(Steps):
    """Starts branches between two steps."""

    def expect_forks(self, what: str) -> None:
        """Raise `RequestError` if the engine was loaded without `enable_forks`."""
        if not self.config.enable_forks:
            raise RequestError(f"{what}: load the model with enable_forks=True")

    def branch(self, parent: Request, wanted: Wanted, token_ids: TokenIds = ()) -> Output:
        """Start a branch of `parent`, whose outputs begin with `token_ids`; return its output.

        The output has only the tokens after these. The stop conditions of `parent` must not hold
        within `token_ids`.
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
        """Whether a request is unfinished and has no output token yet."""
        live = self._live.get(name)
        return live is not None and not live.output.token_ids

    def drop(self, names: Sequence[RequestId]) -> None:
        """Abort the requests of these names and delete their completions."""
        with self._whole():
            alive = tuple(name for name in names if name in self._live)
            if alive:
                self._apply(Abort(alive))
            for name in alive:
                self._end(name, FinishReason.ABORT)
            for name in names:
                self._completions.pop(name, None)

    def _drain(self) -> None:
        """Commit all frames in flight without making a further plan."""
        while self._frames:
            self._take_answer(self._frames.popleft())


class Sampling:
    """Several outputs to one prompt: when the first request has a token, the others fork from
    it."""

    def __init__(self, llm: Branches, request: Request, others: Sequence[Wanted]) -> None:
        self.llm = llm
        self.request = request
        self.others = list(others)
        """Sampling parameters of the outputs that have not started."""
        self.names = [request.request_id]

    def begin_others(self) -> None:
        """Fork the other outputs if the first request has a token or has finished."""
        if not self.others or self.llm.awaits_first_token(self.request.request_id):
            return
        for wanted in self.others:
            self.names.append(self.llm.branch(self.request, wanted).request.request_id)
        self.others.clear()


class Searching:
    """A beam search for one prompt, with the requests that follow its beams.

    Args:
        llm: the engine that serves them.
        search: chooses the beams.
        output: the output of a request for the prompt.
    """

    def __init__(self, llm: Branches, search: BeamSearch, output: Output) -> None:
        self.llm = llm
        self.search = search
        self.request = output.request
        self.wanted = output.wanted
        self.beams = [Beam(output, 0, 0)]

    @property
    def names(self) -> list[RequestId]:
        """Ids of its requests."""
        return [beam.output.request.request_id for beam in self.beams]

    def advance(self) -> None:
        """Advance the search by as many tokens as the requests have sampled."""
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
        """Return the beam's request if it sampled the chosen token itself (`is_kept`), else a
        branch."""
        if is_kept:
            return Beam(beam.output, beam.num_before, len(text))
        parent = beam.output.request
        num_prompt = len(parent.prompt_token_ids) - len(self.request.prompt_token_ids)
        output = self.llm.branch(parent, self.wanted, text[num_prompt:])
        return Beam(output, len(text), len(text))
