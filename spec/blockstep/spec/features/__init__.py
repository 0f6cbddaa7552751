"""Features: what a config or a request may ask for besides the core.

The order of `FEATURES` is the order in which they take part at every moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Final

from blockstep.spec.core.async_ import process_flight_gate
from blockstep.spec.core.feature import Feature, Process, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.rules import STRICT_RULES, Rules
from blockstep.spec.features import (
    admission_control,
    common_prefix,
    encoder,
    forks,
    full_isl,
    groups,
    identity,
    kv_events,
    kv_transfer,
    lora,
    mamba,
    offload,
    pins,
    prefill_cadence,
    reclaim,
    repetition,
    resets,
    sessions,
    statistics,
    structured_output,
)
from blockstep.spec.vocabulary import Config

FEATURES: Final[tuple[Feature, ...]] = (
    identity.FEATURE,
    common_prefix.FEATURE,
    full_isl.FEATURE,
    repetition.FEATURE,
    statistics.FEATURE,
    structured_output.FEATURE,
    Feature("async", is_always, Hooks(gates=(process_flight_gate,))),
    lora.FEATURE,
    prefill_cadence.FEATURE,
    encoder.FEATURE,
    groups.FEATURE,
    mamba.FEATURE,
    kv_transfer.FEATURE,
    offload.FEATURE,
    forks.FEATURE,
    *admission_control.FEATURES,
    kv_events.FEATURE,
    pins.FEATURE,
    sessions.FEATURE,
    reclaim.FEATURE,
    resets.FEATURE,
)
EVENTS: Final[Mapping[type, Process]] = {
    kind: process for feature in FEATURES for kind, process in feature.events.items()
}
"""The functions for the events of features, by type."""


@cache
def get_feature_rules(names: tuple[str, ...]) -> Rules:
    """Return the strict rules with these features. Source: architecture D11."""
    rules = STRICT_RULES
    for feature in FEATURES:
        if feature.name in names:
            hooks, shows = rules.hooks.with_hooks(feature.hooks), {**rules.shows, **feature.shows}
            rules = replace(rules, hooks=hooks, shows=shows)
            for function, by in feature.instead.items():
                rules = rules.replacing(function, rules[by])
    return replace(rules, remake=(get_feature_rules, (names,)))


def get_config_rules(config: Config) -> Rules:
    """Return the strict rules with the features that a config asks for. Source: architecture
    D11."""
    return get_feature_rules(tuple([one.name for one in FEATURES if one.is_asked_for(config)]))
