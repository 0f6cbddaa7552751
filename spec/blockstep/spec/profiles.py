"""Profiles: what a release is known to do against a property, one named quirk at a time.

The specification keeps every property. A quirk is a rule of some release that does not; it is off
unless a profile switches it on, and it acts at the one place where the rule is. With its profile
on, the specification follows the release past its known defects, so that a new one stands out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Quirk(StrEnum):
    """A known deviation."""

    UNWRITTEN_KEYS_STAY = "unwritten_keys_stay"
    EQUALS_PREEMPT_THE_FIRST = "equals_preempt_the_first"
    MIN_TOKENS_MASK_LENGTH = "min_tokens_mask_length"
    OUTPUT_BLOCKS_NAME_THE_LAST_ITEM = "output_blocks_name_the_last_item"
    PLACEHOLDERS_OUTLIVE_A_GAP = "placeholders_outlive_a_gap"
    VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT = "victim_without_a_row_shifts_the_next"


@dataclass(frozen=True, slots=True)
class QuirkStory:
    """What there is to say about a quirk."""

    quirk: Quirk
    title: str
    property_ids: tuple[str, ...]
    """Properties that it breaks."""
    upstream: str
    """Issue or pull request, or that none was found."""
    seen_in: str
    """Releases in which it was seen by running them; others were not tried."""
    program: str
    """A small program that shows it, in words."""


QUIRKS: tuple[QuirkStory, ...] = (
    QuirkStory(
        Quirk.UNWRITTEN_KEYS_STAY,
        "a victim's keys stay published although the step that fills their blocks lost it",
        ("P3", "P4", "P25"),
        "#43569 (open)",
        "0.19.1",
        "PRIORITY; a low request fills a block in this step, a high one behind it needs a block: "
        "the low one is preempted, its key stays, the next request with that prefix hits it",
    ),
    QuirkStory(
        Quirk.EQUALS_PREEMPT_THE_FIRST,
        "of equal priority and arrival the first in running order is preempted",
        ("P10", "P16"),
        "not found upstream",
        "0.19.1",
        "PRIORITY; two requests of one priority and arrival that do not both fit, no caching: each "
        "preempts the other for ever",
    ),
    QuirkStory(
        Quirk.MIN_TOKENS_MASK_LENGTH,
        "below min_tokens not even max_tokens and max_model_len end a request",
        ("P9", "P10", "P13"),
        "not found upstream",
        "0.19.1",
        "max_model_len 4, a prompt of 2 tokens, min_tokens 8: at the model length it can neither "
        "be scheduled nor end",
    ),
    QuirkStory(
        Quirk.OUTPUT_BLOCKS_NAME_THE_LAST_ITEM,
        "a block that outputs complete is named by the last item alone",
        ("P3", "P6"),
        "not found upstream",
        "0.19.1",
        "blocks of 4; a prompt of 7 tokens with one item at 4 and another at 5, one output: a "
        "request with another first item hits the second block",
    ),
    QuirkStory(
        Quirk.PLACEHOLDERS_OUTLIVE_A_GAP,
        "draft placeholders of a request that a plan leaves out stay, and are dispatched later",
        ("P24",),
        "#46899",
        "0.19.1",
        "asynchronous, a budget of 2, one draft; two requests have sampled: the plan of the first "
        "and its draft leaves the second out, and the next one has a draft for it",
    ),
    QuirkStory(
        Quirk.VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT,
        "a victim that the step had passed over makes the step pass over another request",
        ("P15",),
        "not found upstream",
        "0.19.1",
        "PRIORITY, asynchronous; of three requests the first has its last token in flight, so it "
        "has no row, and is preempted for the second: the third gets no row in that step",
    ),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """A set of quirks with a name."""

    name: str
    quirks: frozenset[Quirk] = frozenset()


STRICT = Profile("strict")
PROFILES: tuple[Profile, ...] = (STRICT, Profile("vllm-0.19.1", frozenset(Quirk)))


def get_profile(name: str) -> Profile | None:
    """The profile called `name`, or None. Source: architecture D5."""
    return next((profile for profile in PROFILES if profile.name == name), None)
