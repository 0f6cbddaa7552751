"""Outputs: what a request gains, step by step, and what it has gained when it ends.

A session has an output for each of its inputs; between two of them it rests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import msgspec
from tokenizers import Tokenizer

from blockstep.impl.arrays import ArrayOutputs
from blockstep.impl.engine.batch import Wanted
from blockstep.impl.engine.runner import Logprobs
from blockstep.impl.engine.text import Detokenizer
from blockstep.spec.vocabulary import (
    FinishReason,
    OutputRow,
    Request,
    RequestId,
    RowTokens,
    TokenIds,
)


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """What one request gained in one step."""

    request_id: RequestId
    token_ids: TokenIds
    text: str = ""
    """"" without a tokenizer; may lag behind the tokens while a stop string is possible. Of a
    prompt of `LLM.generate` all text is in the last chunk."""
    finish_reason: FinishReason | None = None
    """Set in the last chunk of a request, or of what a session says to one input."""
    logprobs: Logprobs | None = None


class StepChunks(Sequence[Chunk]):
    """The chunks of a step whose outputs are arrays, made when one is looked at.

    Args:
        outputs: of the step; each row has one token.
        made: chunks that exist already, by row.
    """

    __slots__ = ("_chunks", "_made", "_outputs")

    def __init__(self, outputs: ArrayOutputs, made: Mapping[int, Chunk]) -> None:
        self._outputs, self._made = outputs, made
        self._chunks: list[Chunk] | None = None

    def _get(self) -> list[Chunk]:
        if self._chunks is None:
            names, tokens = self._outputs.names.tolist(), self._outputs.token_ids.tolist()
            self._chunks = list(map(Chunk, names, zip(tokens, strict=True)))
            for row, chunk in self._made.items():
                self._chunks[row] = chunk
        return self._chunks

    def __len__(self) -> int:
        return len(self._outputs)

    @overload
    def __getitem__(self, place: int) -> Chunk: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, place: int | slice) -> Chunk | Sequence[Chunk]:
        return self._get()[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(other) == self._get()

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request, or what a session said to one input."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    """Of a session: all that it kept, and the input behind it."""
    token_ids: TokenIds
    """Outputs. With a stop string they may reach past `text`, to the end of its last token."""
    text: str
    finish_reason: FinishReason
    num_cached_tokens: int
    """Prompt tokens that came from the prefix cache; of a session, when it was first admitted."""
    logprobs: Logprobs | None = None
    """Per output token, if asked for: log probabilities by token id, the sampled one among them."""


@dataclass(slots=True)
class Output:
    """What is said to one prompt, as far as it is said."""

    request: Request
    wanted: Wanted
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: Logprobs = field(default_factory=list)
    num_cached_tokens: int = 0
    reads_late: bool = False
    """Whether its text is read when it ends: no stop string may end it, and no stream asks."""

    def catch_up(self, token_ids: TokenIds, num_cached_tokens: int) -> None:
        """Tokens that were delivered without an object of their own, behind those it has."""
        self.token_ids += token_ids
        self.num_cached_tokens = num_cached_tokens

    def take(self, row: OutputRow, logprobs: Logprobs | None) -> Chunk:
        """What a step brought; the chunk says whether that is enough."""
        text, num_tokens, reason = self._read_tokens(row)
        tokens = row.new_token_ids[:num_tokens]
        self.num_cached_tokens = row.num_cached_tokens
        self.token_ids += tokens
        self.text += text
        if logprobs is not None:
            logprobs = logprobs[:num_tokens]
            self.logprobs += logprobs
        matcher = self.wanted.matcher
        if reason is None and matcher is not None and matcher.error:
            reason = FinishReason.ERROR
        return Chunk(row.request_id, tokens, text, reason, logprobs)

    def complete(self, reason: FinishReason) -> Completion:
        """All of it, now that no more comes."""
        if reason is FinishReason.ABORT and self.detokenizer is not None:
            self.text += self._read_late() + self.detokenizer.finish()
        return Completion(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text=self.text,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=None if self.wanted.params.logprobs is None else self.logprobs,
        )

    def _read_tokens(self, row: OutputRow) -> tuple[str, int, FinishReason | None]:
        """The text of a row, how many of its tokens count, and whether it ends the request.

        No token counts behind a stop string, and a stop token is no text, as in vLLM.
        """
        tokens, reason, detokenizer = row.new_token_ids, row.finish_reason, self.detokenizer
        if detokenizer is None:
            return "", len(tokens), reason
        if self.reads_late and reason is None:
            return "", len(tokens), None
        text, num_tokens = self._read_late(), len(tokens)
        for number, token in enumerate(tokens[:-1] if reason is FinishReason.STOP else tokens, 1):
            text += detokenizer.append(token)
            if detokenizer.stopped:
                num_tokens = number
                break
        if reason is not None:
            text += detokenizer.finish()
        return text, num_tokens, FinishReason.STOP if detokenizer.stopped else reason

    def _read_late(self) -> str:
        """The text of all tokens so far, if none of them was read; not to be asked for twice."""
        if not self.reads_late or self.detokenizer is None:
            return ""
        self.reads_late = False
        return "".join(map(self.detokenizer.append, self.token_ids))


Begin = Callable[[TokenIds], Output]
"""Makes the output to an input of a session; given what the session keeps before it."""


@dataclass(slots=True)
class Live:
    """A request that has not ended."""

    output: Output
    """Of a session: to its last input that was begun."""
    chunks: deque[Chunk] | None = None
    """For its stream, if it has one."""
    completions: deque[Completion] | None = None
    """Of a session: to the inputs that have been answered, for whoever receives them."""
    inputs: deque[Begin | None] = field(default_factory=deque)
    """Of a session: those that wait for its next stop. None: no more comes."""
    is_resting: bool = False
    """It is a session, and has said all that it will to what it was given."""

    @property
    def is_attended(self) -> bool:
        """Whether each of its tokens is looked at when it is delivered: for a stream or a session,
        for its text, or for log probabilities."""
        output = self.output
        is_heard = self.chunks is not None or self.completions is not None
        is_read = output.detokenizer is not None and not output.reads_late
        return is_heard or is_read or output.wanted.params.logprobs is not None

    @property
    def needs_host(self) -> str:
        """What a step must give the request beside its tokens; empty if tokens are enough."""
        wanted = self.output.wanted
        if wanted.matcher is not None:
            return "a grammar"
        return "" if wanted.params.logprobs is None else "log probabilities"

    def go_on(self) -> bool:
        """Begin with the next input behind a stop, or rest; False if no more comes.

        All tokens but the last are kept: that one was never computed.
        """
        if not self.inputs:
            self.is_resting = True
            return True
        begin = self.inputs.popleft()
        if begin is None:
            return False
        self.is_resting = False
        request = self.output.request
        self.output = begin((*request.prompt_token_ids, *self.output.token_ids[:-1]))
        return True


def begin_output(tokenizer: Tokenizer | None, request: Request, wanted: Wanted) -> Output:
    """The output to a prompt, before there is any of it."""
    detokenizer = None
    if tokenizer is not None:
        detokenizer = Detokenizer(tokenizer, wanted.params.stop, request.prompt_token_ids)
    if wanted.matcher is not None:
        wanted.matcher.read_prompt(request.prompt_token_ids)
    return Output(request, wanted, detokenizer)


def pick_drafts(
    proposals: Mapping[RequestId, TokenIds], live: Mapping[RequestId, Live]
) -> tuple[RowTokens, ...]:
    """Of the drafts of each live request those that its grammar accepts, up to the first other."""
    drafts = []
    for name, tokens in proposals.items():
        if name in live:
            matcher = live[name].output.wanted.matcher
            count = len(tokens) if matcher is None else matcher.count_accepted(tokens)
            drafts += [RowTokens(name, tokens[:count])] if count else []
    return tuple(drafts)
