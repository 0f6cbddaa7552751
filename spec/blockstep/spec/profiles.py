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
                Quirk.PLACEHOLDERS_OUTLIVE_A_GAP,
                Quirk.OUTPUT_BLOCKS_NAME_THE_LAST_ITEM,
                Quirk.VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT,
                Quirk.RESUMED_BEFORE_ITS_TOKEN,
                Quirk.ITEMS_NAMED_WITHOUT_PLACE,
                Quirk.TOUCHING_ITEM_NAMES_AN_OUTPUT_BLOCK,
                Quirk.NOTHING_RESERVED,
                Quirk.ONE_WAITING_QUEUE,
                Quirk.PASSED_OVER_COME_BACK_REVERSED,
                Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
                Quirk.LENGTH_COMES_BEFORE_STOP,
                Quirk.TOO_LONG_IS_PASSED_OVER,
                Quirk.HEAD_GIVES_BACK_BY_TURNS,
                Quirk.CHUNK_BEGINS_IN_A_NULL_BLOCK,
                Quirk.NARROW_WINDOW_WANTS_A_BLOCK,
                Quirk.HIT_HOLDS_WHAT_IT_SKIPS,
                Quirk.CHUNK_KEEPS_A_NAMED_BLOCK,
                Quirk.WINDOWS_FORGET_DOUBT,
                Quirk.ADAPTERS_OF_ROWS_ONLY,
            }
        ),
        frozenset(),
    ),
    (
        "0.11.1",
        frozenset({Quirk.MIN_TOKENS_MASK_LENGTH, Quirk.REFUSED_HAVE_NOTHING_IN_COMMON}),
        frozenset(
            {
                Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
                Quirk.LENGTH_COMES_BEFORE_STOP,
                Quirk.CHUNK_KEEPS_A_NAMED_BLOCK,
            }
        ),
    ),
    (
        "0.12.0",
        frozenset({Quirk.DRAFTS_OUTLIVE_PREEMPTION, Quirk.CHUNKS_TAKE_DRAFTS}),
        frozenset({Quirk.TOO_LONG_IS_PASSED_OVER}),
    ),
    ("0.13.0", frozenset({Quirk.RESETS_ARE_TOLD_LATE}), frozenset()),
    (
        "0.14.0",
        frozenset(),
        frozenset(
            {
                Quirk.PASSED_OVER_COME_BACK_REVERSED,
                Quirk.DRAFTS_OUTLIVE_PREEMPTION,
                Quirk.HIT_HOLDS_WHAT_IT_SKIPS,
                Quirk.REFUSED_HAVE_NOTHING_IN_COMMON,
            }
        ),
    ),
    ("0.16.0", frozenset(), frozenset({Quirk.CHUNKS_TAKE_DRAFTS})),
    (
        "0.17.1",
        frozenset(
            {
                Quirk.NULL_BLOCKS_ARE_TOLD,
                Quirk.EVENTS_NAME_NO_GROUP,
                Quirk.ONLY_THE_FIRST_FULL_GROUP_IS_CUT,
                Quirk.PADDING_UNMASKS_WHAT_FOLLOWS,
                Quirk.MASK_OF_WHO_SAMPLES_BY_NOW,
                Quirk.REASONING_ENDS_WITH_ITS_STEP,
                Quirk.REASONING_ENDS_AT_THE_LAST_TOKEN,
            }
        ),
        frozenset(),
    ),
    ("0.18.0", frozenset(), frozenset({Quirk.ONE_WAITING_QUEUE})),
    (
        "0.19.0",
        frozenset(
            {
                Quirk.SKIPPED_READING_STILL_LOADS,
                Quirk.LAST_TOKEN_IS_LOADED,
                Quirk.LOADS_PUBLISH_AT_ONCE,
                Quirk.RETURNED_THOUGH_REFUSED,
                Quirk.LOADED_WAIT_BEHIND_THE_HEAD,
                Quirk.LOADED_KEEP_THEIR_BLOCKS,
                Quirk.GROUPS_LOAD_BY_TURNS,
                Quirk.ONLY_THE_FIRST_GOES_BACK,
                Quirk.FAILED_TELL_WHAT_IS_NOT_COUNTED,
                Quirk.HOLDS_ARE_ONE,
                Quirk.FRAMES_HOLD_NO_BLOCKS,
                Quirk.SKIPPED_LOADS_ARE_SETTLED,
                Quirk.ENDED_LEAVE_THEIR_WINDOWS_FIRST,
                Quirk.EMPTY_TRANSFERS_ARE_RESET,
                Quirk.TRANSFERS_ARE_NO_WORK,
                Quirk.POOL_AND_STORE_RESET_APART,
                Quirk.WINDOW_HIT_CUT_BLINDLY,
                Quirk.WINDOWS_RESERVE_EVERYTHING,
                Quirk.CHUNKS_ROUND_TO_NOTHING,
                Quirk.SESSIONS_KEEP_THEIR_BLOCKS,
                Quirk.SESSIONS_KEEP_MAX_TOKENS,
                Quirk.SESSIONS_KEEP_THEIR_GRAMMAR,
                Quirk.REASONING_IS_SOUGHT_IN_THE_NEXT_CHUNK,
                Quirk.SESSION_KEYS_ARE_APPENDED,
                Quirk.SESSIONS_KEEP_WHAT_IS_COMPUTED,
                Quirk.SESSIONS_KEEP_THEIR_PROMISES,
                Quirk.SESSIONS_HAVE_NOTHING_IN_COMMON,
                Quirk.SESSION_TELLS_ITS_LAST_STOP_TOKEN,
                Quirk.SESSIONS_ADMITTED_WITH_LOOKAHEAD,
                Quirk.REFUSED_SESSIONS_GIVE_BACK,
                Quirk.FRESH_STATES_ARE_WAITED_FOR,
                Quirk.ONLY_FULL_ATTENTION_IS_ZEROED,
                Quirk.WITHDRAWN_BLOCKS_ARE_ZEROED,
                Quirk.BLOCKS_OF_LOADS_ARE_ZEROED,
                Quirk.PLACES_OF_ITEMS_ARE_ONE,
                Quirk.ASKING_EVICTS_AND_HOLDS,
                Quirk.ITEMS_HELD_WITHOUT_A_ROW,
                Quirk.WITHDRAWN_ITEMS_STAY,
                Quirk.RESTORED_COMPUTE_IS_FORGOTTEN,
                Quirk.ROOM_IS_ASKED_BEFORE_NEED,
                Quirk.HEAD_READS_AHEAD_OF_THE_ENCODER,
                Quirk.WHOLE_ITEMS_ARE_SPLIT,
                Quirk.HEAD_NEVER_BEGINS_A_WHOLE_ITEM,
                Quirk.LOADED_ITEMS_NEED_COMPUTE,
                Quirk.REMADE_ITEMS_ARE_DROPPED,
                Quirk.ROOM_BESIDE_GROWS,
            }
        ),
        frozenset(
            {
                Quirk.ITEMS_NAMED_WITHOUT_PLACE,
                Quirk.TOUCHING_ITEM_NAMES_AN_OUTPUT_BLOCK,
                Quirk.NOTHING_RESERVED,
            }
        ),
    ),
    (
        "0.20.0",
        frozenset(
            {
                Quirk.CACHED_TOKENS_OF_THE_LAST_HIT,
                Quirk.HEAD_LOOKS_BEHIND_ONCE,
                Quirk.HEAD_CUTS_SHORT_WINDOWS_TWICE,
                # 0.20.0 has the same bound in each step, too, which is not followed.
                Quirk.WINDOWS_RESERVE_A_WHOLE_STEP,
            }
        ),
        frozenset(
            {
                Quirk.EVENTS_NAME_NO_GROUP,
                Quirk.HEAD_GIVES_BACK_BY_TURNS,
                Quirk.WINDOW_HIT_CUT_BLINDLY,
                Quirk.WINDOWS_RESERVE_EVERYTHING,
            }
        ),
    ),
    ("0.22.1", frozenset(), frozenset({Quirk.FAILED_TELL_WHAT_IS_NOT_COUNTED})),
    ("0.23.0", frozenset({Quirk.ADMITTED_WITH_LOOKAHEAD}), frozenset()),
    (
        "0.24.0",
        frozenset({Quirk.UNNAMED_BLOCKS_FIRST, Quirk.UNCACHED_BLOCKS_FIRST}),
        # 0.33.0 still cuts a short window twice, but no run can show it: the adapter runs no groups
        # of several block sizes on releases that publish parts of blocks.
        frozenset({Quirk.GROUPS_LOAD_BY_TURNS, Quirk.HEAD_CUTS_SHORT_WINDOWS_TWICE}),
    ),
    (
        "0.25.0",
        frozenset(
            {
                Quirk.RESET_NAMES_ITS_VICTIMS,
                Quirk.ADMITTED_WITH_PADDING,
                Quirk.PADDING_WAITS_AT_THE_END,
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
                Quirk.WINDOWS_RESERVE_STEPS_IN_FLIGHT,
                Quirk.ALL_IN_FLIGHT_IS_IN_DOUBT,
                Quirk.STATES_ARE_LEFT_AT_ONCE,
            }
        ),
        frozenset(
            {
                Quirk.CACHED_TOKENS_OF_THE_LAST_HIT,
                Quirk.WINDOWS_FORGET_DOUBT,
                Quirk.WINDOWS_RESERVE_A_WHOLE_STEP,
            }
        ),
    ),
    (
        "0.27.0",
        frozenset({Quirk.FRAMES_HOLD_THE_PREEMPTED, Quirk.RESET_DROPS_TOKENS}),
        frozenset(
            {
                Quirk.RESUMED_BEFORE_ITS_TOKEN,
                Quirk.UNCACHED_BLOCKS_FIRST,
                Quirk.BLOCKS_OF_LOADS_ARE_ZEROED,
            }
        ),
    ),
    (
        "0.28.0",
        frozenset({Quirk.UNCACHED_BLOCKS_FIRST}),
        frozenset(
            {
                Quirk.VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT,
                Quirk.REASONING_ENDS_WITH_ITS_STEP,
                Quirk.REASONING_ENDS_AT_THE_LAST_TOKEN,
                Quirk.REASONING_IS_SOUGHT_IN_THE_NEXT_CHUNK,
                Quirk.CHUNKS_ROUND_TO_NOTHING,
                Quirk.ONLY_FULL_ATTENTION_IS_ZEROED,
            }
        ),
    ),
    (
        "0.29.0",
        frozenset({Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS}),
        frozenset({Quirk.MIN_TOKENS_MASK_LENGTH, Quirk.PADDING_WAITS_AT_THE_END}),
    ),
    ("0.30.0", frozenset({Quirk.HIT_IS_COMPANY_ENOUGH}), frozenset()),
    (
        "0.31.0",
        frozenset(
            {
                Quirk.ONE_WAITING_QUEUE,
                Quirk.SESSIONS_WAIT_APART,
                Quirk.RESTING_SESSIONS_KEEP_THEIR_SEATS,
                Quirk.LONE_REQUEST_HAS_NO_THRESHOLD,
            }
        ),
        frozenset({Quirk.OUTPUT_BLOCKS_NAME_THE_LAST_ITEM}),
    ),
    (
        "0.32.0",
        frozenset({Quirk.HEAD_GIVES_BACK_THE_LAST_BLOCK, Quirk.CHUNKS_END_AT_CHECKPOINTS}),
        frozenset(
            {
                Quirk.SKIPPED_READING_STILL_LOADS,
                Quirk.LOADED_WAIT_BEHIND_THE_HEAD,
                Quirk.ONLY_THE_FIRST_FULL_GROUP_IS_CUT,
                Quirk.SESSIONS_KEEP_MAX_TOKENS,
                Quirk.SESSION_KEYS_ARE_APPENDED,
                Quirk.SESSIONS_KEEP_THEIR_PROMISES,
            }
        ),
    ),
    (
        "0.33.0",
        frozenset(
            {
                Quirk.SELF_VICTIM_LETS_OTHERS_RUN,
                Quirk.DRAFTS_PUBLISH_AT_COMMIT,
                Quirk.SESSIONS_GO_BACK_BLINDLY,
                Quirk.ITEMS_HELD_UNTIL_THE_ANSWER,
                Quirk.HEAD_READS_WHAT_HAS_NO_ROOM,
                Quirk.RESTS_OF_ITEMS_ARE_SPLIT,
                Quirk.WITHOUT_ITEMS_PASSED_OVER,
                Quirk.STATES_COME_BEFORE_ITEMS,
                Quirk.REMADE_ITEMS_BESIDE_ARE_DROPPED,
                Quirk.ENDED_LEAVE_WHAT_IS_ANSWERED_FIRST,
                Quirk.CACHED_TOKENS_OF_THE_OFFER,
                Quirk.SKIPPED_READING_COUNTS_AS_ASKED,
            }
        ),
        frozenset(
            {
                Quirk.ENDED_LEAVE_THEIR_WINDOWS_FIRST,
                Quirk.SESSIONS_KEEP_WHAT_IS_COMPUTED,
                Quirk.ADAPTERS_OF_ROWS_ONLY,
                Quirk.PLACES_OF_ITEMS_ARE_ONE,
                Quirk.HEAD_READS_AHEAD_OF_THE_ENCODER,
                Quirk.WHOLE_ITEMS_ARE_SPLIT,
                Quirk.REMADE_ITEMS_ARE_DROPPED,
                Quirk.FRAMES_HOLD_NO_BLOCKS,
            }
        ),
    ),
)
"""Releases of vLLM that changed a quirk, oldest first: quirks that appeared, and that disappeared.
"""


def _tell_releases() -> tuple[Profile, ...]:
    """Return a profile for each entry of the history."""
    found: list[Profile] = []
    quirks: frozenset[Quirk] = frozenset()
    for version, came, went in HISTORY:
        quirks = (quirks | came) - went
        found.append(Profile(PREFIX + version, quirks))
    return tuple(found)


RELEASES: tuple[Profile, ...] = _tell_releases()
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
