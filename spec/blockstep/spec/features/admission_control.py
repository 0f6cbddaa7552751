"""Pressure: admission closes when few blocks are free, and opens when enough are free.

               low            high
    free  0 ---|--------------|-------------> closed below `low`, open from `high` on, unchanged
                                              in between

Without a distance between the two, each admission may preempt another request, which is admitted
next: requests are computed again and again.
"""

from __future__ import annotations

from typing import Final

from blockstep.spec.core.block_pool import get_num_free_blocks
from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.parts import Part
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step
from blockstep.spec.vocabulary import Config

ADMISSION_CLOSED: Final = Part("admission_closed", False)
"""Whether admission is closed, in a state or a step."""


def is_admission_closed(
    was_closed: bool, num_running: int, has_victims: bool, num_free: int, low: int, high: int
) -> bool:
    """Whether admission is closed in a step, after its running phase.

    Running requests finish, and then their blocks are free; if no request runs there is nothing to
    wait for. So no request waits for ever (P10). A `high` of 0 never closes. Source: seed 002
    "Memory Pressure Signals", which counts cached blocks as used, and so may close admission of an
    empty engine.
    """
    if high == 0 or num_running == 0:
        return False
    return has_victims or num_free < (high if was_closed else low)


def process_admission_control(step: Step) -> bool:
    """Close or open admission for this step; return whether it is closed.

    Source: seed 002 "Memory Pressure Signals"; P10.
    """
    config = step.state.config
    closed = is_admission_closed(
        ADMISSION_CLOSED.of(step),
        len(step.running),
        bool(step.preempted),
        get_num_free_blocks(step.pool),
        config.admission_low_blocks,
        config.admission_high_blocks,
    )
    ADMISSION_CLOSED.set(step, closed)
    return closed


def has_watermark(config: Config) -> bool:
    """Whether an admission leaves some blocks free. Source: seed 002 "The Watermark"."""
    return config.watermark_blocks > 0


def has_limit(config: Config) -> bool:
    """Whether admission may close. Source: seed 002 "Memory Pressure Signals"."""
    return config.admission_high_blocks > 0


def get_watermark(step: Step) -> int:
    """Return the free blocks that an admission leaves to other running requests (watermark).

    With no running request there is no watermark, so no request waits without need. Source: seed
    002 "The Watermark", which applies to an empty engine, too; P8, P10.
    """
    return step.state.config.watermark_blocks if step.running else 0


def is_closed_only_with_a_limit(state: State) -> bool:
    """Admission is closed only if the config has a limit for it. Source: P10."""
    return has_limit(state.config) or not ADMISSION_CLOSED.of(state)


FEATURES: Final = (
    Feature(
        "admission_control",
        has_limit,
        Hooks(closes=(process_admission_control,)),
        shows={"admission_closed": ADMISSION_CLOSED.of},
        invariants=(is_closed_only_with_a_limit,),
    ),
    Feature("watermark", has_watermark, Hooks(spares=(get_watermark,))),
)
