"""Features: what a config or a request may ask for besides the core.

The order of `FEATURES` is the order in which they take part at every moment.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Final

from blockstep.spec.core.feature import Feature, is_always
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.features import (
    admission_control,
    encoder,
    forks,
    kv_transfer,
    lora,
    pins,
    sessions,
    structured_output,
)
from blockstep.spec.rules import STRICT_RULES, Rules
from blockstep.spec.step.admission import process_flight_gate
from blockstep.spec.step.plans import tell_zeroes
from blockstep.spec.step.share import limit_to_states
from blockstep.spec.vocabulary import Config


def has_groups(config: Config) -> bool:
    """Whether there are KV groups. Source: architecture D13."""
    return bool(config.groups)


FEATURES: Final[tuple[Feature, ...]] = (
    structured_output.FEATURE,
    Feature("async", is_always, Hooks(gates=(process_flight_gate,))),
    lora.FEATURE,
    encoder.FEATURE,
    Feature("groups", has_groups, Hooks(limits=(limit_to_states,), fields=(tell_zeroes,))),
    kv_transfer.FEATURE,
    forks.FEATURE,
    admission_control.FEATURE,
    pins.FEATURE,
    sessions.FEATURE,
)


@cache
def get_feature_rules(names: tuple[str, ...]) -> Rules:
    """Return the strict rules with these features. Source: architecture D11."""
    rules = STRICT_RULES
    for feature in FEATURES:
        if feature.name in names:
            rules = replace(rules, hooks=rules.hooks.with_hooks(feature.hooks))
            for function, by in feature.instead.items():
                rules = rules.replacing(function, by)
    return replace(rules, remake=(get_feature_rules, (names,)))


def get_config_rules(config: Config) -> Rules:
    """Return the strict rules with the features that a config asks for. Source: architecture
    D11."""
    return get_feature_rules(tuple([one.name for one in FEATURES if one.is_asked_for(config)]))
