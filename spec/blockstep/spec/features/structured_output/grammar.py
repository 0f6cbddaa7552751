"""Grammar: an automaton over tokens, separate from the scheduler (architecture D11).

A token sequence with a grammar is in one of its states, or the model still reasons, and then the
grammar does not apply yet. The functions return where a token leads, which tokens may follow, and
how many of some drafts are accepted. They know neither requests nor frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from blockstep.spec.core.parts import Part
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, Config, Grammar, TokenId, TokenIds


@dataclass(frozen=True, slots=True)
class GrammarState:
    """The grammar state of a token sequence."""

    state: int = 0
    """State of the automaton."""
    reasoning_ended: bool = False


GRAMMAR: Final = Part("grammar", GrammarState())
"""The state of a request's grammar after its outputs, if it has one (P23)."""
Follow: TypeAlias = Callable[[Config, Grammar, GrammarState, TokenId], GrammarState | None]
"""Returns the grammar state after one more token; None if the grammar does not accept it."""


def holds(config: Config, current: GrammarState) -> bool:
    """Whether the grammar applies: not while the model reasons, unless `enable_in_reasoning`.

    Source: vLLM 0.19.1 `should_fill_bitmask`; P23.
    """
    has_reasoning = config.reasoning_end_token_id is not None and not config.enable_in_reasoning
    return current.reasoning_ended or not has_reasoning


def get_first_state(config: Config, prompt: TokenIds) -> GrammarState:
    """Return the grammar state before any output: the prompt may have ended the reasoning.

    Source: vLLM 0.19.1 `should_fill_bitmask`; P23.
    """
    marker = config.reasoning_end_token_id
    return GrammarState(
        0, marker is not None and not config.enable_in_reasoning and marker in prompt
    )


def is_terminated(grammar: Grammar, state: int) -> bool:
    """Whether the output is complete: it accepts no draft, and forbids nothing.

    Source: vLLM 0.19.1 `StructuredOutputGrammar.is_terminated`; P23.
    """
    return not grammar.edges[state]


def get_allowed(config: Config, grammar: Grammar, current: GrammarState) -> TokenIds | None:
    """Return the tokens that may follow, sorted; None if all may.

    Source: vLLM 0.19.1 `fill_bitmask`; P23.
    """
    if not holds(config, current) or is_terminated(grammar, current.state):
        return None
    return tuple([token for token, _ in grammar.edges[current.state]])


def get_next_state(
    config: Config, grammar: Grammar, current: GrammarState, token: TokenId
) -> GrammarState | None:
    """Return the grammar state after a token; None if the grammar does not accept it.

    The token that ends the reasoning is the last unconstrained one: the grammar applies after it,
    also within one step. Source: upstream #44006; P23.
    """
    if not holds(config, current):
        return GrammarState(current.state, token == config.reasoning_end_token_id)
    for allowed, state in grammar.edges[current.state]:
        if allowed == token:
            return GrammarState(state, current.reasoning_ended)
    return None


def get_states(
    config: Config, grammar: Grammar, current: GrammarState, drafts: TokenIds, follow: Follow
) -> tuple[GrammarState, ...]:
    """Return the grammar state before each draft, and after the last accepted one.

    The longest accepted prefix has one draft fewer than there are states. A placeholder is not
    accepted. Source: vLLM 0.19.1 `validate_tokens`; P23, P24.
    """
    found = [current]
    for token in drafts:
        after = None if token == DRAFT_PLACEHOLDER else follow(config, grammar, found[-1], token)
        if after is None:
            break
        found.append(after)
    return tuple(found)


def get_state_after(
    config: Config, grammar: Grammar, current: GrammarState, tokens: TokenIds, follow: Follow
) -> GrammarState | None:
    """Return the grammar state after sampled tokens; None if one of them is forbidden.

    A complete output keeps its state, whatever follows. Source: vLLM 0.19.1 `accept_tokens`; P23.
    """
    for token in tokens:
        if holds(config, current) and is_terminated(grammar, current.state):
            return current
        after = follow(config, grammar, current, token)
        if after is None:
            return None
        current = after
    return current


def get_mask(
    config: Config, grammar: Grammar, current: GrammarState, drafts: TokenIds, follow: Follow
) -> tuple[TokenIds | None, ...]:
    """Return the tokens allowed at the position of each draft, and after the last.

        drafts                      a     b    -1    -1
        allowed     may follow      .     a     b     b     b

    After a placeholder draft nothing is sampled, because it cannot be accepted. So that no position
    is unmasked, the mask before it is repeated. Source: vLLM 0.19.1 `grammar_bitmask`; P24.
    """
    states = get_states(config, grammar, current, drafts, follow)
    allowed = [get_allowed(config, grammar, found) for found in states]
    return (*allowed, *allowed[-1:] * (len(drafts) + 1 - len(states)))
