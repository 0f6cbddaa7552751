"""Capabilities: what each of our engines implements, and what a config needs.

By value: the enum belongs to the conformance package, which this package must not import.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from blockstep.spec.vocabulary import (
    Config,
    ConfigProblem,
    GroupKind,
    Policy,
    PoolOrder,
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
        "kinds",
        "common prefix",
        "adapters",
        "cadence",
        "masks",
        "sessions",
        "encoder",
        "events",
        "transfers",
        "pins",
        "forks",
        "tiers",
        "work",
    )
)
"""All capabilities."""
DEVICE: Final = HOST - {
    *("kinds", "common prefix", "adapters", "masks", "sessions", "encoder", "events"),
    *("forks", "pins", "transfers", "tiers", "cadence"),
}
"""The kernels on a GPU: core features, and groups of blocks of one size."""


def list_config_problems(
    config: Config, capabilities: frozenset[str] = HOST
) -> tuple[ConfigProblem, ...]:
    """Return every problem of a config for an engine with these capabilities."""
    problems = config_problems(config)
    if problems:
        return problems
    lacking = list_needed(config) - capabilities
    if "groups" in lacking:
        lacking -= {"kinds"}
    if not lacking:
        return ()
    return tuple(
        ConfigProblem(field, getattr(config, field), rule, fix)
        for name, field, rule, fix in _LACKED
        if name in lacking and getattr(config, field) != _DEFAULTS[field]
    )


_LACKED: Final = (
    ("priority", "policy", "must be fcfs: this engine has no priorities", "use Policy.FCFS"),
    ("drafts", "spec_method", "must be none: this engine has no drafts", "leave it out"),
    ("async", "async_scheduling", "must be False: this engine is synchronous", "leave it out"),
    ("pipeline", "max_frames_in_flight", "must be 1: this engine plans one step", "leave it out"),
    ("groups", "groups", "must be empty: this engine has one KV-cache group", "leave it out"),
    (
        "kinds",
        "groups",
        "must be full attention and sliding windows in blocks of one size: this engine has no more",
        "use GroupKind.FULL or SLIDING_WINDOW, with the block_size of the config",
    ),
    (
        "masks",
        "reasoning_end_token_id",
        "must be None: this engine has no masks, so no grammar to hold off",
        "leave it out",
    ),
    (
        "cadence",
        "prefill_schedule_interval",
        "must be 1: this engine computes prompts in every step",
        "leave it out",
    ),
    ("adapters", "max_loras", "must be 0: this engine has no cap on adapters", "leave it out"),
    ("encoder", "encoder_cache_size", "must be 0: this engine has no encoder", "leave it out"),
    (
        "events",
        "enable_kv_cache_events",
        "must be False: this engine has no KV events",
        "leave it out",
    ),
    ("transfers", "kv_connector", "must be False: this engine has no store", "leave it out"),
    ("pins", "policy", "must not be continuum: this engine pins nothing", "use Policy.FCFS"),
    ("forks", "enable_forks", "must be False: this engine has no forks", "leave it out"),
    ("forks", "watermark_blocks", "must be 0: this engine keeps none free", "leave it out"),
    ("forks", "pool_order", "must be lru: this engine has no other order", "leave it out"),
    ("tiers", "swap_min_tokens", "must be 0: this engine saves nothing", "leave it out"),
    ("tiers", "admission_high_blocks", "must be 0: its admission stays open", "leave it out"),
)
"""Capabilities, the fields of a config that need them, and why an engine without cannot have them.
"""
_DEFAULTS: Final = {field.name: field.default for field in fields(Config)}


def list_needed(config: Config) -> frozenset[str]:
    """Return the capabilities that an engine needs for this config."""
    several = config.max_frames_in_flight > 1
    asked = {
        "priority": config.policy is Policy.PRIORITY,
        "drafts": config.spec_method is not SpecMethod.NONE,
        "async": config.async_scheduling,
        "pipeline": several and not config.async_scheduling,
        "groups": bool(config.groups),
        "kinds": any(
            group.kind not in (GroupKind.FULL, GroupKind.SLIDING_WINDOW)
            or group.block_size != config.block_size
            for group in config.groups
        ),
        "adapters": config.max_loras > 0,
        "cadence": config.has_prefill_interval,
        "masks": config.reasoning_end_token_id is not None,
        "encoder": config.encoder_cache_size > 0,
        "events": config.enable_kv_cache_events,
        "transfers": config.kv_connector,
        "pins": config.policy is Policy.CONTINUUM,
        "forks": config.enable_forks
        or config.watermark_blocks > 0
        or config.pool_order is not PoolOrder.LRU,
        "tiers": config.swap_min_tokens > 0 or config.admission_high_blocks > 0,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)
