"""Table of the features that an engine may have or lack: one line each in `FEATURES`.

Features with a folder in `conformance.features` are imported from there; the rows of the others are
here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

from blockstep.conformance.engine import Capability
from blockstep.conformance.features import (
    adapters,
    cadence,
    encoder,
    events,
    forks,
    groups,
    masks,
    pins,
    sessions,
    tiers,
    transfers,
)
from blockstep.conformance.protocol.feature import (
    SEVERAL_AT_ONCE,
    Example,
    Feature,
    Kept,
    PartOfSnapshot,
    Setting,
)
from blockstep.conformance.protocol.program import Action, Hostile, Misanswer, Propose
from blockstep.spec import vocabulary as v

T = TypeVar("T", v.Config, v.Request)


class UsageError(ValueError):
    """Options that contradict each other or make no sense; the text says why, and what is
    possible.
    """


def _proposing(method: v.SpecMethod) -> Setting:
    """Return the setting of a method that proposes drafts."""
    example = Example({"spec_method": method, "num_speculative_tokens": 2})
    return Setting(lambda config: config.spec_method is method, (example,))


SETTINGS_OF_DRAFTS = {
    "ngram": _proposing(v.SpecMethod.NGRAM),
    "draft_model": _proposing(v.SpecMethod.DRAFT_MODEL),
    "draft_head": _proposing(v.SpecMethod.EAGLE),
}

PRIORITY = Feature(
    "priority",
    "scheduling by priority: urgent requests are admitted first and preempted last",
    Capability.PRIORITY,
    config={"policy": v.Policy.FCFS},
    values={"policy": v.Policy.PRIORITY},
    request=("priority",),
    situations=("admission_overtakes", "priority_"),
    properties=("P16",),
    examples=(Example({"policy": v.Policy.PRIORITY}),),
)
DRAFTS = Feature(
    "drafts",
    "speculative decoding: draft tokens are proposed, scheduled, and accepted or rolled back",
    Capability.DRAFTS,
    config={"spec_method": v.SpecMethod.NONE, "num_speculative_tokens": 0},
    actions=(Propose, v.Drafts),
    situations=(
        *("draft", "rollback_", "stop_inside_accepted_drafts", "head_drop"),
        *("block_for_lookahead_only", "rejected_bad_drafts"),
    ),
    properties=("P14", "P24"),
    examples=tuple([setting.examples[0] for setting in SETTINGS_OF_DRAFTS.values()]),
    settings=SETTINGS_OF_DRAFTS,
    signals={"drafts": "drafts are proposed"},
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
        "row_of_an_ended_request_ignored",
    ),
    hides=("drafts_taken", "drafts_dropped", "drafts_replaced"),  # they stay with the worker
    properties=("P13", "P24"),
    examples=(Example({"max_frames_in_flight": 2, "async_scheduling": True}),),
)


class FramesInFlight(Feature):
    """The row of several frames in flight without asynchronous scheduling."""

    __slots__ = ()

    def is_asked_by(self, thing: v.Config | v.Request) -> bool:
        """Whether a config has several frames in flight, for no other reason; see `Feature`."""
        if isinstance(thing, v.Config) and thing.async_scheduling:
            return False
        return Feature.is_asked_by(self, thing)


PIPELINE = FramesInFlight(
    "pipeline",
    "several frames in flight, and each request waits for its own token",
    Capability.PIPELINE,
    config={"max_frames_in_flight": 1},
    situations=("pipeline_",),
    properties=("P13", "P15"),
    examples=(Example({"max_frames_in_flight": 2, "async_scheduling": False}),),
)
PAUSE = Feature(
    "pause",
    "scheduling can be paused and resumed",
    Capability.PAUSE,
    actions=(v.SetPause,),
    situations=("paused_",),
    properties=("P9",),
    signals_to_all={"pause": "scheduling is paused or resumed"},
    signal_of={v.SetPause: "pause"},
)
RESET = Feature(
    "reset",
    "the prefix cache can be reset, also by force",
    Capability.RESET,
    actions=(v.Reset,),
    situations=("reset_", "commit_for_preempted", "ended_while_preempted"),
    properties=("P25",),
    signals_to_all={
        "reset": "the cache is emptied, unless a request holds a block",
        "forced_reset": "the cache is emptied by force",
    },
)
GRAMMAR = Feature(
    "grammar",
    "structured output: a request waits until its grammar is compiled",
    Capability.GRAMMAR,
    request=("structured_output", "grammar"),
    actions=(v.GrammarReady,),
    situations=("grammar_", "admission_after_skip", "rejected_not_structured"),
    properties=("P15", "P16"),
    examples=(Example(request={"structured_output": True}),),
    signals={"grammar_ready": "a grammar is compiled"},
)
MULTIMODAL = Feature(
    "multimodal",
    "prompts contain images or other items, which are part of the block keys",
    Capability.MULTIMODAL,
    request=("items",),
    situations=("same_tokens_other_items",),
    properties=("P6",),
    examples=tuple(
        [Example(request={"items": (v.MultiModalItem("cat", offset, 2),)}) for offset in (1, 0)]
    ),
)
EMBEDS = Feature(
    "embeds",
    "prompts of embeddings, which are part of the block keys",
    Capability.EMBEDS,
    request=("prompt_embeds",),
    situations=("same_tokens_other_embeds",),
    properties=("P6",),
    examples=(Example(request={"prompt_embeds": (0, 0, 1, 0, 0, 0)}),),
)
KEYS = Feature(
    "keys",
    "LoRA adapters and cache salts are part of the block keys",
    request=("adapter", "cache_salt"),
    situations=("same_tokens_other_adapter", "same_tokens_other_salt"),
    properties=("P6",),
    examples=(Example(request={"adapter": "x", "cache_salt": "y"}),),
    goal_fields={
        "same_tokens_other_adapter": {"adapter": "x"},
        "same_tokens_other_salt": {"cache_salt": "y"},
    },
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
    examples=(Example(request={"eos_token_id": 7, "stop_token_ids": (8,)}),),
)
ABORTS = Feature(
    "aborts",
    "clients abort requests",
    Capability.ABORT,
    actions=(v.Abort,),
    situations=("abort_", "commit_for_aborted"),
    properties=("P18",),
    signals={"abort": "a client aborts a request"},
)
HOSTILE = Feature(
    "hostile",
    "events that no client should send, and wrong model outputs",
    Capability.REJECTION,
    actions=(Hostile, Misanswer),
    situations=("rejected_", "drafts_dropped"),
    properties=("P7", "P18"),
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
    properties=("P3", "P4", "P5", "P6"),
    examples=(Example({"enable_prefix_caching": True}),),
)

FEATURES: tuple[Feature, ...] = (
    *(PRIORITY, DRAFTS, ASYNC, PIPELINE, PAUSE, RESET, GRAMMAR, MULTIMODAL, EMBEDS, KEYS, STOPS),
    *(ABORTS, HOSTILE),
    groups.FEATURE,
    *(groups.KINDS, groups.WINDOW, groups.CHUNKS, groups.STATES),
    adapters.FEATURE,
    masks.FEATURE,
    sessions.FEATURE,
    encoder.FEATURE,
    events.FEATURE,
    transfers.FEATURE,
    pins.FEATURE,
    forks.FEATURE,
    tiers.FEATURE,
    cadence.FEATURE,
    CACHING,
)
"""The table. For an engine that lacks several features they are removed in this order: without
`async`, several frames in flight are a `pipeline`. New features are appended before the last row,
so that the features of older seeds stay the same."""
BY_NAME: Mapping[str, Feature] = {feature.name: feature for feature in FEATURES}
LATE = tuple([feature.name for feature in FEATURES if feature.is_late])
"""Names of features that are drawn after everything else (`Feature.is_late`)."""
SEVERAL_FRAMES = (
    *("several_frames_in_flight", "four_frames_in_flight", "abort_with_two_frames_in_flight"),
    *("reset_forced_with_two_frames_in_flight", "rejected_frame_out_of_order"),
    "dropped_token_runs_again",
)
"""Goals of several frames in flight."""
GOALS_NEED: tuple[tuple[str, frozenset[str]], ...] = (
    *[(name, SEVERAL_AT_ONCE) for name in SEVERAL_FRAMES],
    ("empty_plan_with_work", SEVERAL_AT_ONCE | {PAUSE.name, GRAMMAR.name}),
    ("running_left_out_by_budget", SEVERAL_AT_ONCE | {DRAFTS.name}),
    *[need for feature in FEATURES for need in feature.goals_need.items()],
)
"""Beginnings of coverage goals that need one of several features besides their own. Without all of
them a running request can always continue with the tokens of its admission."""
GOALS_APART: tuple[tuple[str, frozenset[str]], ...] = tuple(
    [apart for feature in FEATURES for apart in feature.goals_apart.items()]
)
"""Beginnings of coverage goals that cannot be reached if every run has one of several features."""
PARTS: tuple[PartOfSnapshot, ...] = tuple([it.part for it in FEATURES if it.part is not None])
"""Parts that a state has only with a feature, and that keep blocks for no request."""
SIGNAL_OF: Mapping[type, str] = {
    kind: signal for feature in FEATURES for kind, signal in feature.signal_of.items()
}
"""Signals of features that name no request, by the type of their event. They are answered with
`Ack`."""
APART: tuple[tuple[Feature, Feature, str], ...] = tuple(
    [
        (feature, BY_NAME[other], reason)
        for feature in FEATURES
        for other, reason in feature.apart.items()
    ]
)
"""Pairs of features that no run has both of, with the reason."""


def list_kept(snapshot: v.Snapshot) -> list[Kept]:
    """Return the blocks that features keep, and no request holds."""
    found: list[Kept] = []
    for part in PARTS:
        shown = getattr(snapshot, part.name)
        if shown is not None:
            found += part.list_kept(shown)
    return found


def load_parts(name: str) -> Mapping[str, ModuleType]:
    """Return the modules `features/NAME/<name>.py`, by the feature, in the order of the table."""
    folder = "blockstep.conformance.features"
    names = [feature.name for feature in FEATURES if find_spec(f"{folder}.{feature.name}")]
    paths = {feature: f"{folder}.{feature}.{name}" for feature in names}
    return {feature: import_module(path) for feature, path in paths.items() if find_spec(path)}


def is_off(name: str, lacked: Collection[str]) -> bool:
    """Return whether a config whose fields or properties `lacked` are false lacks a feature."""
    switches = BY_NAME[name].switches
    return bool(switches) and all(switch in lacked for switch in switches)


def list_apart(name: str) -> list[Feature]:
    """Return the features that no run has together with this one."""
    pairs = [(one, other) for one, other, _ in APART]
    pairs += [(other, one) for one, other in pairs]
    return [other for one, other in pairs if one.name == name]


def list_policies() -> list[Feature]:
    """Return the late features that are policies."""
    return [feature for feature in FEATURES if feature.is_late and "policy" in feature.values]


def find_policy(policy: v.Policy | None) -> Feature | None:
    """Return the late feature that is this policy, if any."""
    return next((it for it in list_policies() if it.values["policy"] is policy), None)


def list_wholes(name: str) -> tuple[str, ...]:
    """Return the names of the features that a feature is part of, the nearest first."""
    whole = BY_NAME[name].part_of
    return (whole, *list_wholes(whole)) if whole else ()


def is_reachable(situation: str, absent: Collection[str], always: Collection[str] = ()) -> bool:
    """Whether a coverage goal is reachable without `absent` features and with `always` in every
    run.
    """
    if any(situation.startswith(start) and needs <= {*absent} for start, needs in GOALS_NEED):
        return False
    if any(situation.startswith(BY_NAME[name].hides) for name in always):
        return False
    if any(situation.startswith(start) and others & {*always} for start, others in GOALS_APART):
        return False
    without = {*absent, *[other.name for name in always for other in list_apart(name)]}
    return not any(situation.startswith(BY_NAME[name].situations) for name in without)


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
