"""Grammars: small automata, whose outputs are short, loop, or may never end."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.spec.vocabulary import Config, Grammar

FEW_TOKENS = 5


def draw_grammar(draw: Draw, vocabulary_size: int) -> Grammar:
    """Draw two to five states; each leads to another one, most often the next, or terminates.

    Half of the grammars lead back from the last state, so that outputs are long. Few tokens are
    allowed, so most wrong drafts are forbidden; sometimes all are allowed.
    """
    num_states, is_loop = draw.integer(2, 5), draw.chance(50)
    states: list[tuple[tuple[int, int], ...]] = []
    for state in range(num_states):
        if state == num_states - 1 and not is_loop:
            states.append(())  # terminated
            continue
        most = vocabulary_size if draw.chance(15) else min(3, vocabulary_size)
        tokens = {
            draw.integer(0, vocabulary_size - 1) for _ in range(draw.integer(1, min(most, 8)))
        }
        edges = []
        for token in sorted(tokens):
            following = (state + 1) % num_states
            if draw.chance(20):
                following = draw.integer(0, num_states - 1)
            edges.append((token, following))
        states.append(tuple(edges))
    return Grammar(tuple(states))


def draw_reasoning(config: Config, draw: Draw, vocabulary_size: int) -> Config:
    """Return the config, sometimes with a token that ends reasoning; grammars may wait for it."""
    if not draw.chance(45 if vocabulary_size <= FEW_TOKENS else 15):
        return config  # with many tokens it is hardly ever sampled
    return replace(
        config,
        reasoning_end_token_id=draw.integer(0, vocabulary_size - 1),
        enable_in_reasoning=draw.chance(25),
    )
