"""Encoder: quirks of releases with the encoder budget and the encoder cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from blockstep.spec.copies import replace
from blockstep.spec.core import admission, commit
from blockstep.spec.core.requests import Frame, RequestState
from blockstep.spec.core.rules import Rules
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.features import encoder as encoding
from blockstep.spec.features.encoder import Chunk, EncoderShare
from blockstep.spec.features.encoder import cache as items
from blockstep.spec.features.encoder.cache import (
    ENCODER,
    NO_ENCODER,
    Encoder,
    Holder,
    compute_end_before,
    count_freeable,
    evict_for,
    let_go,
)
from blockstep.spec.features.sessions import goes_on
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import (
    Config,
    MultiModalItem,
    OutputRow,
    Request,
    RequestId,
    TokenIds,
)


def lacks_items(claim: EncoderShare) -> bool:
    """Return whether a row gets no token because an item has no room."""
    return claim.num_tokens == 0 and claim.encoder is not NO_ENCODER


def get_first_holder(request: Request, index: int) -> Holder:
    """Return the first occurrence of an item of a request."""
    names = [item.identifier for item in request.items]
    return request.request_id, names.index(names[index])


def repeated_item_is_released_at_its_first_place(rules: Rules, _config: Config) -> Rules:
    """A request with one item at two places releases it after the first place."""

    def take_item(encoder: Encoder, request: Request, index: int) -> Encoder:
        identifier, holder = request.items[index].identifier, get_first_holder(request, index)
        if identifier in encoder.entries:
            return items.hold_entry(encoder, identifier, holder)
        after = rules[items.take_item](encoder, request, index)
        if not encoder.is_shared:
            return after
        entry = items.Entry(after.entries[identifier].num_embeds, (holder,))
        return replace(after, entries=after.entries.having(identifier, entry))

    def free_items(encoder: Encoder, request: Request, num_computed: int | None) -> Encoder:
        if not encoder.is_shared:
            return rules[items.free_items](encoder, request, num_computed)
        for index, item in enumerate(request.items):
            if num_computed is None or item.offset + item.length <= num_computed:
                holder = get_first_holder(request, index)
                encoder = let_go(encoder, item.identifier, holder)
        return encoder

    return rules.replacing(items.take_item, take_item).replacing(items.free_items, free_items)


def encoder_cache_changes_before_admission(rules: Rules, _config: Config) -> Rules:
    """Entries that a row would evict or share are evicted or held before the row is certain."""

    def limit_to_items(step: Step, request: RequestState, num_computed: int, num_new: int) -> int:
        before = ENCODER.of(step)
        num_tokens = rules[encoding.limit_to_items](step, request, num_computed, num_new)
        claim = encoding.CLAIM.of(step)
        if claim.encoder is NO_ENCODER:
            return num_tokens
        entries = claim.encoder.entries.to_dict()
        for item in claim.encoder.planned[len(before.planned) :]:
            entries.pop(item.identifier, None)
        encoder = replace(
            claim.encoder,
            entries=FrozenMap(entries),
            planned=before.planned,
            budget=before.budget,
        )
        ENCODER.set(step, encoder)
        if lacks_items(claim):
            step.state.rules[encoding.process_items_missing](step, request)
        return num_tokens

    return rules.replacing(encoding.limit_to_items, limit_to_items)


def items_held_without_a_row(rules: Rules, _config: Config) -> Rules:
    """A request that gets no token because one item does not fit still holds its other items."""
    return rules.replacing(encoding.process_items_missing, process_items_missing)


def process_items_missing(step: Step, request: RequestState) -> None:
    """Modified `encoder.process_items_missing`: it keeps them."""


def withdrawn_items_count_as_encoded(rules: Rules, _config: Config) -> Rules:
    """Items to be encoded for a row that is removed from the step count as encoded."""

    return rules.replacing(items.withdraw_items, withdraw_items)


def withdraw_items(encoder: Encoder, order: Sequence[RequestId]) -> Encoder:
    """Modified `cache.withdraw_items`: only the plan to encode them is withdrawn."""
    made = [
        item for item in encoder.planned if item.holder[0] not in order and not item.is_external
    ]
    return replace(
        encoder,
        planned=tuple([item for item in encoder.planned if item not in made]),
        budget=encoder.budget + sum(item.cost for item in made),
    )


def encoder_budget_of_withdrawn_rows_is_lost(rules: Rules, _config: Config) -> Rules:
    """The encoder budget of a removed row is lost if the preempting request has items itself."""

    def process_items_taken(step: Step, request: RequestState) -> None:
        num_planned = len(ENCODER.of(step).planned)
        rules[encoding.process_items_taken](step, request)
        if any(item.cost > 0 for item in ENCODER.of(step).planned[num_planned:]):
            budget = encoding.CLAIM.of(step).encoder.budget
            ENCODER.set(step, replace(ENCODER.of(step), budget=budget))

    return rules.replacing(encoding.process_items_taken, process_items_taken)


def chunk_ends_before_an_unneeded_item(rules: Rules, _config: Config) -> Rules:
    """A chunk ends before an item that does not fit, even if it would read none of its
    embeddings."""

    def get_claim_at_item(chunk: Chunk, index: int, claim: EncoderShare) -> EncoderShare:
        item, all_rules = chunk.request.items[index], chunk.state.rules
        if chunk.reads(item, claim.num_tokens):
            return rules[encoding.get_claim_at_item](chunk, index, claim)
        if item.identifier in claim.encoder.entries:
            encoder = all_rules[items.take_item](claim.encoder, chunk.request, index)
            return claim._replace(items=(*claim.items, index), encoder=encoder)
        if all_rules[items.has_room](claim.encoder, item):
            return claim._replace(encoder=evict_for(claim.encoder, item.num_embeds))
        return all_rules[encoding.get_shorter_claim](chunk, index, claim)

    return rules.replacing(encoding.get_claim_at_item, get_claim_at_item)


def draft_head_reads_an_unencoded_item(rules: Rules, _config: Config) -> Rules:
    """An item that only the draft head reads, one token ahead, is not encoded.

    An item whose embeddings are all masked is encoded in any case.
    """
    return rules.replacing(items.is_item_needed, is_item_needed)


def is_item_needed(item: MultiModalItem, num_computed: int, num_new: int, num_ahead: int) -> bool:
    """Modified `cache.is_item_needed`: the draft head reads nothing ahead."""
    del num_ahead
    first = max(num_computed - item.offset, 0)
    end = min(num_computed + num_new - item.offset, item.length)
    if not item.is_embed:
        return first < end
    return any(item.is_embed[first : end or item.length])


StopsBefore: TypeAlias = Callable[[MultiModalItem, bool, int, int], bool]
"""Whether a chunk ends before an item, with or without room for it: (the item, whether it is in the
cache, computed tokens, tokens of the chunk)."""


def _with_stops(rules: Rules, stops_before_item: StopsBefore) -> Rules:
    """Return the rules in which chunks end before some items, if they must not end inside one."""

    def get_claim_at_item(chunk: Chunk, index: int, claim: EncoderShare) -> EncoderShare:
        item, num_computed = chunk.request.items[index], chunk.num_computed
        is_there = item.identifier in claim.encoder.entries
        if chunk.is_whole and stops_before_item(item, is_there, num_computed, claim.num_tokens):
            num_ahead = chunk.state.config.num_encoder_lookahead_tokens
            num_new = compute_end_before(item.offset, num_computed, num_ahead)
            return claim._replace(num_tokens=num_new)
        return rules[encoding.get_claim_at_item](chunk, index, claim)

    return rules.replacing(encoding.get_claim_at_item, get_claim_at_item)


def whole_items_are_split(rules: Rules, config: Config) -> Rules:
    """A chunk may end inside an item that it begins with or that is in the cache, also with
    disable_chunked_mm_input."""
    num_ahead = config.num_encoder_lookahead_tokens

    def stops_before_item(
        item: MultiModalItem, is_there: bool, num_computed: int, num_new: int
    ) -> bool:
        is_before = num_computed + num_ahead < item.offset
        return is_before and not is_there and num_computed + num_new < item.offset + item.length

    return _with_stops(rules, stops_before_item).replacing(
        items.compute_end_between_items, compute_end_between_items
    )


def compute_end_between_items(items: Sequence[MultiModalItem], num_computed: int, end: int) -> int:
    """Modified `cache.compute_end_between_items`: a chunk may end anywhere."""
    del items, num_computed
    return end


def remainder_of_an_item_is_split(rules: Rules, _config: Config) -> Rules:
    """A chunk that begins inside an item may end inside it, also with disable_chunked_mm_input.

    A chunk begins inside an item where a hit ended there.
    """

    def compute_end_between_items(
        found: Sequence[MultiModalItem], num_computed: int, end: int
    ) -> int:
        ahead = [item for item in found if item.offset >= num_computed]
        return rules[items.compute_end_between_items](ahead, num_computed, end)

    return rules.replacing(items.compute_end_between_items, compute_end_between_items)


def draft_head_stops_before_whole_items(rules: Rules, _config: Config) -> Rules:
    """A chunk ends one token before a whole item if there is a draft head, even with no token left.

    This is with `disable_chunked_mm_input`, and for an item whose end the chunk does not reach. The
    head reads one token ahead, so that the chunk must not end right before the item.
    """
    splits = Quirk.WHOLE_ITEMS_ARE_SPLIT in rules.changes

    def stops_before_item(
        item: MultiModalItem, is_there: bool, num_computed: int, num_new: int
    ) -> bool:
        is_begun = num_computed > item.offset
        if splits:
            is_begun = is_there or num_computed >= item.offset
        return not is_begun and num_computed + num_new < item.offset + item.length

    def compute_end_between_items(
        found: Sequence[MultiModalItem], num_computed: int, end: int
    ) -> int:
        begun = [item for item in found if item.offset < num_computed]
        return rules[items.compute_end_between_items](begun, num_computed, end)

    return _with_stops(rules, stops_before_item).replacing(
        items.compute_end_between_items, compute_end_between_items
    )


def loaded_items_need_encoder_budget(rules: Rules, _config: Config) -> Rules:
    """An item that a connector can load is loaded only if the encoder budget would allow encoding
    it."""
    return rules.replacing(items.has_room, has_room)


def has_room(encoder: Encoder, item: MultiModalItem) -> bool:
    """Modified `cache.has_room`: also a loaded item costs compute."""
    return item.num_embeds <= min(count_freeable(encoder), encoder.budget)


def reencoded_items_are_dropped(rules: Rules, _config: Config) -> Rules:
    """The worker has to drop an evicted entry even if the same step encodes the item again."""
    return rules.replacing(items.list_freed, list_freed)


def list_freed(encoder: Encoder) -> tuple[str, ...]:
    """Modified `cache.list_freed`: also those that the step encodes again."""
    return tuple([name for name, _ in encoder.evicted]) if encoder.is_shared else encoder.freed


def reencoded_cross_attention_items_are_dropped(rules: Rules, config: Config) -> Rules:
    """An encoder-decoder model drops an item of the previous step even if this step encodes it
    again."""
    return rules.replacing(items.list_freed, list_freed) if config.is_encoder_decoder else rules


def cross_attention_cache_overcounts_free_space(rules: Rules, _config: Config) -> Rules:
    """An encoder-decoder model counts an item's space as free again after each step, and at the
    end."""

    def free_items(encoder: Encoder, request: Request, num_computed: int | None) -> Encoder:
        if encoder.is_shared:
            return rules[items.free_items](encoder, request, num_computed)
        if any(item.holder[0] == request.request_id for item in encoder.planned):
            return encoder
        num_more = sum(item.num_embeds for item in request.items)
        return replace(encoder, size=encoder.size + num_more)

    return rules.replacing(items.free_items, free_items)


def items_held_until_the_commit(rules: Rules, _config: Config) -> Rules:
    """An item is released at the commit of the step that read its last token, not at the plan."""

    def free_items(encoder: Encoder, request: Request, num_computed: int | None) -> Encoder:
        if num_computed is None:
            return rules[items.free_items](encoder, request, None)
        if (
            encoder.is_shared
            or Quirk.CROSS_ATTENTION_CACHE_OVERCOUNTS_FREE_SPACE not in rules.changes
        ):
            return encoder
        name, planned = request.request_id, encoder.planned
        num_taken = sum([item.num_embeds for item in planned if item.holder[0] == name])
        return replace(encoder, size=encoder.size - num_taken)

    def free_read_items(
        encoder: Encoder, request: RequestState, num_rejected: int | None
    ) -> Encoder:
        if num_rejected is None:
            everything = rules[items.free_items](encoder, request.request, None)
            return everything if encoder.is_shared else encoder
        if not request.num_computed_tokens:
            return encoder
        num_unverified = request.num_output_placeholders or num_rejected
        num_read = request.num_computed_tokens - num_unverified
        return rules[items.free_items](encoder, request.request, num_read)

    def get_rows_committed(
        state: State, frame: Frame, sampled: Mapping[RequestId, TokenIds]
    ) -> tuple[State, list[OutputRow]]:
        after, outputs = rules[commit.get_rows_committed](state, frame, sampled)
        encoder = ENCODER.of(state)
        ended = {output.request_id for output in outputs if output.finish_reason is not None}
        for row in frame.rows if state.config.encoder_cache_size else ():
            request, tokens = state.requests.get(row.request_id), sampled[row.request_id]
            if request is None or row.is_dropped:
                continue
            num_rejected = len(row.draft_token_ids) + 1 - len(tokens) if tokens else 0
            encoder = free_read_items(encoder, request, num_rejected)
            if row.request_id in ended and not goes_on(after.requests[row.request_id]):
                encoder = free_read_items(encoder, request, None)
        return ENCODER.put(after, encoder), outputs

    return rules.replacing(items.free_items, free_items).replacing(
        commit.get_rows_committed, get_rows_committed
    )


def draft_head_reads_an_item_without_space(rules: Rules, _config: Config) -> Rules:
    """A chunk ends right before an item that does not fit, so that a draft head reads that item."""
    return rules.replacing(encoding.get_shorter_claim, get_shorter_claim)


def get_shorter_claim(chunk: Chunk, index: int, claim: EncoderShare) -> EncoderShare:
    """Modified `encoder.get_shorter_claim`: the chunk ends right before the item."""
    offset = chunk.request.items[index].offset
    return claim._replace(num_tokens=compute_end_before(offset, chunk.num_computed, 0))


def request_without_encoder_space_is_skipped(rules: Rules, _config: Config) -> Rules:
    """A waiting request that gets no token because an item does not fit is skipped."""

    def process_shortage(step: Step, request: RequestState) -> Verdict:
        verdict = rules[admission.process_shortage](step, request)
        return Verdict.PASSED_OVER if lacks_items(encoding.CLAIM.of(step)) else verdict

    return rules.replacing(admission.process_shortage, process_shortage)


STORIES = (
    QuirkStory(
        Quirk.REPEATED_ITEM_IS_RELEASED_AT_ITS_FIRST_PLACE,
        repeated_item_is_released_at_its_first_place,
        "a request with one item at two places releases it after the first place",
        ("P22",),
        "not found upstream",
        "0.19.1",
        "one item twice in a prompt; a chunk ends after the first place and within the second: no "
        "request holds the item any more",
    ),
    QuirkStory(
        Quirk.ENCODER_CACHE_CHANGES_BEFORE_ADMISSION,
        encoder_cache_changes_before_admission,
        "entries that a row would evict or share are evicted or held before the row is certain",
        ("P7", "P22"),
        "#31857 (merged, for some exits)",
        "0.19.1",
        "space for one item, whose entry no request holds; a request with another item is "
        "submitted, and there is no block for it: it is not admitted, but the entry is evicted",
    ),
    QuirkStory(
        Quirk.ITEMS_HELD_WITHOUT_A_ROW,
        items_held_without_a_row,
        "a request that gets no token because one item does not fit still holds its other items",
        ("P7", "P10", "P15"),
        "#31857 (merged, for other exits)",
        "0.19.1",
        "a draft head, space for two items; two requests have computed all but the last token of "
        "an item, and another item follows: each waits for the space that the other holds, for "
        "ever",
    ),
    QuirkStory(
        Quirk.WITHDRAWN_ITEMS_COUNT_AS_ENCODED,
        withdrawn_items_count_as_encoded,
        "items to be encoded for a row that is removed from the step count as encoded",
        ("P4", "P22"),
        "#23347 (merged, without the entry)",
        "0.19.1",
        "PRIORITY; a row with an item is scheduled, then removed as its request is preempted for a"
        " later one: resumed, it has no row that encodes the item",
    ),
    QuirkStory(
        Quirk.ENCODER_BUDGET_OF_WITHDRAWN_ROWS_IS_LOST,
        encoder_budget_of_withdrawn_rows_is_lost,
        "the encoder budget of a removed row is lost if the preempting request has items itself",
        ("P15",),
        "not found upstream",
        "0.19.1",
        "PRIORITY, an encoder budget for two items; a row with one is removed for a request with "
        "another: a third running request has no budget left for its item",
    ),
    QuirkStory(
        Quirk.CHUNK_ENDS_BEFORE_AN_UNNEEDED_ITEM,
        chunk_ends_before_an_unneeded_item,
        "a chunk ends before an item that does not fit, even if it would read none of its "
        "embeddings",
        ("P15",),
        "not found upstream",
        "0.19.1",
        "space for one item, whose entry is held; the next item begins with a token without an "
        "embedding: a chunk that ends after that token is not scheduled",
    ),
    QuirkStory(
        Quirk.DRAFT_HEAD_READS_AN_UNENCODED_ITEM,
        draft_head_reads_an_unencoded_item,
        "an item that only the draft head reads, one token ahead, is not encoded",
        ("P22",),
        "not found upstream",
        "0.19.1",
        "a draft head, a budget of 1; a prompt of a token and an item: with the first chunk the "
        "head reads the item's embedding, which is not encoded",
    ),
    QuirkStory(
        Quirk.WHOLE_ITEMS_ARE_SPLIT,
        whole_items_are_split,
        "with disable_chunked_mm_input a chunk may end inside an item that it begins with, or that"
        " is in the cache",
        ("P22",),
        "#52306, #52412",
        "0.19.1",
        "whole items, a budget of 3; a prompt of two tokens, and one that begins with an item of "
        "two: the token left in the budget computes half of the item",
    ),
    QuirkStory(
        Quirk.DRAFT_HEAD_STOPS_BEFORE_WHOLE_ITEMS,
        draft_head_stops_before_whole_items,
        "with a draft head a chunk ends one token before a whole item, even if that leaves no "
        "token",
        ("P10", "P15"),
        "not found upstream",
        "0.19.1 0.33.0",
        "a draft head, whole items, a budget of 2; a prompt of a token and an item of 2: it is "
        "never scheduled",
    ),
    QuirkStory(
        Quirk.LOADED_ITEMS_NEED_ENCODER_BUDGET,
        loaded_items_need_encoder_budget,
        "an item that a connector can load is loaded only if the encoder budget would allow "
        "encoding it",
        ("P15",),
        "not found upstream",
        "0.19.1",
        "an encoder budget for one item; a prompt of two, the second one offered: the chunk ends "
        "before it",
    ),
    QuirkStory(
        Quirk.REENCODED_ITEMS_ARE_DROPPED,
        reencoded_items_are_dropped,
        "the worker has to drop an evicted entry even if the same step encodes the item again",
        ("P22", "P26"),
        "#52482 (merged)",
        "0.19.1",
        "space for two items; a step evicts both for one, and encodes one of them again for a "
        "later request: the plan names it among those to drop",
    ),
    QuirkStory(
        Quirk.CROSS_ATTENTION_CACHE_OVERCOUNTS_FREE_SPACE,
        cross_attention_cache_overcounts_free_space,
        "an encoder-decoder model counts an item's space as free again after each step, and at the"
        " end",
        ("P9", "P22"),
        "#55733, #51228",
        "0.19.1",
        "an encoder-decoder model, space for one item; one request with one runs for two steps: "
        "then the items of two new requests are encoded in one step",
    ),
    QuirkStory(
        Quirk.REENCODED_CROSS_ATTENTION_ITEMS_ARE_DROPPED,
        reencoded_cross_attention_items_are_dropped,
        "an encoder-decoder model drops an item of the previous step even if this step encodes it "
        "again",
        ("P22", "P26"),
        "#52482 (merged, for other models)",
        "0.33.0",
        "an encoder-decoder model; a request with an item finishes after a step, and another one "
        "with that item is admitted: the plan names it among those to drop",
    ),
    QuirkStory(
        Quirk.ITEMS_HELD_UNTIL_THE_COMMIT,
        items_held_until_the_commit,
        "an item is released at the commit of the step that read its last token, not at the plan",
        (),
        "#45347 (merged)",
        "0.33.0",
        "a prompt of one item, all in one step: until that step is committed, the item is held",
    ),
    QuirkStory(
        Quirk.DRAFT_HEAD_READS_AN_ITEM_WITHOUT_SPACE,
        draft_head_reads_an_item_without_space,
        "a chunk ends right before an item that does not fit, so that a draft head reads that item",
        ("P22",),
        "not found upstream",
        "0.33.0",
        "a draft head, an encoder budget for one item; a prompt of two: the first chunk ends right"
        " before the second, which the head reads, and which is not encoded",
    ),
    QuirkStory(
        Quirk.REMAINDER_OF_AN_ITEM_IS_SPLIT,
        remainder_of_an_item_is_split,
        "with disable_chunked_mm_input a chunk that begins inside an item may end inside it",
        ("P22",),
        "left by #52306, #52412",
        "0.33.0",
        "whole items, blocks of 2, a budget of 4; a prompt whose first block ends inside an item "
        "is a hit, and another request leaves one token of the budget: it is computed",
    ),
    QuirkStory(
        Quirk.REQUEST_WITHOUT_ENCODER_SPACE_IS_SKIPPED,
        request_without_encoder_space_is_skipped,
        "a waiting request that gets no token because an item does not fit is skipped",
        ("P16",),
        "not found upstream (searched 2026-11-26: encoder budget, waiting, continue)",
        "0.33.0",
        "space for one item, whose entry is held; a request with another item waits, and one "
        "without items after it: the latter is admitted",
    ),
)
