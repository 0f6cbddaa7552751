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
    ITEMS_NAMED_WITHOUT_PLACE = "items_named_without_place"
    TOUCHING_ITEM_NAMES_AN_OUTPUT_BLOCK = "touching_item_names_an_output_block"
    NOTHING_RESERVED = "nothing_reserved"
    ONE_WAITING_QUEUE = "one_waiting_queue"
    DRAFTS_OUTLIVE_PREEMPTION = "drafts_outlive_preemption"
    PASSED_OVER_COME_BACK_REVERSED = "passed_over_come_back_reversed"
    CACHED_TOKENS_OF_THE_LAST_HIT = "cached_tokens_of_the_last_hit"
    ADMITTED_WITH_LOOKAHEAD = "admitted_with_lookahead"
    UNNAMED_BLOCKS_FIRST = "unnamed_blocks_first"
    UNCACHED_BLOCKS_FIRST = "uncached_blocks_first"
    FRAMES_HOLD_THE_PREEMPTED = "frames_hold_the_preempted"
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


@dataclass(frozen=True, slots=True)
class QuirkStory:
    """What there is to say about a quirk."""

    quirk: Quirk
    title: str
    property_ids: tuple[str, ...]
    """Properties that it breaks; none if it is only another behaviour."""
    upstream: str
    """Issue or pull request, or that none was found."""
    seen_in: str
    """Releases in which it was seen by running them; others were not tried."""
    program: str
    """A small program that shows it, in words."""
    upon: tuple[Quirk, ...] = ()
    """What it changes, and says nothing without."""

    @property
    def smallest_profile(self) -> Profile:
        """The least that has this quirk and can show it."""
        return Profile(self.quirk, frozenset({self.quirk, *self.upon}))


QUIRKS: tuple[QuirkStory, ...] = (
    QuirkStory(
        Quirk.UNWRITTEN_KEYS_STAY,
        "a victim's keys stay published although the step that fills their blocks lost it",
        ("P3", "P4", "P25"),
        "#43569 (open)",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0 0.33.0",
        "PRIORITY; a low request fills a block in this step, a high one behind it needs a block: "
        "the low one is preempted, its key stays, the next request with that prefix hits it",
    ),
    QuirkStory(
        Quirk.EQUALS_PREEMPT_THE_FIRST,
        "of equal priority and arrival the first in running order is preempted",
        ("P10", "P16"),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0 0.33.0",
        "PRIORITY; two requests of one priority and arrival that do not both fit, no caching: each "
        "preempts the other for ever",
    ),
    QuirkStory(
        Quirk.MIN_TOKENS_MASK_LENGTH,
        "below min_tokens not even max_tokens and max_model_len end a request",
        ("P9", "P10", "P13"),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "max_model_len 4, a prompt of 2 tokens, min_tokens 8: at the model length it can neither "
        "be scheduled nor end",
    ),
    QuirkStory(
        Quirk.OUTPUT_BLOCKS_NAME_THE_LAST_ITEM,
        "a block that outputs complete is named by the last item alone, unless it is the first",
        ("P3", "P6"),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "blocks of 4; a prompt of 7 tokens with one item at 4 and another at 5, one output: a "
        "request with another first item hits the second block",
    ),
    QuirkStory(
        Quirk.PLACEHOLDERS_OUTLIVE_A_GAP,
        "draft placeholders of a request that a plan leaves out stay, and are dispatched later",
        ("P24",),
        "#46899",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0 0.33.0",
        "asynchronous, a budget of 2, one draft; two requests have sampled: the plan of the first "
        "and its draft leaves the second out, and the next one has a draft for it",
    ),
    QuirkStory(
        Quirk.VICTIM_WITHOUT_A_ROW_SHIFTS_THE_NEXT,
        "a victim that the step had passed over makes the step pass over another request",
        ("P15",),
        "not found upstream",
        "0.12.0 0.19.1 0.20.2 0.23.0 0.27.0",
        "PRIORITY, asynchronous; of three requests the first has its last token in flight, so it "
        "has no row, and is preempted for the second: the third gets no row in that step",
    ),
    QuirkStory(
        Quirk.ITEMS_NAMED_WITHOUT_PLACE,
        "an item names its block, but not the place where it stands in it",
        ("P3", "P6"),
        "#36708 (fixed in 0.19.1)",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.18.1",
        "blocks of 4, the prompt of two requests is one token, 8 times; an item of length 1 stands "
        "at 0 in the first and at 1 in the second: the second hits the block of the first",
    ),
    QuirkStory(
        Quirk.TOUCHING_ITEM_NAMES_AN_OUTPUT_BLOCK,
        "a last item that ends where a block begins names it, if outputs complete it",
        ("P6",),
        "not found upstream (fixed in 0.19.1)",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.18.1",
        "blocks of 1; a prompt of one token that is an item, two outputs: the block of the first "
        "output has the name that it would have if the item reached into it",
    ),
    QuirkStory(
        Quirk.NOTHING_RESERVED,
        "a request is admitted when its first chunk fits, whatever the config says of the rest",
        ("P8",),
        "#37307 (the option came with 0.19.1)",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.18.1",
        "3 blocks of 1 are free, a budget of 2: a prompt of 4 tokens is admitted",
    ),
    QuirkStory(
        Quirk.ONE_WAITING_QUEUE,
        "what is passed over waits in the queue of all others, at its front",
        ("P16",),
        "not found upstream",
        "0.11.0 0.12.0 0.14.1 0.16.0 0.33.0",
        "a request whose grammar is not compiled stands in `waiting`, not in `skipped_waiting`",
    ),
    QuirkStory(
        Quirk.DRAFTS_OUTLIVE_PREEMPTION,
        "a preempted request keeps its drafts",
        ("P12", "P24"),
        "not found upstream (fixed in 0.14.1)",
        "0.12.0",
        "two requests with a draft each and no block left for the second: it is preempted, and the "
        "draft is planned when it runs again",
    ),
    QuirkStory(
        Quirk.PASSED_OVER_COME_BACK_REVERSED,
        "those that a step passes over change their order",
        ("P7", "P16"),
        "not found upstream (fixed in 0.14.1)",
        "0.11.0 0.12.0",
        "FCFS; two requests whose grammar is not compiled: after a plan the second is in front",
    ),
    QuirkStory(
        Quirk.CACHED_TOKENS_OF_THE_LAST_HIT,
        "until its first output the cached tokens of a request are those of its latest hit",
        ("P21",),
        "not found upstream (fixed in 0.27.0)",
        "0.20.2 0.23.0",
        "a long prompt without a hit is preempted between two chunks: resumed, it hits its own "
        "blocks, and they are told as its cached tokens",
    ),
    QuirkStory(
        Quirk.ADMITTED_WITH_LOOKAHEAD,
        "a request is admitted with the slots for lookahead, which it does not need yet",
        ("P8", "P15"),
        "not found upstream",
        "0.23.0 0.27.0 0.33.0",
        "a draft head and 2 drafts, blocks of 1: a prompt of 3 tokens takes 5 blocks",
    ),
    QuirkStory(
        Quirk.UNNAMED_BLOCKS_FIRST,
        "with caching, freed blocks without a key are taken before all others",
        ("P16",),
        "not found upstream",
        "0.27.0 0.33.0",
        "a prompt of a block and a half is aborted: the half block is at the head of the queue",
    ),
    QuirkStory(
        Quirk.UNCACHED_BLOCKS_FIRST,
        "without caching, the block that was freed last is taken first",
        ("P16",),
        "not found upstream",
        "0.33.0",
        "no caching; a request is aborted: its blocks are at the head of the queue",
    ),
    QuirkStory(
        Quirk.FRAMES_HOLD_THE_PREEMPTED,
        "a preempted request waits for every frame that names it, also where it does not sample",
        ("P15", "P16"),
        "#48245 (merged)",
        "0.27.0",
        "asynchronous; a request is preempted while a chunk of its prompt is in flight: it is "
        "passed over until that frame was answered",
    ),
    QuirkStory(
        Quirk.RESET_DROPS_TOKENS,
        "a forced reset drops what frames in flight sampled; it is sampled again",
        ("P12", "P13", "P14", "P26"),
        "#42043, #42117, #48245 (merged)",
        "0.27.0 0.33.0",
        "one request, its first plan in flight, a forced reset: the answer delivers nothing",
    ),
    QuirkStory(
        Quirk.RESET_NAMES_ITS_VICTIMS,
        "the plan after a forced reset names those whom the reset preempted",
        ("P21", "P26"),
        "not found upstream",
        "0.27.0 0.33.0",
        "one request runs, a forced reset: the next plan resumes it, and names it as preempted",
    ),
    QuirkStory(
        Quirk.LONE_REQUEST_HAS_NO_THRESHOLD,
        "the threshold for long prefills does not bind the only request there is",
        ("P9", "P15"),
        "not found upstream",
        "0.33.0",
        "a threshold of 2, one prompt of 6 tokens: all of it is in the first plan",
    ),
    QuirkStory(
        Quirk.SELF_VICTIM_LETS_OTHERS_RUN,
        "under PRIORITY a step goes on after a request that preempted itself",
        (),
        "not found upstream",
        "0.33.0",
        "PRIORITY; the lowest of three runs first in order, needs a block and preempts itself: the "
        "two behind it run in the same step",
    ),
    QuirkStory(
        Quirk.STOP_TOKENS_IGNORE_MIN_TOKENS,
        "stop tokens end a request below min_tokens; only the sampler holds them off",
        ("P13",),
        "#47489, #49521, #51299 (named in its source)",
        "0.11.0 0.33.0",
        "min_tokens 3; the first output is the end-of-sequence token: the request ends",
    ),
    QuirkStory(
        Quirk.LENGTH_COMES_BEFORE_STOP,
        "a stop token at the length cap ends a request by length",
        ("P13",),
        "not found upstream (fixed in 0.12.0)",
        "0.11.0",
        "max_tokens 1; the output is the end-of-sequence token: the reason told is length",
    ),
    QuirkStory(
        Quirk.TOO_LONG_IS_PASSED_OVER,
        "without chunked prefill, a prompt beyond what is left of the budget holds nobody up",
        ("P16",),
        "not found upstream (fixed in 0.12.0)",
        "0.11.0",
        "no chunked prefill, a budget of 5; prompts of 3, 3 and 1 tokens: the first and the third "
        "are admitted",
    ),
    QuirkStory(
        Quirk.ADMITTED_WITH_PADDING,
        "who is admitted with one token to compute gets drafts that nobody proposed, or waits",
        ("P15", "P24"),
        "#45237 (merged)",
        "0.27.0 0.33.0",
        "two drafts; one request decodes when a prompt of 1 token comes: it is planned with 3 "
        "tokens, the last two placeholders; with a budget of 2 left it is not admitted",
    ),
    QuirkStory(
        Quirk.PADDING_WAITS_AT_THE_END,
        "who is padded waits where the padding goes beyond the model length",
        ("P15",),
        "#53962 (fixed in 0.33.0)",
        "0.27.0",
        "max_model_len 4, two drafts; one request decodes, one with 2 tokens of its 3 cached "
        "comes: it is not admitted while the other one runs",
        upon=(Quirk.ADMITTED_WITH_PADDING,),
    ),
    QuirkStory(
        Quirk.HIT_IS_COMPANY_ENOUGH,
        "who has a hit is padded also where nobody runs",
        ("P10", "P15", "P24"),
        "#55126 (merged)",
        "0.33.0",
        "two drafts, a budget of 2, blocks of 1; a prompt of 2 tokens, the first one cached: it "
        "wants 3 tokens, and is never admitted",
        upon=(Quirk.ADMITTED_WITH_PADDING,),
    ),
    QuirkStory(
        Quirk.DRAFTS_PUBLISH_AT_COMMIT,
        "with drafts a synchronous commit publishes the blocks that it fills",
        ("P14", "P18"),
        "not found upstream",
        "0.33.0",
        "one draft, blocks of 2; the commit of a prompt of 4 tokens and of two accepted ones names "
        "the third block, which the next plan would",
    ),
)


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
UP_TO_0_18 = UP_TO_0_27 | {
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
    Profile("vllm-0.19.1", UP_TO_0_27),
    Profile("vllm-0.20.2", UP_TO_0_27 | {Quirk.CACHED_TOKENS_OF_THE_LAST_HIT}),
    Profile(
        "vllm-0.23.0",
        UP_TO_0_27 | {Quirk.CACHED_TOKENS_OF_THE_LAST_HIT, Quirk.ADMITTED_WITH_LOOKAHEAD},
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
