"""Grammar: an automaton over tokens beside the scheduler (architecture D11).

A text of which a grammar is asked for stands somewhere in it, or still reasons, and then nothing
holds it yet. What is asked of it: where a token leads, which tokens may follow, and how many of
some drafts it accepts. Nobody here knows a request or a frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER, Config, Grammar, TokenId, TokenIds


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a text stands."""

    state: int = 0
    """Of its grammar."""
    reasoning_ended: bool = False


Follow: TypeAlias = Callable[[Config, Grammar, Stand, TokenId], Stand | None]
"""Where a text stands behind one more token; None if its grammar does not accept that."""


def holds(config: Config, stand: Stand) -> bool:
    """Whether the grammar holds what follows: not while it reasons, but where that is wanted.

    Source: vLLM 0.19.1 `should_fill_bitmask`; P23.
    """
    has_reasoning = config.reasoning_end_token_id is not None and not config.enable_in_reasoning
    return stand.reasoning_ended or not has_reasoning


def get_first_stand(config: Config, prompt: TokenIds) -> Stand:
    """Where a text without outputs stands: the prompt may have ended the reasoning.

    Source: vLLM 0.19.1 `should_fill_bitmask`; P23.
    """
    marker = config.reasoning_end_token_id
    return Stand(0, marker is not None and not config.enable_in_reasoning and marker in prompt)


def is_terminated(grammar: Grammar, state: int) -> bool:
    """Whether the text is complete: it accepts no token, and constrains nothing.

    Source: vLLM 0.19.1 `StructuredOutputGrammar.is_terminated`; P23.
    """
    return not grammar.edges[state]


def get_allowed(config: Config, grammar: Grammar, stand: Stand) -> TokenIds | None:
    """The tokens that may follow, sorted; None if all may.

    Source: vLLM 0.19.1 `fill_bitmask`; P23.
    """
    if not holds(config, stand) or is_terminated(grammar, stand.state):
        return None
    return tuple([token for token, _ in grammar.edges[stand.state]])


def get_next_stand(config: Config, grammar: Grammar, stand: Stand, token: TokenId) -> Stand | None:
    """Where a token leads; None if the grammar does not accept it.

    What ends the reasoning is the last token that nothing holds: the grammar begins behind it, also
    within one step, where upstream lets the rest of that step go by. Source: P23.
    """
    if not holds(config, stand):
        return Stand(stand.state, token == config.reasoning_end_token_id)
    for allowed, state in grammar.edges[stand.state]:
        if allowed == token:
            return Stand(state, stand.reasoning_ended)
    return None


def get_stands(
    config: Config, grammar: Grammar, stand: Stand, drafts: TokenIds, follow: Follow
) -> tuple[Stand, ...]:
    """Where the text stands before each draft, and behind the last that is accepted.

    The longest accepted prefix has one draft fewer than there are stands. A placeholder is none.
    Source: vLLM 0.19.1 `validate_tokens`; P23, P24.
    """
    found = [stand]
    for token in drafts:
        after = None if token == DRAFT_PLACEHOLDER else follow(config, grammar, found[-1], token)
        if after is None:
            break
        found.append(after)
    return tuple(found)


def get_stand_behind(
    config: Config, grammar: Grammar, stand: Stand, tokens: TokenIds, follow: Follow
) -> Stand | None:
    """Where the text stands behind tokens that were sampled; None if one of them is forbidden.

    A complete text stays where it is, whatever follows. Source: vLLM 0.19.1 `accept_tokens`; P23.
    """
    for token in tokens:
        if holds(config, stand) and is_terminated(grammar, stand.state):
            return stand
        after = follow(config, grammar, stand, token)
        if after is None:
            return None
        stand = after
    return stand


def get_mask(
    config: Config,
    grammar: Grammar,
    stand: Stand,
    drafts: TokenIds,
    follow: Follow,
    masks_behind_placeholders: bool,
) -> tuple[TokenIds | None, ...]:
    """What may stand at the place of each draft, and behind the last.

        drafts                      a     b    -1    -1
        allowed     may follow      .     a     b     b     b

    Behind a draft that is a placeholder nothing is sampled, for nobody can accept that draft; so
    that nothing is unmasked there the mask before it is repeated, where upstream's is full.
    Source: vLLM 0.19.1 `grammar_bitmask`; P24.
    """
    stands = get_stands(config, grammar, stand, drafts, follow)
    allowed = [get_allowed(config, grammar, found) for found in stands]
    behind = allowed[-1] if masks_behind_placeholders else None
    return (*allowed, *[behind] * (len(drafts) + 1 - len(stands)))
