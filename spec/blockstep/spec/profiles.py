"""Profiles: the quirks of each release (`releases` describes each quirk).

With its profile on, the specification follows a release in its known defects, so that a new one
shows. A release between two that are listed here has the quirks of the older one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from blockstep.spec.core.state import State, create_state
from blockstep.spec.releases import QUIRKS, Quirk, QuirkStory, get_rules
from blockstep.spec.vocabulary import Config

__all__ = ["PROFILES", "QUIRKS", "RELEASES", "STRICT", "Profile", "Quirk", "QuirkStory"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of quirks."""

    name: str
    quirks: frozenset[Quirk] = frozenset()
    spares: bool = True
    """Whether events are left out that an engine declines because of a known defect."""


PREFIX = "vllm-"
"""Prefix of the profiles of releases; the release number follows."""
STRICT = Profile("strict", spares=False)
SPARING = Profile("sparing")
"""No quirk is followed, but events that an engine declines are left out."""
HISTORY: tuple[tuple[str, frozenset[Quirk], frozenset[Quirk]], ...] = (
    (
        "0.11.0",
        frozenset(
            {
                Quirk.UNWRITTEN_KEYS_STAY,
                Quirk.EQUALS_PREEMPT_THE_FIRST,
                Quirk.STALE_DRAFT_PLACEHOLDERS,
                Quirk.OUTPUT_BLOCK_KEY_HAS_ONLY_THE_LAST_ITEM,
                Quirk.VICTIM_WITHOUT_A_ROW_SKIPS_A_REQUEST,
                Quirk.RESUMED_WITH_TOKEN_IN_FLIGHT,
                Quirk.ITEM_OFFSET_NOT_IN_KEY,
                Quirk.ADJACENT_ITEM_IN_OUTPUT_BLOCK_KEY,
                Quirk.NO_FULL_ISL_RESERVE,
                Quirk.SINGLE_WAITING_QUEUE,
                Quirk.SKIPPED_REQUESTS_RETURN_REVERSED,
                Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
                Quirk.LENGTH_COMES_BEFORE_STOP,
                Quirk.PROMPT_BEYOND_THE_BUDGET_IS_SKIPPED,
                Quirk.DRAFT_HEAD_DROP_PER_GROUP,
                Quirk.FIRST_BLOCK_OF_AN_ATTENTION_CHUNK_IS_SKIPPED,
                Quirk.WINDOW_OF_ONE_NEEDS_A_CACHED_BLOCK,
                Quirk.WINDOW_OF_ONE_HOLDS_A_SKIPPED_BLOCK,
                Quirk.ATTENTION_CHUNK_KEEPS_A_PUBLISHED_BLOCK,
                Quirk.WINDOW_MOVES_AS_IF_DRAFTS_WERE_ACCEPTED,
                Quirk.LORA_SLOTS_OF_ROWS_ONLY,
            }
        ),
        frozenset(),
    ),
    (
        "0.11.1",
        frozenset({Quirk.MIN_TOKENS_MASK_LENGTH, Quirk.NO_COMMON_PREFIX_WHILE_BLOCKS_ARE_SHORT}),
        frozenset(
            {
                Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
                Quirk.LENGTH_COMES_BEFORE_STOP,
                Quirk.ATTENTION_CHUNK_KEEPS_A_PUBLISHED_BLOCK,
            }
        ),
    ),
    (
        "0.12.0",
        frozenset({Quirk.DRAFTS_OUTLIVE_PREEMPTION, Quirk.CHUNKS_TAKE_DRAFTS}),
        frozenset({Quirk.PROMPT_BEYOND_THE_BUDGET_IS_SKIPPED}),
    ),
    ("0.13.0", frozenset({Quirk.RESET_EVENT_IS_LATE}), frozenset()),
    (
        "0.14.0",
        frozenset(),
        frozenset(
            {
                Quirk.SKIPPED_REQUESTS_RETURN_REVERSED,
                Quirk.DRAFTS_OUTLIVE_PREEMPTION,
                Quirk.WINDOW_OF_ONE_HOLDS_A_SKIPPED_BLOCK,
                Quirk.NO_COMMON_PREFIX_WHILE_BLOCKS_ARE_SHORT,
            }
        ),
    ),
    ("0.16.0", frozenset(), frozenset({Quirk.CHUNKS_TAKE_DRAFTS})),
    (
        "0.17.1",
        frozenset(
            {
                Quirk.NULL_BLOCKS_ARE_REPORTED,
                Quirk.EVENTS_WITHOUT_GROUPS,
                Quirk.ONLY_FIRST_FULL_ATTENTION_GROUP_IS_CUT,
                Quirk.FORBIDDEN_DRAFT_UNMASKS_LATER_POSITIONS,
                Quirk.MASK_HAS_THE_ROWS_THAT_SAMPLE_NOW,
                Quirk.REASONING_ENDS_WITH_ITS_STEP,
                Quirk.REASONING_ENDS_AT_THE_LAST_TOKEN,
            }
        ),
        frozenset(),
    ),
    ("0.18.0", frozenset(), frozenset({Quirk.SINGLE_WAITING_QUEUE})),
    (
        "0.19.0",
        frozenset(
            {
                Quirk.SKIP_CACHE_STILL_LOADS,
                Quirk.LAST_TOKEN_IS_LOADED,
                Quirk.LOADS_ARE_PUBLISHED_BEFORE_THEY_ARE_LOADED,
                Quirk.LOAD_ENDS_WITHOUT_ADMISSION,
                Quirk.LOADED_REQUEST_WAITS_BEHIND_THE_HEAD,
                Quirk.LOADED_REQUEST_KEEPS_ITS_BLOCKS,
                Quirk.EXTERNAL_BLOCKS_PER_GROUP,
                Quirk.INVALID_BLOCK_ROLLS_BACK_ONE_REQUEST,
                Quirk.FAILED_REQUEST_REPORTS_MINUS_ONE_CACHED_TOKENS,
                Quirk.FIRST_TRANSFER_FREES_THE_BLOCKS,
                Quirk.BLOCKS_FREED_WHILE_FRAMES_WRITE,
                Quirk.SKIPPED_LOAD_BLOCKS_COUNT_AS_CACHED,
                Quirk.FINISHED_REQUEST_FIRST_FREES_BLOCKS_OUTSIDE_WINDOWS,
                Quirk.RESET_IGNORES_TRANSFERS_WITHOUT_BLOCKS,
                Quirk.LOOP_SLEEPS_DURING_TRANSFERS,
                Quirk.POOL_AND_STORE_RESET_SEPARATELY,
                Quirk.WINDOW_HIT_CUT_WITHOUT_CHECK,
                Quirk.WINDOW_RESERVES_THE_FULL_REQUEST,
                Quirk.CHUNK_ROUNDS_DOWN_TO_ZERO,
                Quirk.SESSIONS_KEEP_THEIR_BLOCKS,
                Quirk.SESSIONS_KEEP_MAX_TOKENS,
                Quirk.SESSIONS_KEEP_THEIR_GRAMMAR,
                Quirk.REASONING_END_IS_SEARCHED_IN_THE_NEXT_INPUT,
                Quirk.SESSION_KEYS_ARE_APPENDED,
                Quirk.SESSIONS_KEEP_WHAT_IS_COMPUTED,
                Quirk.SESSIONS_KEEP_PLACEHOLDERS,
                Quirk.COMMON_PREFIX_COUNTS_IDLE_SESSIONS,
                Quirk.SESSION_REPEATS_ITS_STOP_TOKEN,
                Quirk.SESSIONS_ADMITTED_WITH_LOOKAHEAD,
                Quirk.REFUSED_SESSION_FREES_SKIPPED_BLOCKS,
                Quirk.REQUESTS_WAIT_FOR_STATES_OF_THE_SAME_STEP,
                Quirk.ONLY_FULL_ATTENTION_IS_ZEROED,
                Quirk.BLOCKS_OF_WITHDRAWN_ROWS_ARE_ZEROED,
                Quirk.BLOCKS_OF_LOADS_ARE_ZEROED,
                Quirk.REPEATED_ITEM_IS_RELEASED_AT_ITS_FIRST_PLACE,
                Quirk.ENCODER_CACHE_CHANGES_BEFORE_ADMISSION,
                Quirk.ITEMS_HELD_WITHOUT_A_ROW,
                Quirk.WITHDRAWN_ITEMS_COUNT_AS_ENCODED,
                Quirk.ENCODER_BUDGET_OF_WITHDRAWN_ROWS_IS_LOST,
                Quirk.CHUNK_ENDS_BEFORE_AN_UNNEEDED_ITEM,
                Quirk.DRAFT_HEAD_READS_AN_UNENCODED_ITEM,
                Quirk.WHOLE_ITEMS_ARE_SPLIT,
                Quirk.DRAFT_HEAD_STOPS_BEFORE_WHOLE_ITEMS,
                Quirk.LOADED_ITEMS_NEED_ENCODER_BUDGET,
                Quirk.REENCODED_ITEMS_ARE_DROPPED,
                Quirk.CROSS_ATTENTION_CACHE_OVERCOUNTS_FREE_SPACE,
            }
        ),
        frozenset(
            {
                Quirk.ITEM_OFFSET_NOT_IN_KEY,
                Quirk.ADJACENT_ITEM_IN_OUTPUT_BLOCK_KEY,
                Quirk.NO_FULL_ISL_RESERVE,
            }
        ),
    ),
    (
        "0.20.0",
        frozenset(
            {
                Quirk.CACHED_TOKENS_OF_THE_LATEST_HIT,
                Quirk.DRAFT_HEAD_BLOCK_IS_LOOKED_UP_ONCE,
                Quirk.DRAFT_HEAD_CUTS_SHORT_WINDOWS_TWICE,
                # 0.20.0 has the same bound in each step, too, which is not followed.
                Quirk.WINDOW_RESERVES_ONE_STEP,
            }
        ),
        frozenset(
            {
                Quirk.EVENTS_WITHOUT_GROUPS,
                Quirk.DRAFT_HEAD_DROP_PER_GROUP,
                Quirk.WINDOW_HIT_CUT_WITHOUT_CHECK,
                Quirk.WINDOW_RESERVES_THE_FULL_REQUEST,
            }
        ),
    ),
    ("0.22.1", frozenset(), frozenset({Quirk.FAILED_REQUEST_REPORTS_MINUS_ONE_CACHED_TOKENS})),
    ("0.23.0", frozenset({Quirk.ADMITTED_WITH_LOOKAHEAD}), frozenset()),
    (
        "0.24.0",
        frozenset({Quirk.BLOCKS_WITHOUT_KEYS_REUSED_FIRST, Quirk.LIFO_REUSE_WITHOUT_CACHING}),
        # 0.33.0 still cuts a short window twice, but no run can show it: the adapter runs no groups
        # of several block sizes on releases that publish parts of blocks.
        frozenset({Quirk.EXTERNAL_BLOCKS_PER_GROUP, Quirk.DRAFT_HEAD_CUTS_SHORT_WINDOWS_TWICE}),
    ),
    (
        "0.25.0",
        frozenset(
            {
                Quirk.NEXT_PLAN_NAMES_VICTIMS_OF_A_RESET,
                Quirk.PADDING_ON_ADMISSION,
                Quirk.PADDING_WAITS_AT_MAX_MODEL_LEN,
                # It is in 0.25.1 and not in 0.19.1; the releases between them were not examined.
                Quirk.RESET_WITHOUT_A_STORE_SUCCEEDS,
            }
        ),
        frozenset(),
    ),
    (
        "0.26.0",
        frozenset(
            {
                Quirk.WINDOW_RESERVES_STEPS_IN_FLIGHT,
                Quirk.WINDOW_WAITS_FOR_COMMITS,
                Quirk.STATES_ARE_FREED_AT_ONCE,
            }
        ),
        frozenset(
            {
                Quirk.CACHED_TOKENS_OF_THE_LATEST_HIT,
                Quirk.WINDOW_MOVES_AS_IF_DRAFTS_WERE_ACCEPTED,
                Quirk.WINDOW_RESERVES_ONE_STEP,
            }
        ),
    ),
    (
        "0.27.0",
        frozenset({Quirk.PREEMPTED_WAIT_FOR_ALL_THEIR_FRAMES, Quirk.RESET_DROPS_TOKENS}),
        frozenset(
            {
                Quirk.RESUMED_WITH_TOKEN_IN_FLIGHT,
                Quirk.LIFO_REUSE_WITHOUT_CACHING,
                Quirk.BLOCKS_OF_LOADS_ARE_ZEROED,
            }
        ),
    ),
    (
        "0.28.0",
        frozenset({Quirk.LIFO_REUSE_WITHOUT_CACHING}),
        frozenset(
            {
                Quirk.VICTIM_WITHOUT_A_ROW_SKIPS_A_REQUEST,
                Quirk.REASONING_ENDS_WITH_ITS_STEP,
                Quirk.REASONING_ENDS_AT_THE_LAST_TOKEN,
                Quirk.REASONING_END_IS_SEARCHED_IN_THE_NEXT_INPUT,
                Quirk.CHUNK_ROUNDS_DOWN_TO_ZERO,
                Quirk.ONLY_FULL_ATTENTION_IS_ZEROED,
            }
        ),
    ),
    (
        "0.29.0",
        frozenset({Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS}),
        frozenset({Quirk.MIN_TOKENS_MASK_LENGTH, Quirk.PADDING_WAITS_AT_MAX_MODEL_LEN}),
    ),
    ("0.30.0", frozenset({Quirk.PADDING_ON_HIT_WITHOUT_OTHER_REQUESTS}), frozenset()),
    (
        "0.31.0",
        frozenset(
            {
                Quirk.SINGLE_WAITING_QUEUE,
                Quirk.SEPARATE_QUEUE_FOR_COMPUTED_REQUESTS,
                Quirk.IDLE_SESSIONS_KEEP_RUNNING_SLOTS,
                Quirk.SINGLE_REQUEST_HAS_NO_THRESHOLD,
            }
        ),
        frozenset({Quirk.OUTPUT_BLOCK_KEY_HAS_ONLY_THE_LAST_ITEM}),
    ),
    (
        "0.32.0",
        frozenset({Quirk.DRAFT_HEAD_DROPS_THE_LAST_PROMPT_BLOCK, Quirk.CHUNKS_END_AT_CHECKPOINTS}),
        frozenset(
            {
                Quirk.SKIP_CACHE_STILL_LOADS,
                Quirk.LOADED_REQUEST_WAITS_BEHIND_THE_HEAD,
                Quirk.ONLY_FIRST_FULL_ATTENTION_GROUP_IS_CUT,
                Quirk.SESSIONS_KEEP_MAX_TOKENS,
                Quirk.SESSION_KEYS_ARE_APPENDED,
                Quirk.SESSIONS_KEEP_PLACEHOLDERS,
            }
        ),
    ),
    (
        "0.33.0",
        frozenset(
            {
                Quirk.STEP_CONTINUES_AFTER_SELF_PREEMPTION,
                Quirk.DRAFTS_PUBLISH_AT_COMMIT,
                Quirk.SESSION_KEEPS_BLOCKS_WITHOUT_CHECK,
                Quirk.ITEMS_HELD_UNTIL_THE_COMMIT,
                Quirk.DRAFT_HEAD_READS_AN_ITEM_WITHOUT_SPACE,
                Quirk.REMAINDER_OF_AN_ITEM_IS_SPLIT,
                Quirk.REQUEST_WITHOUT_ENCODER_SPACE_IS_SKIPPED,
                Quirk.CHUNK_IS_CUT_FOR_STATES_BEFORE_ITEMS,
                Quirk.REENCODED_CROSS_ATTENTION_ITEMS_ARE_DROPPED,
                Quirk.FINISHED_REQUEST_FIRST_FREES_COMMITTED_BLOCKS,
                Quirk.CACHED_TOKENS_AS_THE_STORE_OFFERED,
                Quirk.SKIP_CACHE_COUNTS_AS_A_STORE_MISS,
            }
        ),
        frozenset(
            {
                Quirk.FINISHED_REQUEST_FIRST_FREES_BLOCKS_OUTSIDE_WINDOWS,
                Quirk.SESSIONS_KEEP_WHAT_IS_COMPUTED,
                Quirk.LORA_SLOTS_OF_ROWS_ONLY,
                Quirk.REPEATED_ITEM_IS_RELEASED_AT_ITS_FIRST_PLACE,
                Quirk.DRAFT_HEAD_READS_AN_UNENCODED_ITEM,
                Quirk.WHOLE_ITEMS_ARE_SPLIT,
                Quirk.REENCODED_ITEMS_ARE_DROPPED,
                Quirk.BLOCKS_FREED_WHILE_FRAMES_WRITE,
            }
        ),
    ),
)
"""Releases of vLLM that changed a quirk, oldest first: quirks that appeared, and that disappeared.
"""


def _list_releases() -> tuple[Profile, ...]:
    """Return a profile for each entry of the history."""
    found: list[Profile] = []
    quirks: frozenset[Quirk] = frozenset()
    for version, came, went in HISTORY:
        quirks = (quirks | came) - went
        found.append(Profile(PREFIX + version, quirks))
    return tuple(found)


RELEASES: tuple[Profile, ...] = _list_releases()
PROFILES: tuple[Profile, ...] = (STRICT, SPARING, *RELEASES)


def get_profile(name: str) -> Profile | None:
    """Return the profile called `name`, or None. Profiles and quirks can be added: `strict+QUIRK`.

    A release of vLLM that is not in the table has the quirks of the newest before it. Source:
    architecture D5.
    """
    known = {profile.name: profile for profile in PROFILES}
    if name in known:
        return known[name]
    quirks: set[Quirk] = set()
    spares = False
    for part in name.split("+"):
        profile = known.get(part) or _get_older(part)
        if profile is not None:
            quirks |= profile.quirks
            spares |= profile.spares
        elif part in list(Quirk):
            quirks.add(Quirk(part))
        else:
            return None
    return Profile(name, frozenset(quirks), spares)


def read_release_number(version: str) -> tuple[int, ...] | None:
    """Return the number by which releases are ordered: (0, 19, 1) for `0.19.1` and `0.19.1rc1`.

    Source: architecture D5.
    """
    digits = ["".join(takewhile(str.isdecimal, part)) for part in version.split(".")[:3]]
    return tuple(map(int, digits)) if len(digits) == 3 and all(digits) else None


def _get_older(name: str) -> Profile | None:
    """Return the newest profile of a release that is not newer than that of `name`."""
    number = read_release_number(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if number is None:
        return None
    older = [
        profile
        for profile in RELEASES
        if (read_release_number(profile.name.removeprefix(PREFIX)) or number) <= number
    ]
    return older[-1] if older else None


def get_smallest_profile(story: QuirkStory) -> Profile:
    """Return the smallest profile that has this quirk and can show it. Source: architecture D5."""
    return Profile(story.quirk, frozenset({story.quirk, *story.upon}))


def initial_state(config: Config, profile: Profile = STRICT) -> State:
    """Return the state before the first event, under the rules of `profile`.

    Source: architecture D2.

    Raises:
        ConfigError: `config_problems(config)` finds a problem.
    """
    return create_state(config, get_rules(profile.quirks, config))
