"""Grammars behind vLLM's own interface: compiled when an event says so, by a backend of ours.

    Submit -----------> grammar_init -> executor.submit -> a future that is not finished
    GrammarReady -----> the future runs `compile_grammar` of the backend
    GrammarFailed ----> the future has an exception; the next plan looks at it
    GrammarBitmask ---> update_draft_token_ids_in_output, get_grammar_bitmask -> mask rows

The manager, its futures, its masks and its reasoning are the release's. Ours are what it has plugs
for: a backend whose grammars are automata over tokens, so that their state can be read, an executor
without threads, and a reasoning parser that knows one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

from blockstep.spec import vocabulary as v

BACKEND = "automata"
"""The name of our backend; a run has one."""
BITS = 32
"""Tokens in one word of a mask."""


@StructuredOutputGrammar.register
class AnyGrammar:
    """A compiled grammar that allows every token; it has no states."""

    state = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Accept every token."""
        del request_id, tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return all drafts: each is allowed."""
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """Do nothing: there are no states to go back to."""

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Allow every token in one row of the mask."""
        bitmask[batch_index].fill_(-1)

    def is_terminated(self) -> bool:
        """Return whether it allows no further token: never."""
        return False

    def reset(self) -> None:
        """Do nothing: there are no states."""


@StructuredOutputGrammar.register
class Automaton:
    """A compiled grammar that is an automaton over tokens: its states, and the current one.

    It behaves like the grammars of the release: it accepts tokens up to the first forbidden one and
    returns False there; tokens after a terminated state are ignored.
    """

    def __init__(self, edges: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.edges = [dict(edges_of_state) for edges_of_state in edges]
        self.past = [0]
        """The states from the first on; the last one is the current state."""

    @property
    def state(self) -> int:
        """Return the current state."""
        return self.past[-1]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance as far as the tokens are allowed; returns whether none was forbidden."""
        del request_id
        for token in tokens:
            if not self.edges[self.state]:
                break
            follows = self.edges[self.state].get(token)
            if follows is None:
                return False
            self.past.append(follows)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the longest allowed prefix of the tokens; the state does not change."""
        state, allowed = self.state, []
        for token in tokens:
            follows = self.edges[state].get(token)
            if follows is None:
                break
            state = follows
            allowed.append(token)
        return allowed

    def rollback(self, num_tokens: int) -> None:
        """Go back by this many tokens."""
        if num_tokens:
            del self.past[-num_tokens:]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Set one bit for each token of the vocabulary: whether it is allowed now."""
        words = [0] * bitmask.shape[1]
        for token in self.edges[self.state]:
            words[token // BITS] |= 1 << token % BITS
        signed = [word - (1 << BITS) if word >> (BITS - 1) else word for word in words]
        bitmask[batch_index] = torch.tensor(signed, dtype=torch.int32)

    def is_terminated(self) -> bool:
        """Return whether it allows no further token."""
        return not self.edges[self.state]

    def reset(self) -> None:
        """Go back to the first state."""
        del self.past[1:]


@StructuredOutputBackend.register
class AutomatonBackend:
    """Compiles automata from the output of `describe_grammar`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, **_keywords: Any
    ) -> StructuredOutputGrammar:
        """Return the automaton of an output of `describe_grammar`."""
        del request_type
        edges = json.loads(grammar_spec)
        return AnyGrammar() if edges is None else Automaton(edges)

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        """Return a mask of this many rows that allows every token."""
        num_words = -(-self.vocab_size // BITS)
        return torch.full((max_num_seqs, num_words), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Do nothing: the backend keeps nothing open."""


def describe_grammar(grammar: v.Grammar | None) -> str:
    """Return a grammar as text; None stands for a grammar that allows every token."""
    return json.dumps(grammar and grammar.edges)


class Compilation(Future[Any]):
    """A future whose grammar is compiled when an event says so, not by a thread in the
    background.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work

    def finish(self) -> None:
        """Compile the grammar now."""
        self.set_result(self.work())

    def result(self, timeout: float | None = None) -> Any:
        """Return what was compiled.

        Does not wait: no time passes in a run.

        Raises:
            TimeoutError: the grammar is not compiled yet.
        """
        if not self.done():
            raise TimeoutError
        return super().result(timeout)


class EventExecutor:
    """An executor that takes work and does not start it: events start it."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Compilation:
        """Return a future of `function(*args)`."""
        return Compilation(lambda: function(*args))


class EndOfReasoning:
    """A reasoning parser that knows one token: the one that ends reasoning (`ReasoningParser`)."""

    def __init__(self, token_id: v.TokenId) -> None:
        self.token_id = token_id

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the token is in a text."""
        return self.token_id in input_ids

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """Return whether the token is among the latest tokens."""
        del input_ids
        return self.token_id in delta_ids


def begin_compilation(
    manager: StructuredOutputManager, request: Any, end_token_id: v.TokenId | None
) -> None:
    """Do what front end and engine do with a new request before the scheduler sees it."""
    structured = request.structured_output_request
    if structured is not None and end_token_id is not None:
        structured.reasoning_ended = end_token_id in request.prompt_token_ids
    manager.grammar_init(request)


def finish_compilation(request: Any) -> None:
    """Compile the grammar of a request now, as a thread of the release would have done before."""
    pending = request.structured_output_request._grammar
    if isinstance(pending, Compilation) and not pending.done():
        pending.finish()


def fail_compilation(request: Any) -> None:
    """Make the compilation of a grammar fail, as a thread of the release would have found
    before.
    """
    pending = request.structured_output_request._grammar
    if isinstance(pending, Compilation) and not pending.done():
        pending.set_exception(ValueError(f"the grammar of {request.request_id!r} is none"))


def build_manager(vllm_config: Any, config: v.Config) -> StructuredOutputManager:
    """Return the release's grammar manager with this module's backend, executor and parser."""
    manager = StructuredOutputManager(vllm_config)
    plugs: Any = manager
    # A tokenizer would make a pool of threads and one of the backends; we have none.
    plugs.executor = EventExecutor()
    plugs.tokenizer = None
    plugs.backend = AutomatonBackend(vllm_config.model_config.get_vocab_size())
    plugs.backend_name = BACKEND
    end = config.reasoning_end_token_id
    if end is not None:
        # Older releases have one for all requests, newer ones make one for each.
        plugs.reasoner = EndOfReasoning(end)
        plugs.reasoner_cls = lambda tokenizer: EndOfReasoning(end)  # noqa: ARG005
    plugs.enable_in_reasoning = config.enable_in_reasoning
    return manager


def read_allowed(words: list[int]) -> v.TokenIds | None:
    """Return the tokens whose bits are set; None if all are."""
    if all(word == -1 for word in words):
        return None
    return tuple(
        index * BITS + bit
        for index, word in enumerate(words)
        if word
        for bit in range(BITS)
        if word >> bit & 1
    )
