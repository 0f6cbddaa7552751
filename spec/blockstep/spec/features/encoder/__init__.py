"""Encoder: multimodal items, the compute that encodes them, and a cache of the results.

    | computed |  item  | text |  item: no room  |
               |---- the chunk ----|                 it ends before what cannot be read

`cache` is the state machine. Items are checked before a row has its blocks, and taken when it has
them. In between, other requests may be preempted, which only frees more room: items that were
available then still are, or can be encoded again.

There is no deadlock (P10): a chunk ends before an item that does not fit, and between two chunks a
request holds only the item that it is inside of. Only a draft head may need the next one, too; a
request that then gets no row holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from blockstep.spec.copies import replace
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Note
from blockstep.spec.core.requests import FrameRow, RequestState
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.encoder import cache
from blockstep.spec.features.encoder.cache import ENCODER, NO_ENCODER, Encoder
from blockstep.spec.features.encoder.invariants import INVARIANTS
from blockstep.spec.features.sessions import UPDATES
from blockstep.spec.vocabulary import (
    Ack,
    Config,
    EncoderEntry,
    EncoderInputs,
    EncoderOffer,
    EncoderReset,
    EncoderSnapshot,
    MultiModalItem,
    Plan,
    Rejected,
    Request,
    RequestId,
    refuse_other_size,
)


def has_encoder(config: Config) -> bool:
    """Whether there is an encoder cache. Source: vLLM 0.19.1 `EncoderCacheManager`; P22."""
    return config.encoder_cache_size > 0


def get_state_with_encoder(state: State) -> State:
    """Return the state with an empty cache. Source: vLLM 0.19.1 `EncoderCacheManager`; P22."""
    config = state.config
    size, budget = config.encoder_cache_size, config.encoder_compute_budget
    return ENCODER.put(state, Encoder(size, not config.is_encoder_decoder, budget=budget))


# Events.


def process_encoder_reset(state: State, _: EncoderReset) -> tuple[State, Ack]:
    """Forget every encoded item, also those in use: chunks that read one have it encoded again.

    A worker forgets them after the frames in flight, and each of those finds what it reads. KV that
    was computed from items stays, and so do the items that a connector has. Source: vLLM 0.19.1
    `reset_encoder_cache`; P25.
    """
    offered, state = ENCODER.of(state).offered, get_state_with_encoder(state)
    return ENCODER.put(state, replace(ENCODER.of(state), offered=offered)), Ack()


def process_encoder_offer(state: State, offer: EncoderOffer) -> tuple[State, Ack]:
    """Set the encoded items that a connector has.

    An encoder-decoder model loads none: a step encodes what it reads. Source: vLLM 0.19.1
    `has_cache_item`; P8, P22.
    """
    if not has_encoder(state.config) or state.config.is_encoder_decoder:
        return state, Ack()
    offered = tuple(sorted({*offer.identifiers}))
    return ENCODER.put(state, replace(ENCODER.of(state), offered=offered)), Ack()


def get_other_size_problem(state: State, request: Request) -> Rejected | None:
    """Return why its items conflict with others of the same identifier, or None.

    One identifier has one content. If it had two sizes, requests that share a cache entry would
    read another item's embeddings. Sizes are known from the cache, and from unfinished requests.
    Source: vLLM 0.33.0 `check_and_update_cache`; P6, P22.
    """
    entries = sorted(ENCODER.of(state).entries.items())
    sizes = {identifier: entry.num_embeds for identifier, entry in entries}
    for _, other in sorted(state.requests.items()):
        for asked in (other.request, *UPDATES.of(other)):
            sizes |= {item.identifier: item.num_embeds for item in asked.items}
    for item in request.items:
        if sizes.get(item.identifier, item.num_embeds) != item.num_embeds:
            return refuse_other_size(request, item, sizes[item.identifier])
    return None


# The items of a row.


class EncoderShare(NamedTuple):
    """The tokens that a row may have of those that it could have, and the items that these read."""

    num_tokens: int
    items: tuple[int, ...] = ()
    """Indices, ascending."""
    encoder: Encoder = NO_ENCODER
    """The encoder after the row, if it may read items."""


CLAIM: Final = Note("encoder_claim", EncoderShare(0))
"""The claim of the row that is being planned."""


class Chunk(NamedTuple):
    """A row of a request with items, before its last token is known."""

    state: State
    request: Request
    num_computed: int
    encoder: Encoder
    """The encoder before the row."""

    @property
    def is_whole(self) -> bool:
        """Whether it may not end inside an item."""
        config = self.state.config
        return config.disable_chunked_mm_input and not config.is_encoder_decoder

    def get_end(self, end: int) -> int:
        """Return where it ends if it could reach `end`."""
        get_end = self.state.rules[cache.compute_end_between_items]
        return get_end(self.request.items, self.num_computed, end) if self.is_whole else end

    def reads(self, item: MultiModalItem, num_new: int) -> bool:
        """Whether an embedding of the item is read if it has `num_new` tokens."""
        is_needed = self.state.rules[cache.is_item_needed]
        num_ahead = self.state.config.num_encoder_lookahead_tokens
        return is_needed(item, self.num_computed, num_new, num_ahead)


def limit_to_items(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
    """Return the tokens of a row before the first item without room; a request that gets none drops
    its items. Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P7, P15, P22.
    """
    asked, encoder, claim = request.request, ENCODER.of(step), EncoderShare(num_new)
    if num_new > 0 and asked.items and (encoder.is_shared or num_computed == 0):
        claim = get_claim(Chunk(step.state, asked, num_computed, encoder), num_new)
        if claim.num_tokens == 0:
            step.state.rules[process_items_missing](step, request)
    CLAIM.set(step, claim)
    return claim.num_tokens


def get_claim(chunk: Chunk, num_new: int) -> EncoderShare:
    """Return the items that a chunk of `num_new` tokens reads, and the tokens that it gets.

    The chunk ends before the first item that does not fit. With `disable_chunked_mm_input` it never
    ends inside an item. Encoder-decoder inputs are attended from position 0, so the first chunk is
    scheduled with all of them or not at all. Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`,
    `EncoderDecoderCacheManager`; upstream #52306; P9, P15, P22.
    """
    num_computed = chunk.num_computed
    num_new = chunk.get_end(num_computed + num_new) - num_computed
    claim = EncoderShare(num_new, (), chunk.encoder)
    num_ahead = chunk.state.config.num_encoder_lookahead_tokens
    for index, item in enumerate(chunk.request.items):
        end = num_computed + claim.num_tokens + num_ahead
        if claim.num_tokens == 0 or item.offset >= end:
            break
        if item.offset + item.length > num_computed:
            claim = chunk.state.rules[get_claim_at_item](chunk, index, claim)
    return claim


def get_claim_at_item(chunk: Chunk, index: int, claim: EncoderShare) -> EncoderShare:
    """Return the claim with the next item, if the chunk reads it; or a shorter one that ends before
    the item, if that is neither in the cache nor has room.

    Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P22.
    """
    encoder, rules, item = claim.encoder, chunk.state.rules, chunk.request.items[index]
    if not chunk.reads(item, claim.num_tokens):
        return claim
    if item.identifier not in encoder.entries and not rules[cache.has_room](encoder, item):
        return rules[get_shorter_claim](chunk, index, claim)
    encoder = rules[cache.take_item](encoder, chunk.request, index)
    return EncoderShare(claim.num_tokens, (*claim.items, index), encoder)


def get_shorter_claim(chunk: Chunk, index: int, claim: EncoderShare) -> EncoderShare:
    """Return the claim of a chunk that neither reads an item nor lets the draft head read it.

    If it would end inside another item that must be whole, a shorter chunk is tried. Source: vLLM
    0.19.1 `_try_schedule_encoder_inputs`; upstream #52306; P22.
    """
    num_computed, num_ahead = chunk.num_computed, chunk.state.config.num_encoder_lookahead_tokens
    num_new = cache.compute_end_before(chunk.request.items[index].offset, num_computed, num_ahead)
    if chunk.get_end(num_computed + num_new) < num_computed + num_new:
        return get_claim(chunk, num_new)
    return claim._replace(num_tokens=num_new)


def process_items_taken(step: Step, request: RequestState) -> None:
    """Hold the items that a row reads, now that it has blocks, and plan to encode missing ones.

    Source: vLLM 0.19.1 `schedule` ("Allocate the encoder cache"); P9, P22.
    """
    for index in CLAIM.of(step).items:
        take = step.state.rules[cache.take_item]
        ENCODER.set(step, take(ENCODER.of(step), request.request, index))
    assert ENCODER.of(step).budget >= 0, "the compute is never overdrawn (P9)"


def process_items_refused(step: Step, request: RequestState) -> None:
    """Drop the items of a request without a row, so that two requests never wait for each other's.

    Source: vLLM 0.19.1 `schedule` ("untouch the request"); upstream #31857; P7, P10, P22.
    """
    ENCODER.set(step, step.state.rules[cache.free_items](ENCODER.of(step), request.request, None))


def process_items_missing(step: Step, request: RequestState) -> None:
    """Drop the items of a request that has no row because an item has no room. Source: upstream
    #31857; P7, P10, P22."""
    process_items_refused(step, request)


def process_items_of_victim(step: Step, victim: RequestState, had_row: bool) -> None:
    """Withdraw what a preempted request planned in this step, and drop its items.

    Source: upstream #23347; P4, P9, P22.
    """
    if had_row:
        order = [row.request_id for row in step.rows]
        ENCODER.set(step, step.state.rules[cache.withdraw_items](ENCODER.of(step), order))
    process_items_refused(step, victim)


def process_items_read(step: Step, rows: Sequence[FrameRow]) -> None:
    """Drop the items that the rows of a step have read. Source: vLLM 0.19.1 `_free_encoder_inputs`;
    P22."""
    encoder, free = ENCODER.of(step), step.state.rules[cache.free_items]
    for request in [step.requests[row.request_id] for row in rows]:
        encoder = free(encoder, request.request, request.num_computed_tokens)
    ENCODER.set(step, cache.end_step(encoder, step.state.config.encoder_compute_budget))


def add_items(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the items to encode and to load, in the order of the rows, and those to
    drop. Source: vLLM 0.19.1 `schedule`; P22."""
    made: dict[RequestId, list[int]] = {}
    loaded: dict[RequestId, list[int]] = {}
    for item in ENCODER.of(step).planned:
        name, index = item.holder
        (loaded if item.is_external else made).setdefault(name, []).append(index)
    inputs = [
        tuple([EncoderInputs(name, tuple(sorted(indices))) for name, indices in found.items()])
        for found in (made, loaded)
    ]
    return replace(
        plan,
        scheduled_encoder_inputs=inputs[0],
        external_encoder_inputs=inputs[1],
        free_encoder_mm_hashes=step.state.rules[cache.list_freed](ENCODER.of(step)),
    )


def let_go_of_items(state: State, request: RequestState) -> State:
    """Return the state after a finished request dropped its items. Source: vLLM 0.19.1
    `_free_request`; P22."""
    encoder = state.rules[cache.free_items](ENCODER.of(state), request.request, None)
    return ENCODER.put(state, encoder)


def get_snapshot(state: State) -> EncoderSnapshot:
    """Return the encoder's cache, holders by request. Source: architecture D1."""
    encoder = ENCODER.of(state)
    entries = [
        EncoderEntry(name, entry.num_embeds, tuple([holder[0] for holder in entry.holders]))
        for name, entry in sorted(encoder.entries.items())
    ]
    return EncoderSnapshot(
        entries=tuple(entries),
        freeable=encoder.freeable,
        num_free=cache.count_free(encoder),
        num_freeable=cache.count_freeable(encoder),
        freed=encoder.freed,
    )


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
        victims=(process_items_of_victim,),
        fields=(add_items,),
        sent=(process_items_read,),
        leaves=(let_go_of_items,),
    ),
    events={EncoderReset: process_encoder_reset, EncoderOffer: process_encoder_offer},
    shows={"encoder": get_snapshot},
    invariants=INVARIANTS,
)
