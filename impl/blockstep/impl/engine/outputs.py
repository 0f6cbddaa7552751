"""Outputs: the tokens and text of a request, step by step, and its completion.

A session has an output for each of its inputs; between two of them it is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import msgspec
from tokenizers import Tokenizer

from blockstep.impl.array_plans import ArrayOutputs
from blockstep.impl.engine.detokenizer import Detokenizer
from blockstep.impl.engine.rows import Wanted
from blockstep.impl.engine.runner import Logprobs
from blockstep.spec.vocabulary import (
    FinishReason,
    OutputRow,
    Request,
    RequestId,
    RowTokens,
    TokenIds,
)


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The tokens and text that one request gained in one step."""

    request_id: RequestId
    token_ids: TokenIds
    text: str = ""
    """"" without a tokenizer; may lag behind the tokens while a stop string is possible. For
    `LLM.generate`, the last chunk of a prompt has the whole text."""
    finish_reason: FinishReason | None = None
    """Set in the last chunk of a request, or of the answer to one input of a session."""
    logprobs: Logprobs | None = None


class StepChunks(Sequence[Chunk]):
    """The chunks of a step whose outputs are arrays; chunk objects are made when one is read.

    Args:
        outputs: the step's outputs; each row has one token.
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
    """A finished request, or the answer to one input of a session."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    """The prompt; of a session: all tokens that it kept, then the input."""
    token_ids: TokenIds
    """Output tokens. With a stop string they may reach past `text`, to the end of its last token.
    """
    text: str
    finish_reason: FinishReason
    num_cached_tokens: int
    """Prompt tokens from the prefix cache; of a session, at its first admission."""
    logprobs: Logprobs | None = None
    """Per output token, if asked for: log probabilities by token id, including the sampled one."""


@dataclass(slots=True)
class Output:
    """The output to one prompt so far."""

    request: Request
    wanted: Wanted
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: Logprobs = field(default_factory=list)
    num_cached_tokens: int = 0
    reads_late: bool = False
    """Whether its text is decoded only when it ends: it has no stop string and no stream."""

    def catch_up(self, token_ids: TokenIds, num_cached_tokens: int) -> None:
        """Append tokens that were delivered in arrays, without an `OutputRow`."""
        self.token_ids += token_ids
        self.num_cached_tokens = num_cached_tokens

    def take(self, row: OutputRow, logprobs: Logprobs | None) -> Chunk:
        """Append a step's tokens; return the chunk, with a finish reason if the request ends
        here."""
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
        """Return the completion, when no more tokens are delivered."""
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
        """Return the text of a row, how many of its tokens count, and the finish reason.

        No token counts after a stop string, and a stop token is not part of the text, as in vLLM.
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
        """Return the text of all tokens so far if none was decoded yet; to be called once."""
        if not self.reads_late or self.detokenizer is None:
            return ""
        self.reads_late = False
        return "".join(map(self.detokenizer.append, self.token_ids))


Begin = Callable[[TokenIds], Output]
"""Makes the output to an input of a session, from the tokens that the session keeps before it."""


@dataclass(slots=True)
class Live:
    """A request that has not finished."""

    output: Output
    """The output; of a session: to its last input that was started."""
    chunks: deque[Chunk] | None = None
    """Chunks for its stream, if it has one."""
    completions: deque[Completion] | None = None
    """Completed answers of a session that were not read yet."""
    inputs: deque[Begin | None] = field(default_factory=deque)
    """Further inputs of a session. None: the end of input."""
    is_resting: bool = False
    """Whether it is a session that has answered all its inputs and waits for more."""

    @property
    def is_attended(self) -> bool:
        """Whether each of its tokens is read when it is delivered.

        That is so for a stream or a session, for its text, or for log probabilities.
        """
        output = self.output
        has_reader = self.chunks is not None or self.completions is not None
        is_read = output.detokenizer is not None and not output.reads_late
        return has_reader or is_read or output.wanted.params.logprobs is not None

    @property
    def needs_host(self) -> str:
        """The thing that the host must provide in each step ("a grammar", say); "" if tokens are
        enough."""
        wanted = self.output.wanted
        if wanted.matcher is not None:
            return "a grammar"
        return "" if wanted.params.logprobs is None else "log probabilities"

    def complete(self, reason: FinishReason) -> Completion:
        """Return the completion; of an aborted request, add the last chunk of its stream, too."""
        num_sent = len(self.output.text)
        completion = self.output.complete(reason)
        if reason is FinishReason.ABORT and self.chunks is not None:
            text = completion.text[num_sent:]
            self.chunks.append(Chunk(completion.request_id, (), text, reason))
        return completion

    def go_on(self) -> bool:
        """Start the next input after a stop, or become idle; return False at the end of input.

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
    """Return the empty output to a prompt."""
    detokenizer = None
    if tokenizer is not None:
        detokenizer = Detokenizer(tokenizer, wanted.params.stop, request.prompt_token_ids)
    if wanted.matcher is not None:
        wanted.matcher.read_prompt(request.prompt_token_ids)
    return Output(request, wanted, detokenizer)


def pick_drafts(
    proposals: Mapping[RequestId, TokenIds], live: Mapping[RequestId, Live]
) -> tuple[RowTokens, ...]:
    """Return the drafts of each live request, up to the first that its grammar does not accept."""
    drafts = []
    for name, tokens in proposals.items():
        if name in live:
            matcher = live[name].output.wanted.matcher
            count = len(tokens) if matcher is None else matcher.count_accepted(tokens)
            drafts += [RowTokens(name, tokens[:count])] if count else []
    return tuple(drafts)
