"""Pins: blocks that are kept between two turns of an agent job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blockstep.conformance.engine import Capability
from blockstep.conformance.protocol.feature import Example, Feature, Kept, PartOfSnapshot
from blockstep.spec import vocabulary as v


def list_kept(pins: v.PinsSnapshot) -> list[Kept]:
    """Return the blocks of each pin."""
    return [
        Kept(f"job {pin.job_id}", pin.block_tables, pin, pin.end <= pins.now) for pin in pins.pins
    ]


def rename(pins: v.PinsSnapshot, name: Callable[[v.BlockTables], v.BlockTables]) -> v.PinsSnapshot:
    """Return the pins with other names for their blocks."""
    kept = [replace(pin, block_tables=name(pin.block_tables)) for pin in pins.pins]
    return replace(pins, pins=tuple(kept))


FEATURE = Feature(
    "pins",
    "pins: blocks are kept between two turns of an agent job, for a time that an estimator gives",
    Capability.PINS,
    config={"policy": v.Policy.FCFS},
    values={"policy": v.Policy.CONTINUUM},
    request=("job_id", "is_last_step"),
    actions=(v.Clock, v.PinEstimate),
    situations=("pins_",),
    properties=("P10", "P17"),
    needs=("caching",),
    apart={"priority": "a run has one policy"},
    switches=("has_pins",),
    is_late=True,
    examples=(Example({"policy": v.Policy.CONTINUUM}),),
    goal_fields={
        "pins_": {"job_id": "j"},
        "pins_last_step": {"job_id": "j", "is_last_step": True},
    },
    rare=(
        *(
            "pins_last_step",
            "pins_of_whom_gave_up",
            "pins_preempted_beside",
            "pins_warm_goes_ahead",
        ),
        *("pins_victim_stands_ahead", "pins_victim_of_a_job", "pins_preempted_stays_ahead"),
        *("pins_reset", "pins_reset_forced", "pins_reset_refused", "pins_hit"),
    ),
    signals_to_all={
        "clock": "a clock gives the time",
        "estimate": "an estimator says how long the blocks of a job stay",
    },
    signal_of={v.Clock: "clock", v.PinEstimate: "estimate"},
    part=PartOfSnapshot("pins", "has_pins", list_kept, rename),
    headlines={
        "pins_are_reclaimed_only_as_last_resort": (
            "LIVENESS: a pin was reclaimed while other requests run"
        ),
        "pins_do_not_block_admission": "LIVENESS: {request} waits for blocks that only pins hold",
        "requests_of_pinned_jobs_are_preempted_last": (
            "ORDER: a request of a pinned job was preempted before others"
        ),
        "pins_are_of_turns_that_ended": "TRANSFER: the pins are not those of the turns that ended",
        "pins_end_in_time": "TRANSFER: a pin outlives its end, or a plan changed one",
        "pins_hold_cached_blocks": "TRANSFER: a pin holds {block}, which is not cached",
        "clock_and_estimates_follow_events": "PROTOCOL: time or estimates are not the last given",
    },
)
