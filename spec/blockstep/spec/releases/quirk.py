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
    OUTPUT_BLOCK_KEY_HAS_ONLY_THE_LAST_ITEM = "output_block_key_has_only_the_last_item"
    STALE_DRAFT_PLACEHOLDERS = "stale_draft_placeholders"
    VICTIM_WITHOUT_A_ROW_SKIPS_A_REQUEST = "victim_without_a_row_skips_a_request"
    ITEM_OFFSET_NOT_IN_KEY = "item_offset_not_in_key"
    ADJACENT_ITEM_IN_OUTPUT_BLOCK_KEY = "adjacent_item_in_output_block_key"
    NO_FULL_ISL_RESERVE = "no_full_isl_reserve"
    NO_COMMON_PREFIX_WHILE_BLOCKS_ARE_SHORT = "no_common_prefix_while_blocks_are_short"
    SINGLE_WAITING_QUEUE = "single_waiting_queue"
    SEPARATE_QUEUE_FOR_COMPUTED_REQUESTS = "separate_queue_for_computed_requests"
    IDLE_SESSIONS_KEEP_RUNNING_SLOTS = "idle_sessions_keep_running_slots"
    DRAFTS_OUTLIVE_PREEMPTION = "drafts_outlive_preemption"
    CHUNKS_TAKE_DRAFTS = "chunks_take_drafts"
    SKIPPED_REQUESTS_RETURN_REVERSED = "skipped_requests_return_reversed"
    CACHED_TOKENS_OF_THE_LATEST_HIT = "cached_tokens_of_the_latest_hit"
    ADMITTED_WITH_LOOKAHEAD = "admitted_with_lookahead"
    BLOCKS_WITHOUT_KEYS_REUSED_FIRST = "blocks_without_keys_reused_first"
    LIFO_REUSE_WITHOUT_CACHING = "lifo_reuse_without_caching"
    PREEMPTED_WAIT_FOR_ALL_THEIR_FRAMES = "preempted_wait_for_all_their_frames"
    BLOCKS_FREED_WHILE_FRAMES_WRITE = "blocks_freed_while_frames_write"
    RESET_DROPS_TOKENS = "reset_drops_tokens"
    NEXT_PLAN_NAMES_VICTIMS_OF_A_RESET = "next_plan_names_victims_of_a_reset"
    SINGLE_REQUEST_HAS_NO_THRESHOLD = "single_request_has_no_threshold"
    STEP_CONTINUES_AFTER_SELF_PREEMPTION = "step_continues_after_self_preemption"
    STOP_TOKENS_IGNORE_MIN_TOKENS = "stop_tokens_ignore_min_tokens"
    LENGTH_COMES_BEFORE_STOP = "length_comes_before_stop"
    PROMPT_BEYOND_THE_BUDGET_IS_SKIPPED = "prompt_beyond_the_budget_is_skipped"
    PADDING_ON_ADMISSION = "padding_on_admission"
    PADDING_WAITS_AT_MAX_MODEL_LEN = "padding_waits_at_max_model_len"
    PADDING_ON_HIT_WITHOUT_OTHER_REQUESTS = "padding_on_hit_without_other_requests"
    DRAFTS_PUBLISH_AT_COMMIT = "drafts_publish_at_commit"
    RESUMED_WITH_TOKEN_IN_FLIGHT = "resumed_with_token_in_flight"  # noqa: S105 - a token of a language model
    DRAFT_HEAD_DROP_PER_GROUP = "draft_head_drop_per_group"
    WINDOW_HIT_CUT_WITHOUT_CHECK = "window_hit_cut_without_check"
    FIRST_BLOCK_OF_AN_ATTENTION_CHUNK_IS_SKIPPED = "first_block_of_an_attention_chunk_is_skipped"
    WINDOW_OF_ONE_NEEDS_A_CACHED_BLOCK = "window_of_one_needs_a_cached_block"
    WINDOW_OF_ONE_HOLDS_A_SKIPPED_BLOCK = "window_of_one_holds_a_skipped_block"
    ONLY_FIRST_FULL_ATTENTION_GROUP_IS_CUT = "only_first_full_attention_group_is_cut"
    WINDOW_RESERVES_THE_FULL_REQUEST = "window_reserves_the_full_request"
    ATTENTION_CHUNK_KEEPS_A_PUBLISHED_BLOCK = "attention_chunk_keeps_a_published_block"
    WINDOW_MOVES_AS_IF_DRAFTS_WERE_ACCEPTED = "window_moves_as_if_drafts_were_accepted"
    CHUNK_ROUNDS_DOWN_TO_ZERO = "chunk_rounds_down_to_zero"
    REQUESTS_WAIT_FOR_STATES_OF_THE_SAME_STEP = "requests_wait_for_states_of_the_same_step"
    ONLY_FULL_ATTENTION_IS_ZEROED = "only_full_attention_is_zeroed"
    BLOCKS_OF_WITHDRAWN_ROWS_ARE_ZEROED = "blocks_of_withdrawn_rows_are_zeroed"
    BLOCKS_OF_LOADS_ARE_ZEROED = "blocks_of_loads_are_zeroed"
    LORA_SLOTS_OF_ROWS_ONLY = "lora_slots_of_rows_only"
    REPEATED_ITEM_IS_RELEASED_AT_ITS_FIRST_PLACE = "repeated_item_is_released_at_its_first_place"
    ENCODER_CACHE_CHANGES_BEFORE_ADMISSION = "encoder_cache_changes_before_admission"
    ITEMS_HELD_WITHOUT_A_ROW = "items_held_without_a_row"
    WITHDRAWN_ITEMS_COUNT_AS_ENCODED = "withdrawn_items_count_as_encoded"
    ENCODER_BUDGET_OF_WITHDRAWN_ROWS_IS_LOST = "encoder_budget_of_withdrawn_rows_is_lost"
    CHUNK_ENDS_BEFORE_AN_UNNEEDED_ITEM = "chunk_ends_before_an_unneeded_item"
    DRAFT_HEAD_READS_AN_UNENCODED_ITEM = "draft_head_reads_an_unencoded_item"
    WHOLE_ITEMS_ARE_SPLIT = "whole_items_are_split"
    REMAINDER_OF_AN_ITEM_IS_SPLIT = "remainder_of_an_item_is_split"
    DRAFT_HEAD_STOPS_BEFORE_WHOLE_ITEMS = "draft_head_stops_before_whole_items"
    LOADED_ITEMS_NEED_ENCODER_BUDGET = "loaded_items_need_encoder_budget"
    REENCODED_ITEMS_ARE_DROPPED = "reencoded_items_are_dropped"
    REENCODED_CROSS_ATTENTION_ITEMS_ARE_DROPPED = "reencoded_cross_attention_items_are_dropped"
    CROSS_ATTENTION_CACHE_OVERCOUNTS_FREE_SPACE = "cross_attention_cache_overcounts_free_space"
    ITEMS_HELD_UNTIL_THE_COMMIT = "items_held_until_the_commit"
    DRAFT_HEAD_READS_AN_ITEM_WITHOUT_SPACE = "draft_head_reads_an_item_without_space"
    REQUEST_WITHOUT_ENCODER_SPACE_IS_SKIPPED = "request_without_encoder_space_is_skipped"
    CHUNK_IS_CUT_FOR_STATES_BEFORE_ITEMS = "chunk_is_cut_for_states_before_items"
    SESSIONS_KEEP_THEIR_BLOCKS = "sessions_keep_their_blocks"
    SESSIONS_KEEP_MAX_TOKENS = "sessions_keep_max_tokens"
    SESSIONS_KEEP_THEIR_GRAMMAR = "sessions_keep_their_grammar"
    SESSION_KEYS_ARE_APPENDED = "session_keys_are_appended"
    SESSIONS_KEEP_WHAT_IS_COMPUTED = "sessions_keep_what_is_computed"
    SESSIONS_KEEP_PLACEHOLDERS = "sessions_keep_placeholders"
    COMMON_PREFIX_COUNTS_IDLE_SESSIONS = "common_prefix_counts_idle_sessions"
    SESSION_REPEATS_ITS_STOP_TOKEN = "session_repeats_its_stop_token"  # noqa: S105 - a token of a language model
    SESSIONS_ADMITTED_WITH_LOOKAHEAD = "sessions_admitted_with_lookahead"
    REFUSED_SESSION_FREES_SKIPPED_BLOCKS = "refused_session_frees_skipped_blocks"
    SESSION_KEEPS_BLOCKS_WITHOUT_CHECK = "session_keeps_blocks_without_check"
    FORBIDDEN_DRAFT_UNMASKS_LATER_POSITIONS = "forbidden_draft_unmasks_later_positions"
    MASK_HAS_THE_ROWS_THAT_SAMPLE_NOW = "mask_has_the_rows_that_sample_now"
    REASONING_ENDS_WITH_ITS_STEP = "reasoning_ends_with_its_step"
    REASONING_ENDS_AT_THE_LAST_TOKEN = "reasoning_ends_at_the_last_token"  # noqa: S105 - as above
    REASONING_END_IS_SEARCHED_IN_THE_NEXT_INPUT = "reasoning_end_is_searched_in_the_next_input"
    DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE = "draft_head_block_is_looked_up_once"
    DRAFT_HEAD_CUTS_SHORT_WINDOWS_TWICE = "draft_head_cuts_short_windows_twice"
    DRAFT_HEAD_DROPS_THE_LAST_PROMPT_BLOCK = "draft_head_drops_the_last_prompt_block"
    WINDOW_RESERVES_ONE_STEP = "window_reserves_one_step"
    WINDOW_RESERVES_STEPS_IN_FLIGHT = "window_reserves_steps_in_flight"
    WINDOW_WAITS_FOR_COMMITS = "window_waits_for_commits"
    STATES_ARE_FREED_AT_ONCE = "states_are_freed_at_once"
    CHUNKS_END_AT_CHECKPOINTS = "chunks_end_at_checkpoints"
    SKIP_CACHE_STILL_LOADS = "skip_cache_still_loads"
    SKIP_CACHE_COUNTS_AS_A_STORE_MISS = "skip_cache_counts_as_a_store_miss"
    LAST_TOKEN_IS_LOADED = "last_token_is_loaded"  # noqa: S105 - as above
    LOADS_ARE_PUBLISHED_BEFORE_THEY_ARE_LOADED = "loads_are_published_before_they_are_loaded"
    LOAD_ENDS_WITHOUT_ADMISSION = "load_ends_without_admission"
    LOADED_REQUEST_WAITS_BEHIND_THE_HEAD = "loaded_request_waits_behind_the_head"
    LOADED_REQUEST_KEEPS_ITS_BLOCKS = "loaded_request_keeps_its_blocks"
    EXTERNAL_BLOCKS_PER_GROUP = "external_blocks_per_group"
    INVALID_BLOCK_ROLLS_BACK_ONE_REQUEST = "invalid_block_rolls_back_one_request"
    FAILED_REQUEST_REPORTS_MINUS_ONE_CACHED_TOKENS = (
        "failed_request_reports_minus_one_cached_tokens"
    )
    FIRST_TRANSFER_FREES_THE_BLOCKS = "first_transfer_frees_the_blocks"
    SKIPPED_LOAD_BLOCKS_COUNT_AS_CACHED = "skipped_load_blocks_count_as_cached"
    FINISHED_REQUEST_FIRST_FREES_BLOCKS_OUTSIDE_WINDOWS = (
        "finished_request_first_frees_blocks_outside_windows"
    )
    FINISHED_REQUEST_FIRST_FREES_COMMITTED_BLOCKS = "finished_request_first_frees_committed_blocks"
    CACHED_TOKENS_AS_THE_STORE_OFFERED = "cached_tokens_as_the_store_offered"
    RESET_IGNORES_TRANSFERS_WITHOUT_BLOCKS = "reset_ignores_transfers_without_blocks"
    POOL_AND_STORE_RESET_SEPARATELY = "pool_and_store_reset_separately"
    RESET_WITHOUT_A_STORE_SUCCEEDS = "reset_without_a_store_succeeds"
    LOOP_SLEEPS_DURING_TRANSFERS = "loop_sleeps_during_transfers"
    NULL_BLOCKS_ARE_REPORTED = "null_blocks_are_reported"
    RESET_EVENT_IS_LATE = "reset_event_is_late"
    EVENTS_WITHOUT_GROUPS = "events_without_groups"


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
