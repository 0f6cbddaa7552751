"""Goals that need a limit on adapters: LoRA slots, and requests skipped for lack of one."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.queue_replay import (
    begin_admission,
    in_policy_order,
    is_passed_over,
    passed_over,
)
from blockstep.spec import vocabulary as v

TEXTS = {
    "adapters_all_in_use": "running requests used max_loras adapters",
    "adapters_passed_over": "a request was skipped because its adapter had no LoRA slot",
    "adapters_base_model_goes_past": (
        "a request without an adapter was admitted before one so skipped"
    ),
    "adapters_shared_seat_goes_past": (
        "a request whose adapter had a LoRA slot was admitted before one so skipped"
    ),
    "adapters_seat_taken": "a request that had been skipped for its adapter was admitted",
    "adapters_idle_seat_kept": "an adapter kept its LoRA slot for a running request without a row",
}


def of_adapters(step: Step, history: History) -> Iterator[str]:
    """Yield the goals of a plan with a limit on adapters."""
    lives = history.lives
    rows = {row.request_id for row in step.rows}
    used = {lives[name].request.adapter for name in step.after.running} - {None}
    if len(used) == step.config.max_loras:
        yield "adapters_all_in_use"
        if used - {lives[name].request.adapter for name in rows}:
            yield "adapters_idle_seat_kept"
    waiting = in_policy_order(history, step.before)
    if all(lives[name].request.adapter is None for name in waiting):
        return
    gates, skipped = begin_admission(step, history), set(step.before.skipped_waiting)
    met, is_past = set(passed_over(step, history)), False
    admitted = {row.request_id for row in step.admitted_rows}
    for name in waiting:
        if name in admitted:
            was_left = name in skipped and step.old[name].status is v.Status.WAITING
            yield from _of_admission(lives[name].request.adapter, is_past, was_left)
            gates.take(name)
        elif name in met and not (
            is_passed_over(history, step.old[name]) or gates.has_room_for(name)
        ):
            is_past = True
            yield "adapters_passed_over"


def _of_admission(adapter: str | None, is_past: bool, was_skipped: bool) -> Iterator[str]:
    if adapter is not None and was_skipped:
        yield "adapters_seat_taken"
    if is_past:
        yield (
            "adapters_base_model_goes_past" if adapter is None else "adapters_shared_seat_goes_past"
        )


GOALS = Goals(TEXTS, {v.Schedule: of_adapters})
