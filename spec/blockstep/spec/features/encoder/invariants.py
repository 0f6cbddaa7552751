"""Invariants of the encoder: what holds of its cache in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from blockstep.spec.core.state import State
from blockstep.spec.features.encoder.cache import ENCODER, count_free, count_freeable, free_items


def is_encoder_cache_exact(state: State) -> bool:
    """The encoder cache is within its size, and exactly the entries without holders are freeable.

    Between two steps nothing is planned. Source: vLLM 0.19.1 `EncoderCacheManager`; P9, P22.
    """
    encoder, budget = ENCODER.of(state), state.config.encoder_compute_budget
    unheld = [name for name in sorted(encoder.entries) if not encoder.entries[name].holders]
    return (
        0 <= count_free(encoder) <= count_freeable(encoder) <= encoder.size
        and sorted(encoder.freeable) == unheld
        and (encoder.budget, encoder.planned, encoder.evicted) == (budget, (), ())
        and not (encoder.entries if not encoder.is_shared else encoder.freed)
    )


def is_every_held_item_needed(state: State) -> bool:
    """An entry is held only by occurrences of its item that a running request has not read yet.

    An item that `free_items` would release has been read. Source: P7, P22.
    """
    encoder = ENCODER.of(state)
    for identifier, entry in sorted(encoder.entries.items()):
        for name, index in entry.holders:
            if name not in state.running:
                return False
            request = state.requests[name]
            left = state.rules[free_items](encoder, request.request, request.num_computed_tokens)
            if request.request.items[index].identifier != identifier:
                return False
            if (name, index) not in left.entries[identifier].holders:
                return False
    return True


INVARIANTS: Final[tuple[Callable[[State], bool], ...]] = (
    is_encoder_cache_exact,
    is_every_held_item_needed,
)
