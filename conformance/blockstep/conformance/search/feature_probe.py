"""Feature probe: finds features that an adapter removes, and the goals that are then unreachable.

An engine that lacks a feature says so by its capabilities. Features without a capability, and
fields that its adapter removes from configs or requests, are found by trying them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from blockstep.conformance.engine import Equivalence, Safety
from blockstep.conformance.judge.coverage_goals import WITNESSES
from blockstep.conformance.judge.coverage_goals.core import PREEMPTION
from blockstep.conformance.protocol.feature import Feature
from blockstep.conformance.protocol.features import FEATURES, PIPELINE
from blockstep.spec import vocabulary as v

PLAIN_CONFIG = v.Config(
    num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64
)
PLAIN_REQUEST = v.Request("A", (1, 2, 3, 4, 5, 6), max_tokens=8)
ASKED_UNDER: tuple[Mapping[str, Any], ...] = (
    {},
    *[it.examples[0].config for it in FEATURES if it.goal_fields and it.examples[0].config],
)
"""Changes of `PLAIN_CONFIG` under which `fit_request` is tried: it may remove a field only if the
config has no use for it."""
STOPS: Mapping[str, Mapping[str, Any]] = {
    "stop_eos": {"eos_token_id": 7},
    "stop_token": {"stop_token_ids": (8,)},
    "stop_repetition": {"repetition_detection": v.RepetitionDetection(2)},
}
"""Goals that need a field of a request."""
NEED_A_FIELD: Mapping[str, Mapping[str, Any]] = {
    **STOPS,
    "min_tokens_held_back_a_stop": {"min_tokens": 2},
    "reading_skipped": {"skip_reading_prefix_cache": True},
    **{name: fields for it in FEATURES for name, fields in it.goal_fields.items()},
}
"""The same and others, by the beginnings of their names."""
AFTER_PREEMPTION = frozenset((*PREEMPTION, "abort_preempted"))
"""Goals that need a preemption."""
OWED_AT_SAFETY = frozenset(
    (
        *("admitted", "chunked_prefill", "prefix_hit", "preempted", "preempted_then_resumed"),
        *("resumed_with_outputs", "resumed_with_hit", "stop_eos", "stop_token", "stop_length"),
        *("stop_repetition", "several_frames_in_flight", "planned_before_its_token"),
        *("abort_waiting", "abort_in_flight", "drafts_taken", "drafts_scheduled"),
        *("drafts_all_accepted", "drafts_none_accepted", "draft_placeholders_scheduled"),
        *("grammar_promoted", "paused_new", "paused_all", "reset_done", "reset_forced"),
        "dropped_token_runs_again",
    )
)
"""Goals that a safety run must reach, as far as its engine can. How often the others are reached
depends on the engine's policy."""


def find_declined_features(scope: Equivalence) -> frozenset[str]:
    """Return the names of the features that an adapter removes from configs and requests."""
    return frozenset(feature.name for feature in FEATURES if _is_declined(feature, scope))


def find_unreachable_goals(scope: Equivalence, out_of_reach: frozenset[str]) -> frozenset[str]:
    """Return the goals that the adapter makes unreachable, or declares as unreachable.

    If no request is preempted, none is resumed either.
    """
    needy = tuple(
        beginning
        for beginning, fields in NEED_A_FIELD.items()
        if not _is_kept(fields, scope, list(fields)[-1:])
    )
    unmet = {name for name in WITNESSES if name.startswith(needy)}
    if not scope.fit_config(PLAIN_CONFIG).enable_chunked_prefill:
        unmet.add("chunked_prefill")
    if "preempted" in out_of_reach:
        unmet |= AFTER_PREEMPTION
    return out_of_reach | unmet


def _is_declined(feature: Feature, scope: Equivalence) -> bool:
    if not feature.examples:
        return False
    example = feature.examples[0]
    if example.config:
        asking = replace(PLAIN_CONFIG, **example.config)
        fitting = scope.fit_config(asking)
        if feature is PIPELINE:
            return fitting.max_frames_in_flight == 1
        return feature.is_asked_by(asking) and not feature.is_asked_by(fitting)
    fields = example.request
    return not _is_kept(fields, scope, fields.keys() & {*feature.request})


def _is_kept(fields: Mapping[str, Any], scope: Equivalence, asking: Collection[str] = ()) -> bool:
    """Return whether a request keeps any of these fields, or of those in `asking`, under one of a
    few configs; a config under which the request is declined does not count."""
    for changes in ASKED_UNDER:
        config = scope.fit_config(replace(PLAIN_CONFIG, **changes))
        request = scope.fit_request(replace(PLAIN_REQUEST, **fields), config)
        if request is None or any(
            getattr(request, name) != getattr(PLAIN_REQUEST, name) for name in asking or fields
        ):
            return True
    return False


def list_required_goals(scope: Equivalence | None) -> frozenset[str] | None:
    """Return the goals that a check must reach at an equivalence; None: no restriction."""
    return OWED_AT_SAFETY if isinstance(scope, Safety) else None
