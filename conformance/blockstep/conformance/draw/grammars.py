"""Grammars: small automata, whose texts are short, loop, or may go on for ever."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.draw.decisions import Draw
from blockstep.spec.vocabulary import Config, Grammar

FEW_TOKENS = 5


def draw_grammar(draw: Draw, vocabulary_size: int) -> Grammar:
    """Two to five states; each leads on, most often to the next one, or ends the text.

    Half of them lead back from the last one, so that texts are long. Few tokens are allowed, so
    most wrong drafts are forbidden; now and then all of them are allowed.
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
    """The config, now and then with a token that ends reasoning: grammars wait for it, or not."""
    if not draw.chance(45 if vocabulary_size <= FEW_TOKENS else 15):
        return config  # where tokens are many, it hardly ever comes
    return replace(
        config,
        reasoning_end_token_id=draw.integer(0, vocabulary_size - 1),
        enable_in_reasoning=draw.chance(25),
    )
