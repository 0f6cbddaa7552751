"""Capabilities: what each of our engines implements, and what a config asks for.

By value: the enum belongs to the conformance wing, which this wing must not import.
"""

from __future__ import annotations

from typing import Final

from blockstep.spec.vocabulary import Config, Policy, SpecMethod

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
    )
)
"""Everything."""
COMPILED: Final = HOST
"""So far everything too."""


def list_needed(config: Config) -> frozenset[str]:
    """What an engine must be capable of to take this config."""
    several = config.max_frames_in_flight > 1
    asked = {
        "priority": config.policy is Policy.PRIORITY,
        "drafts": config.spec_method is not SpecMethod.NONE,
        "async": config.async_scheduling,
        "pipeline": several and not config.async_scheduling,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)
