"""Encoder: a cache of encoded multimodal items, and the compute that fills it.

`cache` is the state machine; `claims` holds items for the rows of a step.
"""

from __future__ import annotations

from typing import Final

from blockstep.spec.copies import replace
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.state import State
from blockstep.spec.features.encoder.cache import (
    ENCODER,
    count_free,
    count_freeable,
    create_encoder,
    free_items,
)
from blockstep.spec.features.encoder.claims import (
    let_go_of_items,
    limit_to_items,
    process_encoder_beginning,
    process_items_missing,
    process_items_of_victim,
    process_items_read,
    process_items_refused,
    process_items_taken,
    tell_items,
)
from blockstep.spec.features.sessions import UPDATES
from blockstep.spec.vocabulary import Ack, Config, Rejected, Request, refuse_other_size


def has_encoder(config: Config) -> bool:
    """Whether there is an encoder cache. Source: vLLM 0.19.1 `EncoderCacheManager`; P22."""
    return config.encoder_cache_size > 0


def get_state_with_encoder(state: State) -> State:
    """Return the state before the first event with an empty cache. Source: P22."""
    return ENCODER.put(state, create_encoder(state.config))


# Events.


def process_encoder_reset(state: State) -> tuple[State, Ack]:
    """Forget every encoded item, also those in use: chunks that read one have it encoded again.

    A worker forgets them after the frames in flight, and each of those finds what it reads. KV that
    was computed from items stays, and so do the items that a connector has. Source: vLLM 0.19.1
    `reset_encoder_cache`; P25.
    """
    offered = ENCODER.of(state).offered
    return ENCODER.put(state, replace(create_encoder(state.config), offered=offered)), Ack()


def process_encoder_offer(state: State, identifiers: tuple[str, ...]) -> tuple[State, Ack]:
    """Set the encoded items that a connector has.

    An encoder-decoder model loads none: a step encodes what it reads. Upstream loads them, and
    takes no cross-attention blocks for them. Source: vLLM 0.19.1 `has_cache_item`; P8, P22.
    """
    encoder = ENCODER.of(state)
    if not encoder.size or not encoder.is_shared:
        return state, Ack()
    offered = tuple(sorted({*identifiers}))
    return ENCODER.put(state, replace(encoder, offered=offered)), Ack()


def get_other_size_problem(state: State, request: Request) -> Rejected | None:
    """Return why its items conflict with others of the same identifier, or None.

    One identifier has one content. If it had two sizes, requests that share a cache entry would
    read another item's embeddings. Sizes are known from the cache, and from unfinished requests.
    Upstream accepts the request, and fails later. Source: vLLM 0.33.0 `check_and_update_cache`; P6,
    P22.
    """
    if not request.items:
        return None
    entries = ENCODER.of(state).entries
    sizes = {identifier: entries[identifier].num_embeds for identifier in sorted(entries)}
    for request_id in sorted(state.requests):
        other = state.requests[request_id]
        for asked in (other.request, *UPDATES.of(other)):
            sizes |= {item.identifier: item.num_embeds for item in asked.items}
    for item in request.items:
        if sizes.get(item.identifier, item.num_embeds) != item.num_embeds:
            return refuse_other_size(request, item, sizes[item.identifier])
    return None


# Every state.


def is_encoder_cache_exact(state: State) -> bool:
    """The encoder cache is within its size, and exactly the entries without holders are freeable.

    Between two steps nothing is planned. Source: vLLM 0.19.1 `EncoderCacheManager`; P9, P22.
    """
    encoder = ENCODER.of(state)
    unheld = [name for name in sorted(encoder.entries) if not encoder.entries[name].holders]
    return (
        0 <= count_free(encoder) <= count_freeable(encoder) <= encoder.size
        and sorted(encoder.freeable) == unheld
        and (encoder.budget, encoder.planned, encoder.evicted) == (0, (), ())
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


FEATURE: Final = Feature(
    "encoder",
    has_encoder,
    Hooks(
        creates=(get_state_with_encoder,),
        rejects=(get_other_size_problem,),
        limits=(limit_to_items,),
        shortages=(process_items_missing,),
        refusals=(process_items_refused,),
        grants=(process_items_taken,),
        begins=(process_encoder_beginning,),
        victims=(process_items_of_victim,),
        fields=(tell_items,),
        sent=(process_items_read,),
        leaves=(let_go_of_items,),
    ),
    invariants=(
        is_encoder_cache_exact,
        is_every_held_item_needed,
    ),
)
