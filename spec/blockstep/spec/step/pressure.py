"""Pressure: admission closes where blocks are short, and opens again where enough are free.

              low            high
    free  0 ---|--------------|-------------> closed below `low`, open from `high` on, and as it
                                              was between them

Without a distance between the two, whoever is admitted may cost somebody else its blocks, whose
turn is next: everybody is computed again and again.
"""

from __future__ import annotations

from blockstep.spec.pool import get_num_free_blocks
from blockstep.spec.step.work import Step


def is_closed(
    was_closed: bool, num_running: int, has_victims: bool, num_free: int, low: int, high: int
) -> bool:
    """Whether nobody is admitted, of a step whose running requests have what they get.

    Whoever runs comes to its end, and its blocks are free then; where nobody runs nothing is to be
    waited for. So nobody waits for ever (P10). A `high` of 0 never closes.
    Source: seed 002 "Memory Pressure Signals", which counts what is cached as used, and so may
    have an empty engine admit nobody.
    """
    if high == 0 or num_running == 0:
        return False
    return has_victims or num_free < (high if was_closed else low)


def process_pressure(step: Step) -> None:
    """Close or open admission for this step. Source: seed 002 "Memory Pressure Signals"; P10."""
    config = step.state.config
    step.admission_closed = is_closed(
        step.state.admission_closed,
        len(step.running),
        bool(step.preempted),
        get_num_free_blocks(step.pool),
        config.admission_low_blocks,
        config.admission_high_blocks,
    )
