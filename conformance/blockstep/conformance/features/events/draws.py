"""Configs with a log of KV events."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.draw.feature import Draws, Late


def add_to_config(late: Late) -> None:
    """Let the engine tell KV events."""
    late.config = replace(late.config, enable_kv_cache_events=True)


DRAWS = Draws(add_to_config=add_to_config)
