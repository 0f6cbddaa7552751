"""Adapters: P9 requests use no more different adapters than the limit, and others are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from blockstep.conformance.judge.goals import Goals
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import (
    begin_admission,
    in_policy_order,
    is_passed_over,
    passed_over,
)
from blockstep.conformance.judge.properties.sentence import Complaint, Complaints, sentence
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.protocol.findings import Finding, violated
from blockstep.spec import vocabulary as v


@sentence(
    "P9", v.Schedule, of="changes", fixes="when adapters of requests without a row are exchanged"
)
def running_stays_within_max_loras(step: Step, ledger: Ledger) -> Complaints:
    """Running requests, with a row or without, use at most `max_loras` different adapters."""
    limit = step.config.max_loras
    if not limit:
        return ()
    lives = [ledger.lives[name] for name in step.after.running if name in ledger.lives]
    used = sorted({life.request.adapter for life in lives if life.request.adapter is not None})
    return [Complaint(f"adapters {used} are in use, {limit} may be")] if len(used) > limit else ()


def judge_plan(
    config: v.Config, live: Mapping[v.RequestId, v.Request], plan: v.Plan
) -> Iterator[Finding]:
    """Yield a finding if the plan has too many adapters; `live` are the unfinished requests."""
    if not config.max_loras:
        return
    names = [row.request_id for row in plan.rows]
    adapters = {live[name].adapter for name in names if name in live} - {None}
    if len(adapters) > config.max_loras:
        what = f"adapters {sorted(map(str, adapters))} in one plan, {config.max_loras} allowed"
        yield violated("P9", "plan_stays_within_max_loras", what)


class LoraSlots:
    """The LoRA slots that requests occupy: at most `max_loras` different adapters."""

    def __init__(self, ledger: Ledger) -> None:
        self._lives = ledger.lives
        self._most = ledger.config.max_loras
        self._taken: set[str] = set()

    def has_room_for(self, name: v.RequestId) -> bool:
        """Whether a request has no adapter, one that has a slot, or a slot is left."""
        adapter = self._lives[name].request.adapter
        return adapter is None or adapter in self._taken or len(self._taken) < self._most

    def take(self, name: v.RequestId) -> None:
        """Give a request's adapter a slot."""
        adapter = self._lives[name].request.adapter
        if adapter is not None:
            self._taken.add(adapter)


GATE = LoraSlots


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


def of_adapters(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of a plan with a limit on adapters."""
    lives = ledger.lives
    rows = {row.request_id for row in step.rows}
    used = {lives[name].request.adapter for name in step.after.running} - {None}
    if len(used) == step.config.max_loras:
        yield "adapters_all_in_use"
        if used - {lives[name].request.adapter for name in rows}:
            yield "adapters_idle_seat_kept"
    gates, skipped = begin_admission(step, ledger), set(step.before.skipped_waiting)
    met, is_past = set(passed_over(step, ledger)), False
    admitted = {row.request_id for row in step.admitted_rows}
    for name in in_policy_order(ledger, step.before):
        if name in admitted:
            was_left = name in skipped and step.old[name].status is v.Status.WAITING
            yield from _of_admission(lives[name].request.adapter, is_past, was_left)
            gates.take(name)
        elif name in met and not (
            is_passed_over(ledger, step.old[name]) or gates.has_room_for(name)
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


def find(step: Step, ledger: Ledger) -> Iterator[str]:
    """Yield the goals of a step."""
    if isinstance(step.observation, v.Plan):
        yield from of_adapters(step, ledger)


GOALS = Goals(TEXTS, find)
