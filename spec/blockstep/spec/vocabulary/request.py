"""Request: what a client asks for, and names for its status."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from blockstep.spec.copies import wide_dataclass

RequestId: TypeAlias = str
TokenId: TypeAlias = int
BlockId: TypeAlias = int
FrameId: TypeAlias = int
TokenIds: TypeAlias = tuple[int, ...]
BlockTables: TypeAlias = tuple[tuple[int, ...], ...]
"""One block table per KV group, blocks in token order."""

NULL_BLOCK: BlockId = 0
"""The id that a table has instead of a block; never queued, never freed, never written (P1)."""

DRAFT_PLACEHOLDER: TokenId = -1
"""Placeholder for a draft that only the worker knows (asynchronous scheduling)."""


class Status(StrEnum):
    """Status of an unfinished request (seed 001, "RequestStatus Lifecycle")."""

    WAITING = "waiting"
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = "waiting_for_structured_output_grammar"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    WAITING_FOR_STREAMING_REQ = "waiting_for_streaming_req"
    RUNNING = "running"
    PREEMPTED = "preempted"


class FinishReason(StrEnum):
    """Why a request finished; each finishes for exactly one reason (P13)."""

    STOP = "stop"
    """The end-of-sequence token or one of the stop tokens was sampled."""
    LENGTH = "length"
    """It reached `max_tokens`, or `max_model_len`."""
    REPETITION = "repetition"
    """The end of its output repeats a pattern as often as `repetition_detection` says."""
    ABORT = "abort"
    """The client aborted it."""
    ERROR = "error"
    """It cannot be served: its grammar could not be compiled, say."""


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Stop when the output ends with `min_count` copies of one pattern.

    A pattern is `min_pattern_size` to `max_pattern_size` tokens long.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


@dataclass(frozen=True, slots=True)
class Grammar:
    """Which tokens may follow an output: an automaton over tokens, in state 0 before any output.

    A state without edges is *terminated*: the output is complete. It accepts no draft, but it
    forbids nothing: its mask allows all tokens, and a sampled token does not change the state. An
    end-of-sequence token has edges like other tokens.
    """

    edges: tuple[tuple[tuple[TokenId, int], ...], ...]
    """The (token, next state) of each token that is allowed, by state, sorted by token."""


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image or a sound whose placeholder tokens are in the prompt."""

    identifier: str
    """Identity of the content: equal identifiers mean equal content."""
    offset: int
    """Position of its first placeholder token in the prompt; 0 in an encoder-decoder model, in
    which it is not part of the prompt."""
    length: int
    """Number of placeholder tokens."""
    is_embed: tuple[bool, ...] = ()
    """Which of them represent an embedding of the encoder, at least one; the others are tokens in
    between. Empty: all."""

    @property
    def num_embeds(self) -> int:
        """Number of embeddings that the encoder computes for it."""
        return sum(self.is_embed) if self.is_embed else self.length


SESSION_FIELDS: Final = (
    "priority",
    "adapter",
    "cache_salt",
    "skip_reading_prefix_cache",
    "structured_output",
    "grammar",
    "job_id",
    "is_last_step",
)
"""Fields that a session keeps from its submission.

Further input (`StreamingUpdate`) leaves them out or repeats them. Any other value is rejected
(`bad_request`): otherwise it would be silently ignored, even the isolation by a salt."""


@wide_dataclass(frozen=True, slots=True)
class Request:
    """A request as a client submits it.

    It does not change after Submit, except for a session's input.
    """

    request_id: RequestId
    prompt_token_ids: TokenIds
    max_tokens: int = 16
    """Maximum of output tokens."""
    min_tokens: int = 0
    """Output tokens before eos, a stop token or repetition may end it; length limits always apply.
    """
    eos_token_id: TokenId | None = None
    """None: no end-of-sequence token ends it."""
    stop_token_ids: TokenIds = ()
    repetition_detection: RepetitionDetection | None = None
    priority: int = 0
    """Lower runs first; used under `Policy.PRIORITY` only."""
    arrival_time: int = 0
    """Ticks; the tie-breaker after priority. The spec reads no clock: time is a value."""
    adapter: str | None = None
    """Name of its LoRA adapter: part of the identity of every block."""
    cache_salt: str | None = None
    """Separates prefix-cache namespaces: part of the identity of the first block."""
    items: tuple[MultiModalItem, ...] = ()
    """Sorted by offset, not overlapping."""
    prompt_embeds: TokenIds = ()
    """Number of the embedding at each prompt position, if the client sends embeddings instead of
    tokens: equal numbers mean equal vectors. Empty: the model embeds the tokens itself."""
    skip_reading_prefix_cache: bool = False
    """True: it takes no prefix hit, and the store is not asked about it (it needs prompt logprobs,
    say)."""
    resumable: bool = False
    """True: it is a session, which a stop does not end. It continues with further input (event
    `StreamingUpdate`), until the client ends the input."""
    structured_output: bool = False
    """True: it waits until its grammar is compiled (event `GrammarReady`)."""
    grammar: Grammar | None = None
    """Only with `structured_output`. None: every token is allowed, and it has no rows in masks."""
    job_id: str | None = None
    """The agent job whose turn it is: an agent that calls a tool, say, and continues with the
    tool's output. Used under `Policy.CONTINUUM` only; None: it is not a turn of a job."""
    is_last_step: bool = False
    """Whether it is the last turn of its job."""
