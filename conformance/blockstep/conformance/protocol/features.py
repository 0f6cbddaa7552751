"""Table of the features that an engine may have or lack.

A row says which capability an engine needs for a feature, what uses it in a config, in a request or
by an action, and which coverage goals and properties are about it. The rows decide what is drawn,
what an engine is not given, what a run must reach, and what `--with` and `--without` accept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.program import (
    Action,
    Hostile,
    Mask,
    Misanswer,
    Propose,
    Report,
)
from blockstep.spec import vocabulary as v

T = TypeVar("T", v.Config, v.Request)
PLAIN_REQUEST = v.Request("", ())


class UsageError(ValueError):
    """Options that contradict each other or make no sense; the text says why, and what is
    possible.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """A row of the table."""

    name: str
    """The name in `--with` and `--without`."""
    summary: str
    capability: Capability | None = None
    """The capability that an engine needs for it; None if every engine has the feature."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Fields of a config that use it, with the values that do not."""
    values: Mapping[str, object] = field(default_factory=dict)
    """The value that uses this feature, for fields that several features share."""
    request: tuple[str, ...] = ()
    """Fields of a request that use it if they differ from their defaults."""
    actions: tuple[type, ...] = ()
    """Actions and events that need it."""
    situations: tuple[str, ...] = ()
    """Coverage goals that need it, by prefixes of their names."""
    hides: tuple[str, ...] = ()
    """Coverage goals, by prefixes, that cannot be reached if every run has the feature."""
    properties: tuple[str, ...] = ()
    """The properties that are mainly about it."""
    part_of: str = ""
    """The feature of which this one is a part: every run with this one has that one, too."""

    def is_asked_by(self, thing: v.Config | v.Request) -> bool:
        """Whether a config or a request uses it."""
        if isinstance(thing, v.Request):
            plain = PLAIN_REQUEST
            return any(getattr(thing, name) != getattr(plain, name) for name in self.request)
        if self is PIPELINE and thing.async_scheduling:
            return False  # several frames for another reason
        if any(getattr(thing, name) != value for name, value in self.values.items()):
            return False
        return any(getattr(thing, name) != value for name, value in self.config.items())

    def take_from(self, thing: T) -> T:
        """Return the config or request without it."""
        if not self.is_asked_by(thing):
            return thing
        if isinstance(thing, v.Request):
            return replace(thing, **{name: getattr(PLAIN_REQUEST, name) for name in self.request})
        return settle_states(replace(thing, **self.config))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class KindsOfGroups(Feature):
    """The row of KV groups other than full attention and sliding window, and of larger blocks."""

    def is_asked_by(self, thing: v.Config | v.Request) -> bool:
        """Whether a config has such groups; see `Feature`."""
        return isinstance(thing, v.Config) and any(
            group.kind not in (v.GroupKind.FULL, v.GroupKind.SLIDING_WINDOW)
            or group.block_size != thing.block_size
            for group in thing.groups
        )

    def take_from(self, thing: T) -> T:
        """Return the config without them: chunked groups become windows, recurrent and cross ones
        go.
        """
        if isinstance(thing, v.Request) or not self.is_asked_by(thing):
            return thing
        config = without_kind(without_states(thing), v.GroupKind.CROSS_ATTENTION)
        groups = [
            replace(
                group,
                kind=v.GroupKind.SLIDING_WINDOW,
                sliding_window=group.attention_chunk_size,
                attention_chunk_size=0,
            )
            if group.kind is v.GroupKind.CHUNKED_LOCAL
            else group
            for group in config.groups
        ]
        return resize_blocks(replace(config, groups=tuple(groups)), config.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class GroupsOfKind(Feature):
    """The row of KV groups of one kind, which can be selected by name."""

    kind: v.GroupKind = v.GroupKind.FULL

    def is_asked_by(self, thing: v.Config | v.Request) -> bool:
        """Whether a config has groups of the kind; see `Feature`."""
        return isinstance(thing, v.Config) and self.kind in [it.kind for it in thing.groups]

    def take_from(self, thing: T) -> T:
        """Return the config without the kind: recurrent groups go, others become full attention."""
        if isinstance(thing, v.Request) or not self.is_asked_by(thing):
            return thing
        if self.kind is v.GroupKind.RECURRENT:
            return without_states(thing)
        full = [v.KVGroup(v.GroupKind.FULL, group.block_size) for group in thing.groups]
        pairs = zip(thing.groups, full, strict=True)
        return replace(
            thing, groups=tuple([new if it.kind is self.kind else it for it, new in pairs])
        )


def without_states(config: v.Config) -> v.Config:
    """Return the config without its recurrent KV groups."""
    return without_kind(config, v.GroupKind.RECURRENT)


def without_kind(config: v.Config, kind: v.GroupKind) -> v.Config:
    """Return the config without its KV groups of one kind.

    The smallest remaining block size becomes the config's. Blocks of a size that is not a multiple
    get that size, too.
    """
    groups = [group for group in config.groups if group.kind is not kind]
    if len(groups) == len(config.groups):
        return config
    size = min([group.block_size for group in groups], default=config.block_size)
    fitting = [it if it.block_size % size == 0 else replace(it, block_size=size) for it in groups]
    return replace(config, groups=tuple(fitting), block_size=size)


def resize_blocks(config: v.Config, size: int) -> v.Config:
    """Return the config with this block size, in token slots, for all KV groups."""
    groups = tuple([replace(group, block_size=size) for group in config.groups])
    return replace(config, block_size=size, groups=groups)


def settle_states(config: v.Config) -> v.Config:
    """Return the config without settings that contradict others.

    Examples are recurrent groups whose mode contradicts prefix caching or that have too few blocks
    for drafts, cross attention without an encoder-decoder model, swap-out without a store, and pins
    without prefix caching.
    """
    if config.swap_min_tokens and (not config.kv_connector or config.has_states):
        config = replace(config, swap_min_tokens=0)
    if not config.enable_prefix_caching and config.policy is v.Policy.CONTINUUM:
        config = replace(config, policy=v.Policy.FCFS)
    if not config.is_encoder_decoder:
        config = without_kind(config, v.GroupKind.CROSS_ATTENTION)
    return without_states(config) if v.config_problems(config) else config


PRIORITY = Feature(
    "priority",
    "scheduling by priority: urgent requests are admitted first and preempted last",
    Capability.PRIORITY,
    config={"policy": v.Policy.FCFS},
    values={"policy": v.Policy.PRIORITY},
    request=("priority",),
    situations=("admission_overtakes", "priority_"),
    hides=("pins_",),  # there is one policy
    properties=("P16",),
)
DRAFTS = Feature(
    "drafts",
    "speculative decoding: draft tokens are proposed, scheduled, and accepted or rolled back",
    Capability.DRAFTS,
    config={"spec_method": v.SpecMethod.NONE, "num_speculative_tokens": 0},
    actions=(Propose, v.Drafts),
    situations=(
        *("draft", "rollback_", "stop_inside_accepted_drafts", "head_drop"),
        *("block_for_lookahead_only", "rejected_bad_drafts", "forks_copied_with_drafts"),
        *("groups_block_in_doubt", "masks_of_drafts", "masks_draft_cut", "masks_behind_a_cut"),
        "forks_named_what_is_full",
    ),
    properties=("P14", "P24"),
)
ASYNC = Feature(
    "async",
    "asynchronous scheduling: a step is planned before the tokens of the previous step are known",
    Capability.ASYNC,
    config={"async_scheduling": False},
    situations=(
        *("planned_before_its_token", "chunks_in_two_frames", "skip_ahead", "abort_stale"),
        *("preempted_in_flight", "stale_"),
        *("all_preempted_in_flight", "ended_while_stale", "passed_over_for_its_tokens"),
        *("admitted_past_a_stale_one", "resumed_after_stale_tokens", "published_by_"),
        *("draft_placeholders_", "rollback_with_frames_behind", "rejected_pipeline_full_async"),
        *("row_of_an_ended_request_ignored", "masks_flag_of_frames_behind"),
    ),
    hides=("drafts_taken", "drafts_dropped", "drafts_replaced"),  # they stay with the worker
    properties=("P13", "P24"),
)
PIPELINE = Feature(
    "pipeline",
    "several frames in flight, and each request waits for its own token",
    Capability.PIPELINE,
    config={"max_frames_in_flight": 1},
    situations=("pipeline_",),
    properties=("P13", "P15"),
)
PAUSE = Feature(
    "pause",
    "scheduling can be paused and resumed",
    Capability.PAUSE,
    actions=(v.SetPause,),
    situations=("paused_",),
    properties=("P9",),
)
RESET = Feature(
    "reset",
    "the prefix cache can be reset, also by force",
    Capability.RESET,
    actions=(v.Reset,),
    situations=("reset_", "commit_for_preempted", "ended_while_preempted"),
    properties=("P25",),
)
GRAMMAR = Feature(
    "grammar",
    "structured output: a request waits until its grammar is compiled",
    Capability.GRAMMAR,
    request=("structured_output", "grammar"),
    actions=(v.GrammarReady,),
    situations=("grammar_", "admission_after_skip", "rejected_not_structured"),
    properties=("P15", "P16"),
)
MASKS = Feature(
    "masks",
    "grammars: bitmasks by row and draft position, and drafts cut to what a grammar accepts",
    Capability.MASKS,
    config={"reasoning_end_token_id": None, "enable_in_reasoning": False},
    request=("grammar",),
    actions=(Mask, v.GrammarFailed, v.GrammarBitmask),
    situations=("masks_", "rejected_grammar_behind"),
    properties=("P24",),
)
MULTIMODAL = Feature(
    "multimodal",
    "prompts contain images or other items, which are part of the block keys",
    Capability.MULTIMODAL,
    request=("items",),
    situations=("same_tokens_other_items",),
    properties=("P6",),
)
EMBEDS = Feature(
    "embeds",
    "prompts of embeddings, which are part of the block keys",
    Capability.EMBEDS,
    request=("prompt_embeds",),
    situations=("same_tokens_other_embeds",),
    properties=("P6",),
)
KEYS = Feature(
    "keys",
    "LoRA adapters and cache salts are part of the block keys",
    request=("adapter", "cache_salt"),
    situations=("same_tokens_other_adapter", "same_tokens_other_salt"),
    properties=("P6",),
)
STOPS = Feature(
    "stops",
    "requests finish by a token or a repetition, not only by their length",
    request=("min_tokens", "eos_token_id", "stop_token_ids", "repetition_detection"),
    situations=(
        *("stop_eos", "stop_token", "stop_repetition", "stop_inside_accepted_drafts"),
        "min_tokens_held_back_a_stop",
    ),
    properties=("P13",),
)
ABORTS = Feature(
    "aborts",
    "clients abort requests",
    Capability.ABORT,
    actions=(v.Abort,),
    situations=("abort_", "commit_for_aborted"),
    properties=("P18",),
)
HOSTILE = Feature(
    "hostile",
    "events that no client should send, and wrong model outputs",
    Capability.REJECTION,
    actions=(Hostile, Misanswer),
    situations=("rejected_", "drafts_dropped"),
    properties=("P7", "P18"),
)
GROUPS = Feature(
    "groups",
    "several KV groups, each with a block table, of full attention or a sliding window",
    Capability.GROUPS,
    config={"groups": ()},
    situations=("groups_",),
    properties=("P5", "P8"),
)
KINDS = KindsOfGroups(
    "kinds",
    "KV groups of every kind (chunked local, recurrent, cross attention), and of several "
    "block sizes",
    Capability.KINDS,
    config={"groups": ()},
    situations=(
        *("groups_of_three_kinds", "groups_larger_block_filled", "groups_chunk_left"),
        *("groups_state_left", "groups_hit_of_a_state", "encoder_across_"),
    ),
    properties=("P5", "P8"),
    part_of="groups",
)
WINDOW = GroupsOfKind(
    "window",
    "KV groups of sliding-window attention",
    config={"groups": ()},
    situations=("groups_window_slid",),
    properties=("P5", "P8"),
    part_of="groups",
    kind=v.GroupKind.SLIDING_WINDOW,
)
CHUNKS = GroupsOfKind(
    "chunks",
    "KV groups of chunked local attention",
    config={"groups": ()},
    situations=("groups_chunk_left",),
    properties=("P5", "P8"),
    part_of="kinds",
    kind=v.GroupKind.CHUNKED_LOCAL,
)
OF_SAVES = (*("tiers_victim_", "tiers_several_saved", "tiers_too_little_to_save", "tiers_saved_"),)
"""Prefixes of the coverage goals of swapped-out victims."""
STATES = GroupsOfKind(
    "states",
    "KV groups of recurrent layers, which keep states instead of tokens",
    config={"groups": ()},
    situations=("groups_state_left", "groups_hit_of_a_state"),
    hides=OF_SAVES,  # no victim with states is saved
    properties=("P5", "P8"),
    part_of="kinds",
    kind=v.GroupKind.RECURRENT,
)
OF_FORKS = ("forks_", "rejected_bad_fork", "rejected_fork_in_flight")
"""Prefixes of the coverage goals of forks."""
OF_STALE = (
    *("preempted_in_flight", "all_preempted_in_flight", "stale_tokens_delivered"),
    *("ended_while_stale", "resumed_after_stale_tokens"),
    *("pipeline_preempted_in_flight", "pipeline_token_after_preemption"),
)
"""Coverage goals of requests preempted with a token in flight."""
ENCODER = Feature(
    "encoder",
    "items are encoded, within a budget per step, into a cache of limited size",
    Capability.ENCODER,
    config={
        "encoder_compute_budget": 0,
        "encoder_cache_size": 0,
        "disable_chunked_mm_input": False,
        "is_encoder_decoder": False,
    },
    actions=(v.EncoderReset, v.EncoderOffer),
    situations=("encoder_",),
    properties=("P9", "P22"),
)
ADAPTERS = Feature(
    "adapters",
    "a limit on the different LoRA adapters among running requests; others are skipped",
    Capability.ADAPTERS,
    config={"max_loras": 0},
    situations=("adapters_",),
    properties=("P9", "P15"),
)
SESSIONS = Feature(
    "sessions",
    "a session gets further input: it is idle between two inputs, and keeps its blocks",
    Capability.SESSIONS,
    request=("resumable",),
    actions=(v.StreamingUpdate,),
    situations=("sessions_", "rejected_not_resumable"),
    properties=("P3", "P10", "P13"),
)
TRANSFERS = Feature(
    "transfers",
    "KV is loaded from a store, at once or later, and blocks outlive requests that it reads",
    Capability.TRANSFERS,
    config={
        "kv_connector": False,
        "kv_load_failure_policy": v.KVLoadFailurePolicy.FAIL,
    },
    actions=(v.KVOffer, v.TransfersReported, Report),
    situations=("transfers_", *OF_SAVES),
    hides=(  # a store has no encoder-decoder model, no branches
        *("encoder_beside_", "encoder_across_", *OF_FORKS),
        *OF_STALE,  # beside it nobody is preempted whose blocks a frame in flight names
    ),
    properties=("P17", "P18", "P19"),
)
EVENTS = Feature(
    "events",
    "a log of KV events: which blocks become cached, and which are evicted",
    Capability.EVENTS,
    config={"enable_kv_cache_events": False},
    situations=("events_",),
    properties=("P20",),
)
PINS = Feature(
    "pins",
    "pins: blocks are kept between two turns of an agent job, for a time that an estimator gives",
    Capability.PINS,
    config={"policy": v.Policy.FCFS},
    values={"policy": v.Policy.CONTINUUM},
    request=("job_id", "is_last_step"),
    actions=(v.Clock, v.PinEstimate),
    situations=("pins_",),
    hides=(  # there is one policy, and no branch
        *("admission_overtakes", "priority_", *OF_FORKS),
    ),
    properties=("P10", "P17"),
)
FORKS = Feature(
    "forks",
    "a request is forked into several, which share blocks and copy those that they write to",
    Capability.FORKS,
    config={"enable_forks": False, "watermark_blocks": 0, "pool_order": v.PoolOrder.LRU},
    actions=(v.Fork,),
    situations=OF_FORKS,
    hides=(  # there is no store, no encoder-decoder model, no pin and no state
        *("transfers_", "encoder_beside_", "encoder_across_", "pins_"),
        *("groups_of_three_kinds", "groups_state_left"),
        *OF_SAVES,
    ),
    properties=("P2", "P8"),
)
TIERS = Feature(
    "tiers",
    "victims are swapped out to a store, and admission closes between two thresholds of "
    "free blocks",
    Capability.TIERS,
    config={"swap_min_tokens": 0, "admission_low_blocks": 0, "admission_high_blocks": 0},
    situations=("tiers_",),
    properties=("P10", "P15"),
)
CACHING = Feature(
    "caching",
    "prefix caching: blocks are hit by their content",
    config={"enable_prefix_caching": False},
    situations=(
        *("prefix_hit", "hit_", "full_prompt_hit_", "head_drop", "reading_skipped", "same_tokens_"),
        *("duplicate_key_published", "eviction_of_cached_block", "resumed_with_hit", "reset_done"),
        *("published_by_", "abort_of_shared_block"),
    ),
    hides=("encoder_beside_", "encoder_across_"),  # an encoder-decoder model has no prefix caching
    properties=("P3", "P4", "P5", "P6"),
)

FEATURES: tuple[Feature, ...] = (
    *(PRIORITY, DRAFTS, ASYNC, PIPELINE, PAUSE, RESET, GRAMMAR, MULTIMODAL, EMBEDS, KEYS, STOPS),
    *(ABORTS, HOSTILE, GROUPS, KINDS, WINDOW, CHUNKS, STATES, ADAPTERS, SESSIONS, MASKS, ENCODER),
    *(EVENTS, TRANSFERS, PINS, FORKS, TIERS),
    CACHING,
)
"""The table. For an engine that lacks several features they are removed in this order: without
`async`, several frames in flight are a `pipeline`."""
BY_NAME: Mapping[str, Feature] = {feature.name: feature for feature in FEATURES}
PARTS_OF_GROUPS = (WINDOW, CHUNKS, STATES)
"""Features that are KV groups of one kind each."""
LATE = (
    *("groups", "adapters", "masks", "sessions", "encoder", "events", "transfers", "pins"),
    *("forks", "tiers"),
)
"""Names of features that are drawn after everything else, and only for engines that have them, so
that an engine without them gets the episodes that it would get if they did not exist. New names are
appended; the order never changes."""
SEVERAL_AT_ONCE = frozenset({ASYNC.name, PIPELINE.name})
"""Both features have several frames in flight; no run has both."""
SEVERAL_FRAMES = (
    *("several_frames_in_flight", "four_frames_in_flight", "abort_with_two_frames_in_flight"),
    *("reset_forced_with_two_frames_in_flight", "rejected_frame_out_of_order"),
    "dropped_token_runs_again",
    *("transfers_deferred_", "transfers_waits_for_an_answer", "tiers_saved_beside_frames"),
)
"""Prefixes of the coverage goals that need one of these two features."""
_ACROSS = ("read", "waits", "preempted", "made_again", "freed")
NEEDS_ANY: Mapping[str, frozenset[str]] = {
    "empty_plan_with_work": SEVERAL_AT_ONCE | {PAUSE.name, GRAMMAR.name},
    "running_left_out_by_budget": SEVERAL_AT_ONCE | {DRAFTS.name},
    "tiers_saved_behind_a_window": frozenset({GROUPS.name}),
    "transfers_deferred_by_a_window": frozenset({GROUPS.name}),
    "transfers_deferred_by_a_reset": frozenset({RESET.name}),
    "transfers_state_loaded": frozenset({STATES.name}),
    "transfers_state_out_of_reach": frozenset({STATES.name}),
    "transfers_preempted_unsettled": frozenset({RESET.name}),
    "sessions_back_under_a_grammar": frozenset({MASKS.name}),
    **{f"encoder_across_{what}": frozenset({GROUPS.name}) for what in _ACROSS},
}
"""Coverage goals that need one of several features besides their own. Without all of them a running
request can always continue with the tokens of its admission; cross-attention blocks and blocks that
leave a window exist only with several KV groups."""


def list_wholes(name: str) -> tuple[str, ...]:
    """Return the names of the features that a feature is part of, the nearest first."""
    whole = BY_NAME[name].part_of
    return (whole, *list_wholes(whole)) if whole else ()


def is_reachable(situation: str, absent: Collection[str], always: Collection[str] = ()) -> bool:
    """Whether a coverage goal is reachable without `absent` features and with `always` in every
    run.
    """
    if SEVERAL_AT_ONCE.issubset(absent) and situation.startswith(SEVERAL_FRAMES):
        return False
    if situation in NEEDS_ANY and NEEDS_ANY[situation].issubset(absent):
        return False
    if any(situation.startswith(BY_NAME[name].hides) for name in always):
        return False
    return not any(situation.startswith(BY_NAME[name].situations) for name in absent)


def find_lacking(capabilities: frozenset[str]) -> tuple[Feature, ...]:
    """Return the features that an engine with these capabilities lacks."""
    return tuple(
        feature
        for feature in FEATURES
        if feature.capability is not None and feature.capability not in capabilities
    )


def get_missing(
    thing: v.Config | Action | v.Event, lacking: Iterable[Feature]
) -> Capability | None:
    """Return the missing capability that a config, action or event needs, or None.

    The request of a `Submit` is checked, too.
    """
    asked = thing.request if isinstance(thing, v.Submit) else thing
    for feature in lacking:
        if isinstance(thing, feature.actions) or (
            isinstance(asked, v.Config | v.Request) and feature.is_asked_by(asked)
        ):
            return feature.capability
    return None


def fit(thing: T, lacking: Iterable[Feature]) -> tuple[T, tuple[Capability, ...]]:
    """Return the config or request without these features, and the capabilities that it needed."""
    missing: list[Capability] = []
    for feature in lacking:
        if feature.is_asked_by(thing):
            assert feature.capability is not None
            thing = feature.take_from(thing)
            missing.append(feature.capability)
    return thing, tuple(missing)
