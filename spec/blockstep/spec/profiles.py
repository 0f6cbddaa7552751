"""Profiles: which release has which quirks (`releases` says what each of them is).

With its profile on, the specification follows a release past its known defects, so that a new one
stands out.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockstep.spec.releases import QUIRKS, Quirk, QuirkStory, get_rules
from blockstep.spec.state import State, create_state
from blockstep.spec.vocabulary import Config

__all__ = ["PROFILES", "QUIRKS", "RELEASES", "STRICT", "Profile", "Quirk", "QuirkStory"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A set of quirks with a name."""

    name: str
    quirks: frozenset[Quirk] = frozenset()
    spares: bool = True
    """Whether an engine is spared the events that it declines because of a known defect."""


STRICT = Profile("strict", spares=False)
SPARING = Profile("sparing")
"""No quirk is followed, but what an engine declines is left out."""
COMMON = frozenset(
    {
        Quirk.UNWRITTEN_KEYS_STAY,
        Quirk.EQUALS_PREEMPT_THE_FIRST,
        Quirk.PLACEHOLDERS_OUTLIVE_A_GAP,
    }
)
"""What all releases have that schedule by PRIORITY, and asynchronously."""
UP_TO_0_27 = COMMON | {
    Quirk.MIN_TOKENS_MASK_LENGTH,
    Quirk.OUTPUT_BLOCKS_NAME_THE_LAST_ITEM,
    Quirk.VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT,
}
UP_TO_0_23 = UP_TO_0_27 | {Quirk.RESUMED_BEFORE_ITS_TOKEN}
UP_TO_0_18 = UP_TO_0_23 | {
    Quirk.ITEMS_NAMED_WITHOUT_PLACE,
    Quirk.TOUCHING_ITEM_NAMES_AN_OUTPUT_BLOCK,
    Quirk.NOTHING_RESERVED,
}
UP_TO_0_16 = UP_TO_0_18 | {Quirk.ONE_WAITING_QUEUE}
SINCE_0_27 = frozenset(
    {
        Quirk.UNNAMED_BLOCKS_FIRST,
        Quirk.FRAMES_HOLD_THE_PREEMPTED,
        Quirk.RESET_DROPS_TOKENS,
        Quirk.RESET_NAMES_ITS_VICTIMS,
        Quirk.ADMITTED_WITH_LOOKAHEAD,
        Quirk.ADMITTED_WITH_PADDING,
    }
)
RELEASES: tuple[Profile, ...] = (
    Profile(
        "vllm-0.11.0",
        UP_TO_0_16 - {Quirk.MIN_TOKENS_MASK_LENGTH}
        | {
            Quirk.PASSED_OVER_COME_BACK_REVERSED,
            Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
            Quirk.LENGTH_COMES_BEFORE_STOP,
            Quirk.TOO_LONG_IS_PASSED_OVER,
        },
    ),
    Profile(
        "vllm-0.12.0",
        UP_TO_0_16 | {Quirk.PASSED_OVER_COME_BACK_REVERSED, Quirk.DRAFTS_OUTLIVE_PREEMPTION},
    ),
    Profile("vllm-0.14.1", UP_TO_0_16),
    Profile("vllm-0.16.0", UP_TO_0_16),
    Profile("vllm-0.18.1", UP_TO_0_18),
    Profile("vllm-0.19.1", UP_TO_0_23),
    Profile("vllm-0.20.2", UP_TO_0_23 | {Quirk.CACHED_TOKENS_OF_THE_LAST_HIT}),
    Profile(
        "vllm-0.23.0",
        UP_TO_0_23 | {Quirk.CACHED_TOKENS_OF_THE_LAST_HIT, Quirk.ADMITTED_WITH_LOOKAHEAD},
    ),
    Profile("vllm-0.27.0", UP_TO_0_27 | SINCE_0_27 | {Quirk.PADDING_WAITS_AT_THE_END}),
    Profile(
        "vllm-0.33.0",
        COMMON
        | SINCE_0_27
        | {
            Quirk.UNCACHED_BLOCKS_FIRST,
            Quirk.ONE_WAITING_QUEUE,
            Quirk.LONE_REQUEST_HAS_NO_THRESHOLD,
            Quirk.SELF_VICTIM_LETS_OTHERS_RUN,
            Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
            Quirk.HIT_IS_COMPANY_ENOUGH,
            Quirk.DRAFTS_PUBLISH_AT_COMMIT,
        },
    ),
)
PROFILES: tuple[Profile, ...] = (STRICT, SPARING, *RELEASES)


def get_profile(name: str) -> Profile | None:
    """The profile called `name`, or None. Profiles and quirks can be added: `strict+QUIRK`.

    Source: architecture D5.
    """
    known = {profile.name: profile for profile in PROFILES}
    if name in known:
        return known[name]
    quirks: set[Quirk] = set()
    spares = False
    for part in name.split("+"):
        if part in known:
            quirks |= known[part].quirks
            spares |= known[part].spares
        elif part in list(Quirk):
            quirks.add(Quirk(part))
        else:
            return None
    return Profile(name, frozenset(quirks), spares)


def get_smallest_profile(story: QuirkStory) -> Profile:
    """The least that has this quirk and can show it. Source: architecture D5."""
    return Profile(story.quirk, frozenset({story.quirk, *story.upon}))


def initial_state(config: Config, profile: Profile = STRICT) -> State:
    """The state before the first event, under the rules of `profile`. Source: architecture D2.

    Raises:
        ConfigError: if `config_problems(config)` finds any.
    """
    return create_state(config, get_rules(profile.quirks, config))
