"""Request: what a client asks for, and the words for its life."""

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
"""One block table per KV-cache group, positions in order."""

NULL_BLOCK: BlockId = 0
"""The block that stands for "no block here"; never queued, never freed, never written (P1)."""

DRAFT_PLACEHOLDER: TokenId = -1
"""Stands for a draft that only the worker knows (asynchronous scheduling)."""


class Status(StrEnum):
    """Where an unfinished request stands (seed 001, "RequestStatus Lifecycle")."""

    WAITING = "waiting"
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = "waiting_for_structured_output_grammar"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    WAITING_FOR_STREAMING_REQ = "waiting_for_streaming_req"
    RUNNING = "running"
    PREEMPTED = "preempted"


class FinishReason(StrEnum):
    """Why a request ended; each ends for exactly one (P13)."""

    STOP = "stop"
    """Its end-of-sequence token or one of its stop tokens was sampled."""
    LENGTH = "length"
    """It reached `max_tokens`, or `max_model_len`."""
    REPETITION = "repetition"
    """The tail of its output repeats a pattern as often as it said it would not tolerate."""
    ABORT = "abort"
    """The client gave up."""
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
    """Which tokens may follow which output: an automaton over tokens, in state 0 before any.

    A state without edges is *terminated*: the text is complete there. It accepts no token, so no
    draft, and yet constrains nothing: its mask is full, and whatever is sampled leaves it as it is.
    An end-of-sequence token has edges like others.
    """

    edges: tuple[tuple[tuple[TokenId, int], ...], ...]
    """By state: (token, next state) for each token that is allowed, sorted by token."""


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """An image or a sound whose placeholder tokens lie in the prompt."""

    identifier: str
    """Names the content: equal identifiers mean equal content."""
    offset: int
    """Position of its first placeholder token in the prompt; 0 in an encoder-decoder model, where
    it stands beside the prompt."""
    length: int
    """Placeholder tokens."""
    is_embed: tuple[bool, ...] = ()
    """Which of them stand for an embedding that the encoder makes, one or more; the others are
    tokens between. Empty: all."""

    @property
    def num_embeds(self) -> int:
        """Embeddings that the encoder makes of it."""
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
"""Fields of a request that a session has from its submission for good.

A chunk of further input (`StreamingUpdate`) leaves them out or repeats them. Any other value is
refused (`bad_request`): it would be dropped in silence, isolation by a salt included.
"""


@wide_dataclass(frozen=True, slots=True)
class Request:
    """What a client submits. Nothing in it changes after Submit, but for a session's input."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    max_tokens: int = 16
    """Output tokens, at most."""
    min_tokens: int = 0
    """Output tokens before eos, a stop token or repetition may end it; length caps always do."""
    eos_token_id: TokenId | None = None
    """None: an end-of-sequence token does not end it."""
    stop_token_ids: TokenIds = ()
    repetition_detection: RepetitionDetection | None = None
    priority: int = 0
    """Lower runs first; matters under `Policy.PRIORITY` only."""
    arrival_time: int = 0
    """Ticks; the tie-breaker after priority. The spec reads no clock: time is a value."""
    adapter: str | None = None
    """Name of its LoRA adapter: part of the identity of every block."""
    cache_salt: str | None = None
    """Separates prefix-cache namespaces: part of the identity of the first block."""
    items: tuple[MultiModalItem, ...] = ()
    """Sorted by offset, not overlapping."""
    prompt_embeds: TokenIds = ()
    """Which embedding stands at each prompt position, where the client sends embeddings instead of
    tokens: equal numbers mean equal vectors. Empty: the model embeds the tokens itself."""
    skip_reading_prefix_cache: bool = False
    """True: it never takes a prefix hit, nor is a store asked about it (its prompt logprobs are
    wanted, say)."""
    resumable: bool = False
    """True: it is a session, which a stop does not end. It goes on with further input (event
    `StreamingUpdate`), until the client says that there is no more."""
    structured_output: bool = False
    """True: it waits until its grammar is compiled (event `GrammarReady`)."""
    grammar: Grammar | None = None
    """Only with `structured_output`. None: every token is allowed, and no mask has rows of it."""
    job_id: str | None = None
    """The job of which it is a turn: an agent that calls a tool, say, and comes back with what the
    tool said. Says something under `Policy.CONTINUUM` only; None: it is nobody's turn."""
    is_last_step: bool = False
    """Whether no further turn of its job is to come."""
