"""Encoding: the encoder items that a request's row needs.

    | computed |  item  | text |  item: no room  |
               |---- the chunk ----|                 it ends before what cannot be read

Items are checked before the row has its blocks, and taken when it has them. In between, other
requests may be preempted, which only frees more room: items that were available then still are, or
can be encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from blockstep.spec.copies import replace
from blockstep.spec.core.parts import Note
from blockstep.spec.core.requests import FrameRow, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.features.encoder.cache import (
    ENCODER,
    NO_ENCODER,
    Encoder,
    begin_step,
    compute_end_before,
    compute_end_between_items,
    count_freeable,
    end_step,
    fits,
    free_items,
    get_item_holder,
    is_item_needed,
    list_freed,
    take_item,
    withdraw_items,
)
from blockstep.spec.vocabulary import Config, EncoderInputs, MultiModalItem, Plan, Request


class Claim(NamedTuple):
    """The tokens that a row may have of those that it could have, and the items that these read."""

    num_tokens: int
    items: tuple[int, ...] = ()
    """Indices, ascending."""
    encoder: Encoder = NO_ENCODER
    """The encoder after the row, if it may read items."""
    lacks_items: bool = False
    """Whether the row gets no token because an item has no room."""


CLAIM: Final = Note("encoder_claim", Claim(0))
"""The claim of the row that is being planned."""


def process_items_asked(
    step: Step, request: RequestState, num_computed: int, num_new: int
) -> Claim:
    """Return how many of `num_new` tokens can be read. The step does not change.

    Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P7, P15, P22.
    """
    items = request.request.items
    if num_new <= 0 or not ENCODER.of(step).size or not items:
        return Claim(num_new)
    end = items[-1].offset + items[-1].length if ENCODER.of(step).is_shared else 1
    if end <= num_computed:
        return Claim(num_new)
    config, rules = step.state.config, step.state.rules
    claim = get_claim(config, rules, ENCODER.of(step), request.request, num_computed, num_new)
    return claim._replace(lacks_items=claim.num_tokens == 0)


def get_claim(
    config: Config,
    rules: Rules,
    encoder: Encoder,
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
    if ends_between_items(config):
        end = num_computed + num_new
        num_new = rules[compute_end_between_items](request.items, num_computed, end) - num_computed
        if num_new == 0:
            return Claim(0)
    claim, before = Claim(num_new, (), encoder), encoder
    num_ahead = config.num_encoder_lookahead_tokens
    for index, item in enumerate(request.items):
        if item.offset >= num_computed + claim.num_tokens + num_ahead:
            break
        if item.offset + item.length <= num_computed:
            continue
        given = config, rules, request, index, num_computed
        shorter = rules[get_claim_before_item](*given, claim, before)
        if shorter is not None:
            return shorter
        claim = rules[get_claim_with_item](*given, claim)
    return claim


def ends_between_items(config: Config) -> bool:
    """Whether no chunk may end inside an item. Source: vLLM `disable_chunked_mm_input`; P22."""
    return config.disable_chunked_mm_input and not config.is_encoder_decoder


def get_claim_before_item(
    config: Config,
    rules: Rules,
    request: Request,
    index: int,
    num_computed: int,
    claim: Claim,
    before: Encoder,
) -> Claim | None:
    """Return the claim of a chunk that has to end before an item, or None.

    It ends there if it reads the item, and the item is neither in the cache nor has room. `before`:
    the encoder before the claim. Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P22.
    """
    encoder, item = claim.encoder, request.items[index]
    if (
        item.identifier in encoder.entries
        or not rules[is_item_needed](
            item, num_computed, claim.num_tokens, config.num_encoder_lookahead_tokens
        )
        or rules[has_room](encoder, item)
    ):
        return None
    return rules[get_shorter_claim](config, rules, request, index, num_computed, claim, before)


def get_shorter_claim(
    config: Config,
    rules: Rules,
    request: Request,
    index: int,
    num_computed: int,
    claim: Claim,
    before: Encoder,
) -> Claim:
    """Return the claim of a chunk that neither reads an item nor lets the draft head read it.

    Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; upstream #52306; P22.
    """
    num_ahead = config.num_encoder_lookahead_tokens
    num_new = compute_end_before(request.items[index].offset, num_computed, num_ahead)
    end = num_computed + num_new
    get_end = rules[compute_end_between_items]
    if ends_between_items(config) and get_end(request.items, num_computed, end) < end:
        return get_claim(config, rules, before, request, num_computed, num_new)
    return claim._replace(num_tokens=num_new)


def get_claim_with_item(
    config: Config, rules: Rules, request: Request, index: int, num_computed: int, claim: Claim
) -> Claim:
    """Return the claim with an item that is in the cache or has room, if the chunk reads it.

    Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P22.
    """
    item, num_ahead = request.items[index], config.num_encoder_lookahead_tokens
    if not rules[is_item_needed](item, num_computed, claim.num_tokens, num_ahead):
        return claim
    return get_taking_claim(rules, request, index, claim)


def get_taking_claim(rules: Rules, request: Request, index: int, claim: Claim) -> Claim:
    """Return the claim with an item. Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P22."""
    holder = rules[get_item_holder](request, index)
    encoder = take_item(claim.encoder, request, index, holder)
    return Claim(claim.num_tokens, (*claim.items, index), encoder)


def has_room(encoder: Encoder, item: MultiModalItem) -> bool:
    """Whether an item can be encoded now, and kept. Source: vLLM 0.19.1 `can_allocate`; P9, P22."""
    cost = 0 if item.identifier in encoder.offered else item.num_embeds
    return fits(item.num_embeds, cost, count_freeable(encoder), encoder.budget)


def limit_to_items(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
    """Return the tokens of a row before the first item without room; a request that gets none drops
    its items. Source: vLLM 0.19.1 `_try_schedule_encoder_inputs`; P7, P15, P22.
    """
    claim = step.state.rules[process_items_asked](step, request, num_computed, num_new)
    CLAIM.set(step, claim)
    if claim.lacks_items:
        step.state.rules[process_items_missing](step, request)
    return claim.num_tokens


def process_items_taken(step: Step, request: RequestState) -> None:
    """Hold the items that a row reads, now that it has blocks, and plan to encode missing ones.

    Source: vLLM 0.19.1 `schedule` ("Allocate the encoder cache"); P9, P22.
    """
    asked = request.request
    for index in CLAIM.of(step).items:
        holder = step.state.rules[get_item_holder](asked, index)
        ENCODER.set(step, take_item(ENCODER.of(step), asked, index, holder))
    assert ENCODER.of(step).budget >= 0, "the compute is never overdrawn (P9)"


def process_items_refused(step: Step, request: RequestState) -> None:
    """Drop the items of a request without a row, so that two requests never wait for each other's.

    Source: vLLM 0.19.1 `schedule` ("untouch the request"); upstream #31857; P7, P10, P22.
    """
    ENCODER.set(step, step.state.rules[free_items](ENCODER.of(step), request.request, None))


def process_items_missing(step: Step, request: RequestState) -> None:
    """Drop the items of a request that has no row because an item has no room.

    Upstream forgets this case. Source: vLLM 0.19.1 `schedule`; upstream #31857; P7, P10, P22.
    """
    process_items_refused(step, request)


def process_items_of_victim(step: Step, victim: RequestState, had_row: bool) -> None:
    """Withdraw what a preempted request planned in this step, and drop its items.

    Source: upstream #23347; P4, P9, P22.
    """
    rules = step.state.rules
    if had_row:
        order = [row.request_id for row in step.rows]
        ENCODER.set(step, rules[withdraw_items](ENCODER.of(step), victim.request, order))
    ENCODER.set(step, rules[free_items](ENCODER.of(step), victim.request, None))


def process_encoder_beginning(step: Step) -> None:
    """Give the encoder the compute budget of one step. Source: vLLM 0.19.1 `schedule`; P9."""
    ENCODER.set(step, begin_step(ENCODER.of(step), step.state.config.encoder_compute_budget))


def process_items_read(step: Step, rows: Sequence[FrameRow]) -> None:
    """Drop the items that the rows of a step have read. Source: vLLM 0.19.1 `_free_encoder_inputs`;
    P22."""
    free = step.state.rules[free_items]
    for row in rows:
        request = step.requests[row.request_id]
        num_computed = request.num_computed_tokens
        ENCODER.set(step, free(ENCODER.of(step), request.request, num_computed))
    ENCODER.set(step, end_step(ENCODER.of(step)))


def tell_items(step: Step, _: Sequence[FrameRow], plan: Plan) -> Plan:
    """Return the plan with the items to encode, to load and to drop. Source: vLLM 0.19.1
    `schedule`; P22."""
    return replace(
        plan,
        scheduled_encoder_inputs=list_encoder_inputs(step, is_external=False),
        external_encoder_inputs=list_encoder_inputs(step, is_external=True),
        free_encoder_mm_hashes=step.state.rules[list_freed](ENCODER.of(step)),
    )


def let_go_of_items(state: State, request: RequestState) -> State:
    """Return the state after a finished request dropped its items. Source: vLLM 0.19.1
    `_free_request`; P22."""
    encoder = state.rules[free_items](ENCODER.of(state), request.request, None)
    return ENCODER.put(state, encoder)


def list_encoder_inputs(step: Step, is_external: bool) -> tuple[EncoderInputs, ...]:
    """Return what a step encodes, or loads, in the order of the rows.

    Source: vLLM 0.19.1 `schedule`.
    """
    found: dict[str, list[int]] = {}
    for item in ENCODER.of(step).planned:
        if item.is_external is is_external:
            found.setdefault(item.holder[0], []).append(item.holder[1])
    return tuple([EncoderInputs(name, tuple(sorted(indices))) for name, indices in found.items()])
