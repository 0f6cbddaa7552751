"""Capabilities: what each of our engines implements, and what a config asks for.

By value: the enum belongs to the conformance wing, which this wing must not import.
"""

from __future__ import annotations

from typing import Final

from blockstep.spec.vocabulary import (
    Config,
    ConfigProblem,
    Policy,
    SpecMethod,
    config_problems,
)

HOST: Final = frozenset(
    (
        "snapshot",
        "priority",
        "drafts",
        "pause",
        "reset",
        "grammar",
        "multimodal",
        "embeds",
        "abort",
        "rejection",
        "async",
        "pipeline",
        "statistics",
        "cache statistics",
        "late drafts",
        "groups",
        "common prefix",
    )
)
"""Everything."""
COMPILED: Final = HOST - {"groups", "common prefix"}
"""The same for one KV-cache group, without its hint to the worker."""


def list_config_problems(config: Config) -> tuple[ConfigProblem, ...]:
    """Every reason against a config for an engine that has one KV-cache group."""
    problems = list_encoder_problems(config)
    if problems or not config.groups:
        return problems
    rule, fix = "must be empty: this engine has one KV-cache group", "leave it out"
    return (ConfigProblem("groups", config.groups, rule, fix),)


def list_encoder_problems(config: Config) -> tuple[ConfigProblem, ...]:
    """Every reason against a config for an engine that has no encoder."""
    problems = config_problems(config)
    if problems or not config.encoder_cache_size:
        return problems
    rule, fix = "must be 0: this engine has no encoder", "leave it out"
    return (ConfigProblem("encoder_cache_size", config.encoder_cache_size, rule, fix),)


def list_needed(config: Config) -> frozenset[str]:
    """What an engine must be capable of to take this config."""
    several = config.max_frames_in_flight > 1
    asked = {
        "priority": config.policy is Policy.PRIORITY,
        "drafts": config.spec_method is not SpecMethod.NONE,
        "async": config.async_scheduling,
        "pipeline": several and not config.async_scheduling,
        "groups": bool(config.groups),
        "encoder": config.encoder_cache_size > 0,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)
