"""Configs with a prefill cadence."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.draw.feature import Draws, Late


def add_to_config(late: Late) -> None:
    """Hold prompts for one to three steps."""
    late.config = replace(late.config, prefill_schedule_interval=late.draw.choice((2, 2, 3, 4)))


DRAWS = Draws(add_to_config=add_to_config, waits=True)
