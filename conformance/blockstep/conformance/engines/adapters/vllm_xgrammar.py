"""XgrammarEngine: a vLLM release with a grammar backend of its own, which it builds itself.

    $ blockstep check --engine blockstep.conformance.engines.adapters.vllm_xgrammar:XgrammarEngine \
        --profile vllm-0.19.1 --with masks

Each token is one character, so an automaton over tokens is a right-linear grammar over strings:

    (((1, 1), (2, 0)), ((9, 2),), ())        s0 ::= "b" s1 | "c" s0        s1 ::= ""

What leads to a terminated state is the tokenizer's one end-of-sequence token, which the backend
allows where a text may end. So a grammar fits if that token leads there and nowhere else; others
are declined, and counted. The backend's masks, acceptance and termination are its own; the states
that a snapshot shows are those of the automaton along the tokens that it accepted.
"""

from __future__ import annotations

from typing import Any

# First, because it says what to do where vLLM cannot be imported.
from blockstep.conformance.engines.adapters.vllm import VllmEngine
from blockstep.conformance.engines.adapters.vllm_build import (
    RELEASE,
    VOCABULARY_SIZE,
    Hasher,
)

# isort: split
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.v1.request import Request as VllmRequest

from blockstep.conformance.engine import EngineFault
from blockstep.conformance.engines.adapters.vllm_grammars import Automaton, Compilation
from blockstep.spec import vocabulary as v

FIRST_CHARACTER = 0x4E00
END_TOKEN_ID = 2
"""The tokenizer's end-of-sequence token; small, so that drawn grammars have it."""
UNFIT = "a grammar that the backend cannot be given: its outputs do not end with the one end token"
STOPS = "a grammar with stop tokens: the backend takes each for the end of the output"
LOST_END = "a mask after a commit with tokens past the end token: the backend raises"
UNWAITED = "a grammar that allows everything: the backend has none"


class Watched(Automaton):
    """A grammar of the release, with the state of the automaton that it was compiled from.

    Raises:
        EngineFault: it accepted a token that the automaton does not allow.
    """

    def __init__(self, inner: Any, grammar: v.Grammar) -> None:
        super().__init__(grammar.edges)
        self.inner = inner

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance both grammars."""
        before = self.inner.num_processed_tokens
        is_accepted: bool = self.inner.accept_tokens(request_id, tokens)
        taken = tokens[: self.inner.num_processed_tokens - before]
        if not super().accept_tokens(request_id, taken):
            raise EngineFault(f"the grammar of {request_id!r} accepted {taken}, and should not")
        return is_accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the drafts that the release's grammar allows."""
        allowed: list[int] = self.inner.validate_tokens(tokens)
        return allowed

    def rollback(self, num_tokens: int) -> None:
        """Take both grammars back."""
        self.inner.rollback(num_tokens)
        super().rollback(num_tokens)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Fill a mask row from the release's grammar."""
        self.inner.fill_bitmask(bitmask, batch_index)

    def is_terminated(self) -> bool:
        """Return whether the release's grammar has terminated."""
        is_over: bool = self.inner.is_terminated()
        return is_over

    def reset(self) -> None:
        """Take both grammars back to their first states."""
        self.inner.reset()
        super().reset()


class XgrammarEngine(VllmEngine):
    """vLLM's scheduler with its grammars compiled by xgrammar."""

    def __init__(self, config: v.Config) -> None:
        super().__init__(config)
        plugs: Any = self.scheduler.structured_output_manager
        plugs.backend = plugs.backend_name = None
        plugs.tokenizer = build_tokenizer()

    def declines(self, event: v.Event) -> str | None:
        """Return why the backend cannot be given an event, or why no vLLM is; None if it can."""
        if isinstance(event, v.Submit | v.StreamingUpdate) and event.request.structured_output:
            grammar = event.request.grammar
            if grammar is None:
                return UNWAITED
            if not is_fit(grammar):
                return UNFIT
            stops = {*event.request.stop_token_ids, event.request.eos_token_id}
            if RELEASE.hands_stops_over and not stops <= {None, END_TOKEN_ID}:
                return STOPS
        if isinstance(event, v.GrammarBitmask) and self._is_lost(event.frame_id):
            return LOST_END
        return super().declines(event)

    def _is_lost(self, frame_id: v.FrameId) -> bool:
        """Return whether the matcher of a request in a frame has terminated, and its wrapper has
        not noticed."""
        frame = self.run.frames.get(frame_id)
        for name in frame.num_scheduled_tokens if frame is not None else ():
            request = self.scheduler.requests.get(name)
            if request is not None and request.use_structured_output:
                inner = request.structured_output_request.grammar.inner
                if inner.matcher.is_terminated() and not inner.is_terminated():
                    return True
        return False

    def _build(self, request: v.Request, hasher: Hasher | None) -> VllmRequest:
        built = super()._build(request, hasher)
        if request.grammar is not None:
            constraint = built.structured_output_request.params
            constraint.grammar = write_grammar(request.grammar)
            constraint._backend = "xgrammar"
        return built

    def _submit(self, request: v.Request) -> v.Ack:
        answer, grammar = super()._submit(request), request.grammar
        if grammar is not None:
            structured = self.scheduler.requests[request.request_id].structured_output_request
            pending: Compilation = structured._grammar
            compile_it = pending.work
            pending.work = lambda: Watched(compile_it(), grammar)
        return answer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one character for each token."""
    words = {write_token(token): token for token in range(VOCABULARY_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=write_token(0)))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=write_token(END_TOKEN_ID))


def write_token(token: v.TokenId) -> str:
    """Return the text of a token."""
    return chr(FIRST_CHARACTER + token)


def is_fit(grammar: v.Grammar) -> bool:
    """Return whether the end token, and no other token, leads to terminated states, and state 0 is
    not terminated."""
    ends = {state for state, edges in enumerate(grammar.edges) if not edges}
    return 0 not in ends and all(
        (following in ends) == (token == END_TOKEN_ID) and token < VOCABULARY_SIZE
        for edges in grammar.edges
        for token, following in edges
    )


def write_grammar(grammar: v.Grammar) -> str:
    """Return a grammar with one rule for each state that has edges; the end token ends the
    output."""
    rules = ["root ::= s0"]
    for state, edges in enumerate(grammar.edges):
        ways = [
            '""' if token == END_TOKEN_ID else f'"{write_token(token)}" s{following}'
            for token, following in edges
        ]
        if ways:
            rules.append(f"s{state} ::= {' | '.join(ways)}")
    return "\n".join(rules)
