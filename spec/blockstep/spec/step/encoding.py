"""Encoding: the encoder items that a request's row needs.

    | computed |  item  | text |  item: no room  |
               |---- the chunk ----|                 it ends before what cannot be read

Items are checked before the row has its blocks, and taken when it has them. In between, other
requests may be preempted, which only frees more room: items that were available then still are, or
can be encoded again.
"""

from __future__ import annotations

from typing import NamedTuple

from blockstep.spec.beside.encoder import (
    Encoder,
    compute_end_before,
    count_freeable,
    evict_for,
    fits,
    take_item,
)
from blockstep.spec.copies import replace
from blockstep.spec.requests import RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.step.work import Step
from blockstep.spec.vocabulary import Config, EncoderInputs, MultiModalItem, Request


class Claim(NamedTuple):
    """The tokens that a row may have of those that it could have, and the items that these read."""

    num_tokens: int
    items: tuple[int, ...] = ()
    """Indices, ascending."""
    encoder: Encoder | None = None
    """The encoder after the row; None if the row does not change it."""


def process_items_asked(
    step: Step, request: RequestState, num_computed: int, num_new: int
) -> Claim:
    """Return how many of `num_new` tokens can be read. The encoder's state is not changed.

    Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P7, P15, P22.
    """
    items = request.request.items
    if num_new <= 0 or not step.encoder.size or not items:
        return Claim(num_new)
    end = items[-1].offset + items[-1].length if step.encoder.is_shared else 1
    if end <= num_computed:
        return Claim(num_new)
    config, rules = step.state.config, step.state.rules
    claim = get_claim(config, step.encoder, rules, request.request, num_computed, num_new)
    if claim.encoder is not None:
        step.encoder = rules.get_encoder_once_asked(step.encoder, claim.encoder)
    return claim


def get_claim(
    config: Config,
    encoder: Encoder,
    rules: Rules,
    request: Request,
    num_computed: int,
    num_new: int,
) -> Claim:
    """Return the items that a chunk of `num_new` tokens reads, and the tokens that it gets.

    The chunk ends before the first item that does not fit. With `disable_chunked_mm_input` it never
    ends inside an item: if the end before an item without room is inside another one, a shorter
    chunk is tried. Encoder-decoder inputs are attended from position 0, so the first chunk is
    scheduled with all of them or not at all. Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`,
    `EncoderDecoderCacheManager`; upstream #52306; P9, P15, P22.
    """
    num_ahead, taken, before = config.num_encoder_lookahead_tokens, [], encoder
    is_whole = config.disable_chunked_mm_input and encoder.is_shared
    get_end = rules.compute_end_between_items
    if is_whole:
        end = num_computed + num_new
        num_new = get_end(request.items, num_computed, end) - num_computed
        if num_new == 0:
            return Claim(0)
    for index, item in enumerate(request.items):
        if item.offset >= num_computed + num_new + num_ahead:
            break
        if item.offset + item.length <= num_computed:
            continue
        is_there = item.identifier in encoder.entries
        if is_whole and rules.stops_before_item(item, is_there, num_computed, num_new):
            num_new = compute_end_before(item.offset, num_computed, num_ahead)
            break
        is_needed = rules.is_item_needed(item, num_computed, num_new, num_ahead)
        if not is_needed and not rules.asks_room_first:
            continue
        if not is_there and not has_room(encoder, rules, item):
            ahead = num_ahead if rules.ends_before_the_head else 0
            num_new = compute_end_before(item.offset, num_computed, ahead)
            end = num_computed + num_new
            if is_whole and ahead and get_end(request.items, num_computed, end) < end:
                return get_claim(config, before, rules, request, num_computed, num_new)
            break
        if not is_there and not is_needed:
            encoder = evict_for(encoder, item.num_embeds)
            continue
        holder = rules.get_item_holder((request.request_id, index), request)
        encoder = take_item(encoder, request, index, holder)
        taken.append(index)
    return Claim(num_new, tuple(taken), encoder)


def has_room(encoder: Encoder, rules: Rules, item: MultiModalItem) -> bool:
    """Whether an item can be encoded now, and kept. Source: vLLM 0.19.1 `can_allocate`; P9, P22."""
    is_made = item.identifier not in encoder.offered or rules.external_costs_compute
    cost = item.num_embeds if is_made else 0
    return fits(item.num_embeds, cost, count_freeable(encoder), encoder.budget)


def process_items_taken(step: Step, request: RequestState, claim: Claim) -> None:
    """Hold the items that a row reads, now that it has blocks, and plan to encode missing ones.

    Source: vLLM 0.19.1 `schedule` ("Allocate the encoder cache"); P9, P22.
    """
    rules, asked = step.state.rules, request.request
    num_planned = len(step.encoder.planned)
    for index in claim.items:
        holder = rules.get_item_holder((asked.request_id, index), asked)
        step.encoder = take_item(step.encoder, asked, index, holder)
    is_made = any(item.cost > 0 for item in step.encoder.planned[num_planned:])
    if is_made and rules.forgets_restored_compute and claim.encoder is not None:
        step.encoder = replace(step.encoder, budget=claim.encoder.budget)
    assert step.encoder.budget >= 0, "the compute is never overdrawn (P9)"


def process_items_refused(step: Step, request: RequestState, is_for_items: bool = False) -> None:
    """Drop the items of a request without a row, so that two requests never wait for each other's.

    `is_for_items`: an item without room is the reason that there is no row. Source: vLLM 0.19.1
    `schedule` ("untouch the request"), which forgets this case; upstream #31857; P7, P10, P22.
    """
    if not (is_for_items and step.state.rules.keeps_items_without_row):
        step.encoder = step.state.rules.free_items(step.encoder, request.request, None)


def list_encoder_inputs(step: Step, is_external: bool) -> tuple[EncoderInputs, ...]:
    """Return what a step encodes, or loads, in the order of the rows.

    Source: vLLM 0.19.1 `schedule`.
    """
    found: dict[str, list[int]] = {}
    for item in step.encoder.planned:
        if item.is_external is is_external:
            found.setdefault(item.holder[0], []).append(item.holder[1])
    return tuple([EncoderInputs(name, tuple(sorted(indices))) for name, indices in found.items()])
