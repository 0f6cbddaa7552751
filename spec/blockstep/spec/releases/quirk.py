"""Quirk: the name of a known deviation of releases, and its story."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from blockstep.spec.core.rules import Rules
from blockstep.spec.vocabulary import Config

Change: TypeAlias = Callable[[Rules, Config], Rules]
"""A function that returns the rules with the deviation in them; it may call the rule it replaces.
"""


class Quirk(StrEnum):
    """The name of a known deviation."""

    UNWRITTEN_KEYS_STAY = "unwritten_keys_stay"
    EQUALS_PREEMPT_THE_FIRST = "equals_preempt_the_first"
    MIN_TOKENS_MASK_LENGTH = "min_tokens_mask_length"
    OUTPUT_BLOCKS_NAME_THE_LAST_ITEM = "output_blocks_name_the_last_item"
    PLACEHOLDERS_OUTLIVE_A_GAP = "placeholders_outlive_a_gap"
    VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT = "victim_without_a_row_shifts_the_next"
    ITEMS_NAMED_WITHOUT_PLACE = "items_named_without_place"
    TOUCHING_ITEM_NAMES_AN_OUTPUT_BLOCK = "touching_item_names_an_output_block"
    NOTHING_RESERVED = "nothing_reserved"
    REFUSED_HAVE_NOTHING_IN_COMMON = "refused_have_nothing_in_common"
    ONE_WAITING_QUEUE = "one_waiting_queue"
    SESSIONS_WAIT_APART = "sessions_wait_apart"
    RESTING_SESSIONS_KEEP_THEIR_SEATS = "resting_sessions_keep_their_seats"
    DRAFTS_OUTLIVE_PREEMPTION = "drafts_outlive_preemption"
    CHUNKS_TAKE_DRAFTS = "chunks_take_drafts"
    PASSED_OVER_COME_BACK_REVERSED = "passed_over_come_back_reversed"
    CACHED_TOKENS_OF_THE_LAST_HIT = "cached_tokens_of_the_last_hit"
    ADMITTED_WITH_LOOKAHEAD = "admitted_with_lookahead"
    UNNAMED_BLOCKS_FIRST = "unnamed_blocks_first"
    UNCACHED_BLOCKS_FIRST = "uncached_blocks_first"
    FRAMES_HOLD_THE_PREEMPTED = "frames_hold_the_preempted"
    FRAMES_HOLD_NO_BLOCKS = "frames_hold_no_blocks"
    RESET_DROPS_TOKENS = "reset_drops_tokens"
    RESET_NAMES_ITS_VICTIMS = "reset_names_its_victims"
    LONE_REQUEST_HAS_NO_THRESHOLD = "lone_request_has_no_threshold"
    SELF_VICTIM_LETS_OTHERS_RUN = "self_victim_lets_others_run"
    STOP_TOKENS_IGNORE_MIN_TOKENS = "stop_tokens_ignore_min_tokens"
    LENGTH_COMES_BEFORE_STOP = "length_comes_before_stop"
    TOO_LONG_IS_PASSED_OVER = "too_long_is_passed_over"
    ADMITTED_WITH_PADDING = "admitted_with_padding"
    PADDING_WAITS_AT_THE_END = "padding_waits_at_the_end"
    HIT_IS_COMPANY_ENOUGH = "hit_is_company_enough"
    DRAFTS_PUBLISH_AT_COMMIT = "drafts_publish_at_commit"
    RESUMED_BEFORE_ITS_TOKEN = "resumed_before_its_token"  # noqa: S105 - a token of a language model
    HEAD_GIVES_BACK_BY_TURNS = "head_gives_back_by_turns"
    WINDOW_HIT_CUT_BLINDLY = "window_hit_cut_blindly"
    CHUNK_BEGINS_IN_A_NULL_BLOCK = "chunk_begins_in_a_null_block"
    NARROW_WINDOW_WANTS_A_BLOCK = "narrow_window_wants_a_block"
    HIT_HOLDS_WHAT_IT_SKIPS = "hit_holds_what_it_skips"
    ONLY_THE_FIRST_FULL_GROUP_IS_CUT = "only_the_first_full_group_is_cut"
    WINDOWS_RESERVE_EVERYTHING = "windows_reserve_everything"
    CHUNK_KEEPS_A_NAMED_BLOCK = "chunk_keeps_a_named_block"
    WINDOWS_FORGET_DOUBT = "windows_forget_doubt"
    CHUNKS_ROUND_TO_NOTHING = "chunks_round_to_nothing"
    FRESH_STATES_ARE_WAITED_FOR = "fresh_states_are_waited_for"
    ONLY_FULL_ATTENTION_IS_ZEROED = "only_full_attention_is_zeroed"
    WITHDRAWN_BLOCKS_ARE_ZEROED = "withdrawn_blocks_are_zeroed"
    BLOCKS_OF_LOADS_ARE_ZEROED = "blocks_of_loads_are_zeroed"
    ADAPTERS_OF_ROWS_ONLY = "adapters_of_rows_only"
    PLACES_OF_ITEMS_ARE_ONE = "places_of_items_are_one"
    ASKING_EVICTS_AND_HOLDS = "asking_evicts_and_holds"
    ITEMS_HELD_WITHOUT_A_ROW = "items_held_without_a_row"
    WITHDRAWN_ITEMS_STAY = "withdrawn_items_stay"
    RESTORED_COMPUTE_IS_FORGOTTEN = "restored_compute_is_forgotten"
    ROOM_IS_ASKED_BEFORE_NEED = "room_is_asked_before_need"
    HEAD_READS_AHEAD_OF_THE_ENCODER = "head_reads_ahead_of_the_encoder"
    WHOLE_ITEMS_ARE_SPLIT = "whole_items_are_split"
    RESTS_OF_ITEMS_ARE_SPLIT = "rests_of_items_are_split"
    HEAD_NEVER_BEGINS_A_WHOLE_ITEM = "head_never_begins_a_whole_item"
    LOADED_ITEMS_NEED_COMPUTE = "loaded_items_need_compute"
    REMADE_ITEMS_ARE_DROPPED = "remade_items_are_dropped"
    REMADE_ITEMS_BESIDE_ARE_DROPPED = "remade_items_beside_are_dropped"
    ROOM_BESIDE_GROWS = "room_beside_grows"
    ITEMS_HELD_UNTIL_THE_ANSWER = "items_held_until_the_answer"
    HEAD_READS_WHAT_HAS_NO_ROOM = "head_reads_what_has_no_room"
    WITHOUT_ITEMS_PASSED_OVER = "without_items_passed_over"
    STATES_COME_BEFORE_ITEMS = "states_come_before_items"
    SESSIONS_KEEP_THEIR_BLOCKS = "sessions_keep_their_blocks"
    SESSIONS_KEEP_MAX_TOKENS = "sessions_keep_max_tokens"
    SESSIONS_KEEP_THEIR_GRAMMAR = "sessions_keep_their_grammar"
    SESSION_KEYS_ARE_APPENDED = "session_keys_are_appended"
    SESSIONS_KEEP_WHAT_IS_COMPUTED = "sessions_keep_what_is_computed"
    SESSIONS_KEEP_THEIR_PROMISES = "sessions_keep_their_promises"
    SESSIONS_HAVE_NOTHING_IN_COMMON = "sessions_have_nothing_in_common"
    SESSION_TELLS_ITS_LAST_STOP_TOKEN = "session_tells_its_last_stop_token"  # noqa: S105 - a token of a language model
    SESSIONS_ADMITTED_WITH_LOOKAHEAD = "sessions_admitted_with_lookahead"
    REFUSED_SESSIONS_GIVE_BACK = "refused_sessions_give_back"
    SESSIONS_GO_BACK_BLINDLY = "sessions_go_back_blindly"
    PADDING_UNMASKS_WHAT_FOLLOWS = "padding_unmasks_what_follows"
    MASK_OF_WHO_SAMPLES_BY_NOW = "mask_of_who_samples_by_now"
    REASONING_ENDS_WITH_ITS_STEP = "reasoning_ends_with_its_step"
    REASONING_ENDS_AT_THE_LAST_TOKEN = "reasoning_ends_at_the_last_token"  # noqa: S105 - as above
    REASONING_IS_SOUGHT_IN_THE_NEXT_CHUNK = "reasoning_is_sought_in_the_next_chunk"
    HEAD_LOOKS_BEHIND_ONCE = "head_looks_behind_once"
    HEAD_CUTS_SHORT_WINDOWS_TWICE = "head_cuts_short_windows_twice"
    HEAD_GIVES_BACK_THE_LAST_BLOCK = "head_gives_back_the_last_block"
    WINDOWS_RESERVE_A_WHOLE_STEP = "windows_reserve_a_whole_step"
    WINDOWS_RESERVE_STEPS_IN_FLIGHT = "windows_reserve_steps_in_flight"
    ALL_IN_FLIGHT_IS_IN_DOUBT = "all_in_flight_is_in_doubt"
    STATES_ARE_LEFT_AT_ONCE = "states_are_left_at_once"
    CHUNKS_END_AT_CHECKPOINTS = "chunks_end_at_checkpoints"
    SKIPPED_READING_STILL_LOADS = "skipped_reading_still_loads"
    SKIPPED_READING_COUNTS_AS_ASKED = "skipped_reading_counts_as_asked"
    LAST_TOKEN_IS_LOADED = "last_token_is_loaded"  # noqa: S105 - as above
    LOADS_PUBLISH_AT_ONCE = "loads_publish_at_once"
    RETURNED_THOUGH_REFUSED = "returned_though_refused"
    LOADED_WAIT_BEHIND_THE_HEAD = "loaded_wait_behind_the_head"
    LOADED_KEEP_THEIR_BLOCKS = "loaded_keep_their_blocks"
    GROUPS_LOAD_BY_TURNS = "groups_load_by_turns"
    ONLY_THE_FIRST_GOES_BACK = "only_the_first_goes_back"
    FAILED_TELL_WHAT_IS_NOT_COUNTED = "failed_tell_what_is_not_counted"
    HOLDS_ARE_ONE = "holds_are_one"
    SKIPPED_LOADS_ARE_SETTLED = "skipped_loads_are_settled"
    ENDED_LEAVE_THEIR_WINDOWS_FIRST = "ended_leave_their_windows_first"
    ENDED_LEAVE_WHAT_IS_ANSWERED_FIRST = "ended_leave_what_is_answered_first"
    CACHED_TOKENS_OF_THE_OFFER = "cached_tokens_of_the_offer"
    EMPTY_TRANSFERS_ARE_RESET = "empty_transfers_are_reset"
    POOL_AND_STORE_RESET_APART = "pool_and_store_reset_apart"
    RESET_WITHOUT_A_STORE_SUCCEEDS = "reset_without_a_store_succeeds"
    TRANSFERS_ARE_NO_WORK = "transfers_are_no_work"
    NULL_BLOCKS_ARE_TOLD = "null_blocks_are_told"
    RESETS_ARE_TOLD_LATE = "resets_are_told_late"
    EVENTS_NAME_NO_GROUP = "events_name_no_group"


@dataclass(frozen=True, slots=True)
class QuirkStory:
    """The story of a quirk, and the change that it makes."""

    quirk: Quirk
    change: Change
    title: str
    property_ids: tuple[str, ...]
    """The properties that it breaks; none if it only behaves otherwise."""
    upstream: str
    """The issue or pull request, or that none was found."""
    seen_in: str
    """The releases in which it was seen by running them; others were not tried."""
    program: str
    """A small program that shows it, in words."""
    upon: tuple[Quirk, ...] = ()
    """The quirks that it changes, without which it has no effect."""
