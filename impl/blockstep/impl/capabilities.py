"""Capabilities: what our engines implement, which is everything."""

from __future__ import annotations

from typing import Final

CAPABILITIES: Final = frozenset(
    (
        "snapshot",
        "priority",
        "drafts",
        "pause",
        "reset",
        "grammar",
        "multimodal",
        "rejection",
        "async",
        "statistics",
        "cache statistics",
        "late drafts",
    )
)
"""By value: the enum belongs to the conformance wing, which this wing must not import."""
