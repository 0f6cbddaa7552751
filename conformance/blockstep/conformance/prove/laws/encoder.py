"""Laws about the encoder cache: ends of chunks, budget, withdrawn and shared items.

PYTEST_DONT_REWRITE. Positions and amounts are symbolic; names of items are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockstep.conformance.prove.law import LawModule, Right, instead
from blockstep.spec.core.slots import compute_num_blocks, compute_num_new_blocks
from blockstep.spec.features.encoder.cache import (
    Encoder,
    Entry,
    compute_end_before,
    compute_end_between_items,
    count_free,
    count_freeable,
    evict_for,
    free_items,
    has_room,
    is_item_needed,
    take_item,
    withdraw_items,
)
from blockstep.spec.features.groups.kinds import (
    compute_max_held_blocks,
    compute_num_skipped_blocks,
    get_num_slots_of,
)
from blockstep.spec.frozen_map import FrozenMap
from blockstep.spec.vocabulary import GroupKind, KVGroup, MultiModalItem, Request, RequestId

ROOM = LawModule("encoder")


def item(offset: int, length: int, name: str = "x") -> MultiModalItem:
    """Return an item without a mask."""
    return MultiModalItem(name, offset, length)


def request_of(name: str, *items: MultiModalItem) -> Request:
    """Return a request with these items."""
    return Request(name, (0,), items=items)


def cache(size: int, budget: int, **unheld: int) -> Encoder:
    """Return a cache of entries without holders, in this order, with a compute budget."""
    entries = {name: Entry(num_embeds) for name, num_embeds in unheld.items()}
    return Encoder(size, entries=FrozenMap(entries), freeable=tuple(entries), budget=budget)


# Mistakes.


@instead(is_item_needed, theirs="not found upstream")
def what_the_head_reads_ahead_is_not_needed(right: Right[bool]) -> bool:
    """The token that the draft head reads ahead is ignored."""
    return right(num_ahead=0)


@instead(compute_end_between_items, theirs="#52306")
def item_that_a_chunk_begins_with_is_split(
    right: Right[int], items: tuple[MultiModalItem, ...], num_computed: int
) -> int:
    """Only an item that begins after the chunk's first token must be whole."""
    return right(items=[item for item in items if item.offset > num_computed])


@instead(compute_end_between_items, theirs="not found upstream")
def rest_of_an_item_is_split(
    right: Right[int], items: tuple[MultiModalItem, ...], num_computed: int
) -> int:
    """An item of which a hit covers a part need not be whole."""
    return right(items=[item for item in items if item.offset >= num_computed])


@instead(withdraw_items, theirs="#23347")
def entry_of_a_withdrawn_row_stays(encoder: Encoder, order: Sequence[RequestId]) -> Encoder:
    """The row is withdrawn and its compute returned, but the entry stays in the cache."""
    mine = [it for it in encoder.planned if it.holder[0] not in order]
    planned = tuple([it for it in encoder.planned if it not in mine])
    budget = encoder.budget + sum([it.cost for it in mine])
    return replace(encoder, planned=planned, budget=budget)


@instead(free_items, theirs="not found upstream")
def item_is_let_go_behind_its_first_place(right: Right[Encoder], num_computed: int) -> Encoder:
    """A request holds an item once, although the item is at two offsets."""
    return right(num_computed=None) if num_computed >= 2 else right()


# Ends of chunks.


@ROOM.law("P22", (3, 5, 2, 1))
def check_chunk_that_ends_before_an_item_reads_none_of_its_embeddings(
    num_computed: int, offset: int, length: int, num_ahead: int
) -> None:
    """The draft head does not read it either."""
    assert 0 <= num_computed and 0 <= num_ahead <= 1 and 1 <= length
    assert num_computed + num_ahead <= offset
    num_new = compute_end_before(offset, num_computed, num_ahead)
    assert not is_item_needed(item(offset, length), num_computed, num_new, num_ahead)


@ROOM.law("P15", (3, 5, 2, 1))
def check_chunk_before_an_item_is_as_long_as_possible(
    num_computed: int, offset: int, length: int, num_ahead: int
) -> None:
    """One token more would read the item."""
    assert 0 <= num_computed and 0 <= num_ahead <= 1 and 1 <= length
    assert num_computed + num_ahead <= offset
    num_new = compute_end_before(offset, num_computed, num_ahead)
    assert is_item_needed(item(offset, length), num_computed, num_new + 1, num_ahead)


@ROOM.law("P15 P22", (3, 2, 5, 2, 1, 5), what_the_head_reads_ahead_is_not_needed)
def check_item_is_needed_exactly_if_one_of_its_tokens_is_read(
    num_computed: int, num_new: int, offset: int, length: int, num_ahead: int, position: int
) -> None:
    """The chunk or the draft head reads it; `position` is any position."""
    assert 0 <= num_computed and 1 <= num_new and 0 <= num_ahead <= 1
    assert 0 <= offset and 1 <= length
    is_read = num_computed <= position < num_computed + num_new + num_ahead
    is_needed = is_item_needed(item(offset, length), num_computed, num_new, num_ahead)
    assert is_needed or not (is_read and offset <= position < offset + length)
    first = max(offset, num_computed)
    end = min(offset + length, num_computed + num_new + num_ahead)
    assert not is_needed or first < end


@ROOM.law(
    "P15 P22",
    (0, 1, 1, 1, 2, 4, 2),
    item_that_a_chunk_begins_with_is_split,
    rest_of_an_item_is_split,
)
def check_chunk_never_ends_inside_a_whole_item(
    num_computed: int, offset: int, length: int, gap: int, second_length: int, end: int, other: int
) -> None:
    """`other` is any end that is not inside an item."""
    assert 0 <= num_computed < end and 0 <= offset and 1 <= length
    assert 0 <= gap and 1 <= second_length
    items = item(offset, length), item(offset + length + gap, second_length)
    found = compute_end_between_items(items, num_computed, end)
    assert num_computed <= found <= end
    is_whole = all(not one.offset < found < one.offset + one.length for one in items)
    assert is_whole or found == num_computed
    if all(not one.offset < other < one.offset + one.length for one in items):
        assert found >= other or not num_computed <= other <= end


# Budget and cache size.


@ROOM.law("P9 P22", (5, 4, 2, 1, 2))
def check_item_that_fits_is_encoded_within_budget_and_cache(
    size: int, budget: int, num_held: int, num_unheld: int, num_embeds: int
) -> None:
    """The cache also has one entry with a holder and one without."""
    assert 1 <= num_held and 1 <= num_unheld and 1 <= num_embeds and 0 <= budget
    assert num_held + num_unheld <= size
    entries = FrozenMap({"y": Entry(num_held, (("B", 0),)), "z": Entry(num_unheld)})
    before = Encoder(size, entries=entries, freeable=("z",), budget=budget)
    if has_room(before, item(0, num_embeds)):
        after = take_item(before, request_of("A", item(0, num_embeds)), 0)
        assert 0 <= count_free(after) <= count_freeable(after) <= size
        assert after.budget == budget - num_embeds >= 0
        assert "y" in after.entries


@ROOM.law("P15 P16", (5, 2, 2, 3))
def check_no_entry_is_evicted_without_need(
    size: int, num_first: int, num_second: int, num_embeds: int
) -> None:
    """The entry that became freeable first is evicted first, and another only if space is
    missing.
    """
    assert 1 <= num_first and 1 <= num_second and 1 <= num_embeds <= size
    assert num_first + num_second <= size
    before = cache(size, 0, y=num_first, z=num_second)
    after = evict_for(before, num_embeds)
    assert count_free(after) >= num_embeds
    if num_embeds <= size - num_second:
        assert "z" in after.entries
    if num_embeds <= size - num_first - num_second:
        assert after == before


@ROOM.law("P4 P9 P22", (4, 3, 2, 2), entry_of_a_withdrawn_row_stays)
def check_withdrawn_item_leaves_the_cache_unchanged(
    size: int, budget: int, num_unheld: int, num_embeds: int
) -> None:
    """Entries that were evicted for it are restored, too."""
    assert 1 <= num_unheld <= size and 1 <= num_embeds <= min(size, budget)
    before = cache(size, budget, z=num_unheld)
    request = request_of("A", item(0, num_embeds))
    taken = take_item(before, request, 0)
    assert withdraw_items(taken, ()) == before


@ROOM.law("P4 P9", (4, 3, 2), entry_of_a_withdrawn_row_stays)
def check_withdrawn_item_is_encoded_for_the_next_request_at_the_same_cost(
    size: int, budget: int, num_embeds: int
) -> None:
    """The row of `A` is withdrawn, and the row of `B` stays."""
    assert 1 <= num_embeds <= min(size, budget)
    first, second = (request_of(name, item(0, num_embeds)) for name in "AB")
    taken = take_item(cache(size, budget), first, 0)
    taken = take_item(taken, second, 0)
    after = withdraw_items(taken, ("B",))
    assert [it.holder for it in after.planned] == [("B", 0)]
    assert after.budget == budget - num_embeds
    assert count_free(after) == size - num_embeds


# Holding.


@ROOM.law("P22", (3, 4), item_is_let_go_behind_its_first_place)
def check_item_is_held_until_all_its_places_are_computed(num_computed: int, offset: int) -> None:
    """The item is at two offsets, two tokens long, the first at the beginning."""
    assert 0 <= num_computed and 2 <= offset
    request = request_of("A", item(0, 2), item(offset, 2))
    taken = take_item(cache(2, 2), request, 0)
    taken = take_item(taken, request, 1)
    after = free_items(taken, request, num_computed)
    assert bool(after.entries["x"].holders) == (num_computed < offset + 2)


# Cross attention.


@ROOM.law("P8 P11", (9, 5, 4))
def check_cross_attention_blocks_hold_all_items_from_the_first_chunk_on(
    num_slots: int, num_across: int, block_size: int
) -> None:
    """These blocks are charged and allocated with the first chunk; later chunks add none."""
    assert 1 <= num_slots and 0 <= num_across and 1 <= block_size
    group = KVGroup(GroupKind.CROSS_ATTENTION, block_size)
    num_owned = get_num_slots_of(group, num_slots, request_of("a", item(0, num_across)))
    num_held = compute_num_blocks(num_owned, block_size)
    assert num_across <= num_held * block_size < num_across + block_size
    assert compute_max_held_blocks(group, num_owned, num_slots) == num_held
    assert compute_num_new_blocks(num_owned, block_size, num_held) == 0
    assert compute_num_skipped_blocks(group, num_slots) == 0
