"""Strict: the specification's own rule for every decision that some release takes otherwise."""

from __future__ import annotations

from typing import Final, TypeVar

from blockstep.spec.beside.encoder import (
    free_items,
    get_freed,
    get_item_holder,
    is_item_needed,
    is_item_split,
    withdraw_items,
)
from blockstep.spec.beside.grammar import get_next_stand
from blockstep.spec.hashing import get_item_keys
from blockstep.spec.lives.commit import publishes_at_commit
from blockstep.spec.lives.endings import compute_stop
from blockstep.spec.lives.masks import has_mask_row
from blockstep.spec.lives.sessions import (
    get_chunk_request,
    get_num_kept,
    get_num_kept_keys,
    get_stand_of_chunk,
    get_stopped,
)
from blockstep.spec.memory.prefix import get_joint_hit
from blockstep.spec.memory.slots import count_reserved_blocks, count_skipped_blocks, revoke_slots
from blockstep.spec.memory.states import compute_num_certain
from blockstep.spec.pool import free_blocks, withdraw_blocks
from blockstep.spec.requests import count_in_doubt
from blockstep.spec.rules import Rules
from blockstep.spec.step.admission import get_num_cached_tokens, is_held_by_frames
from blockstep.spec.step.plans import is_attended
from blockstep.spec.step.preemption import compute_next_index, get_preempted
from blockstep.spec.step.queues import count_seats, get_open_queue, get_rank, waits_apart
from blockstep.spec.step.share import get_aligned_share, get_threshold

T = TypeVar("T")


def as_is(what: T, *_: object) -> T:
    """What is asked about, as it is. Source: architecture D5."""
    return what


def never(*_: object) -> bool:
    """No, whatever is asked about. Source: architecture D5."""
    return False


def none(*_: object) -> int:
    """Not one, whatever is asked about. Source: architecture D5."""
    return 0


def get_strict_rules() -> Rules:
    """The rules of the specification proper. Source: architecture D5."""
    return STRICT_RULES


STRICT_RULES: Final = Rules(
    quirks=frozenset(),
    remake=(get_strict_rules, ()),
    get_item_keys=get_item_keys,
    get_request_behind_outputs=as_is,
    free_blocks=free_blocks,
    revoke_slots=revoke_slots,
    reserves_full_isl=True,
    get_num_lookahead_at_admission=none,
    publishes_at_commit=publishes_at_commit,
    get_joint_hit=get_joint_hit,
    count_reserved_blocks=count_reserved_blocks,
    count_skipped_blocks=count_skipped_blocks,
    get_num_in_doubt=as_is,
    count_in_doubt=count_in_doubt,
    compute_num_certain=compute_num_certain,
    get_aligned_share=get_aligned_share,
    hide_states=withdraw_blocks,
    waits_for_states=never,
    is_zeroed=is_attended,
    zeroes_withdrawn=False,
    get_victim_rank=get_rank,
    compute_next_index=compute_next_index,
    goes_on_after_self_victim=never,
    get_threshold=get_threshold,
    waits_apart=waits_apart,
    get_open_queue=get_open_queue,
    count_seats=count_seats,
    get_order_of_return=as_is,
    passes_over_too_long=False,
    counts_adapters_of_rows_only=False,
    get_num_cached_tokens=get_num_cached_tokens,
    get_item_holder=get_item_holder,
    is_item_needed=is_item_needed,
    is_item_split=is_item_split,
    asks_room_first=False,
    external_costs_compute=False,
    get_encoder_once_asked=as_is,
    keeps_items_without_row=False,
    forgets_restored_compute=False,
    withdraw_items=withdraw_items,
    free_items=free_items,
    get_freed=get_freed,
    get_num_padding=none,
    keeps_drafts=never,
    get_preempted=get_preempted,
    is_held_by_frames=is_held_by_frames,
    get_frames_after_reset=as_is,
    get_reset_request=as_is,
    names_victims_of_resets=False,
    get_num_kept=get_num_kept,
    get_stand_of_chunk=get_stand_of_chunk,
    get_num_kept_keys=get_num_kept_keys,
    get_chunk_request=get_chunk_request,
    get_stopped=get_stopped,
    hint_is_of_all_holders=False,
    skips_before_the_gate=True,
    drops_rows_behind_stops=True,
    takes_back_from_sessions=True,
    tells_resets_at_once=True,
    get_next_stand=get_next_stand,
    get_settled=as_is,
    masks_behind_placeholders=True,
    has_mask_row=has_mask_row,
    get_told_stop=as_is,
    compute_stop=compute_stop,
)
