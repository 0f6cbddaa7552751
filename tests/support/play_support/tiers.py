"""Swap-out and admission control: plays in which victims are saved or admission closes."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.spec.vocabulary import Schedule, Submit
from play_support.play import CONFIG, C, Case, Play, after, nothing, observed, request

TIERED = replace(
    CONFIG,
    num_blocks=7,
    scheduler_reserve_full_isl=False,
    kv_connector=True,
    swap_min_tokens=2,
    admission_high_blocks=2,
)
P = request("P", 1, 2, 3, 4, 5, max_tokens=6)
Q = request("Q", 5, 4, 3, 2, 1, max_tokens=6)


def saved() -> Play:
    """Q, with two full blocks and a partial one, is preempted for P."""
    return Play(TIERED).do(Submit(P), Submit(Q)).run(2).do(Schedule())


def admitted() -> Play:
    """C is admitted while P runs."""
    return Play(TIERED).do(Submit(P)).run(1).do(Submit(C), Schedule())


def committed() -> Play:
    """P gets a token, and there are enough free blocks."""
    return Play(TIERED).do(Submit(P)).run(1)


def other_save(step: Step, **fields: object) -> Step:
    """Return the step with other fields in the save of Q."""
    (save,) = step.plan.kv_saves
    return observed(step, kv_saves=(replace(save, **fields),))  # type: ignore[arg-type]


def saved_in_part(step: Step) -> Step:
    (save,) = step.plan.kv_saves
    return other_save(step, block_ids=(save.block_ids[0][:1],), num_tokens=2)


def closed(step: Step) -> Step:
    """Return the step with admission closed after it."""
    return after(step, admission_closed=True)


ALONE: list[Case] = [
    ("victims_are_saved_up_to_confirmed_blocks", saved, nothing, saved_in_part),
    (
        "no_admission_while_closed",
        admitted,
        nothing,
        closed,
    ),
    (
        "admission_closes_and_opens_at_its_thresholds",
        saved,
        nothing,
        lambda s: after(s, admission_closed=False),
    ),
]
