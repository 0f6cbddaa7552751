"""Invariants of structured output: what holds of grammars in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from blockstep.spec.core.requests import list_rows_in_flight
from blockstep.spec.core.speculation import get_verifiable_drafts
from blockstep.spec.core.state import State
from blockstep.spec.features.structured_output.grammar import (
    GRAMMAR,
    get_first_state,
    get_next_state,
    get_state_after,
    get_states,
)
from blockstep.spec.vocabulary import DRAFT_PLACEHOLDER


def is_every_grammar_in_step(state: State) -> bool:
    """A grammar state follows from the outputs, and accepts the drafts that follow. Source: P23.

    These are the drafts that are known: stored for the next step, or in a frame that can be
    committed next.
    """
    config = state.config
    for _, request in sorted(state.requests.items()):
        grammar, asked = request.request.grammar, request.request
        if grammar is None:
            continue
        first = get_first_state(config, asked.prompt_token_ids)
        outputs = request.output_token_ids
        if get_state_after(config, grammar, first, outputs, get_next_state) != GRAMMAR.of(request):
            return False
        rows = list_rows_in_flight(state.frames, request.request_id)
        mine = [state.rules[get_verifiable_drafts](row) for row in rows if row.samples]
        for drafts in (request.spec_token_ids, *mine[:1]):
            known = tuple([token for token in drafts if token != DRAFT_PLACEHOLDER])
            states = get_states(config, grammar, GRAMMAR.of(request), known, get_next_state)
            if len(states) <= len(known):
                return False
    return True


INVARIANTS: Final[tuple[Callable[[State], bool], ...]] = (is_every_grammar_in_step,)
