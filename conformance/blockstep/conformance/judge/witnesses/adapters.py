"""Situations that there are only where adapters are few: who has a seat, and who is passed over."""

from __future__ import annotations

from collections.abc import Iterator

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import (
    get_seats,
    in_policy_order,
    is_passed_over,
    passed_over,
)
from blockstep.conformance.judge.properties.step import Step
from blockstep.spec.vocabulary import Status

ADAPTERS = {
    "adapters_all_in_use": "as many adapters as there may be were of those who run",
    "adapters_passed_over": "a request was passed over because its adapter would be one too many",
    "adapters_base_model_goes_past": "one without an adapter was admitted past one passed over so",
    "adapters_shared_seat_goes_past": "likewise one of an adapter that was in use",
    "adapters_seat_taken": "one who had been passed over for its adapter was admitted",
    "adapters_idle_seat_kept": "an adapter was kept by one who runs, but had no row",
}


def of_adapters(step: Step, ledger: Ledger) -> Iterator[str]:
    """What a plan shows where there may be so many adapters at once."""
    lives = ledger.lives
    rows = {row.request_id for row in step.rows}
    used = {lives[name].request.adapter for name in step.after.running} - {None}
    if len(used) == step.config.max_loras:
        yield "adapters_all_in_use"
        if used - {lives[name].request.adapter for name in rows}:
            yield "adapters_idle_seat_kept"
    seats, skipped = get_seats(step, ledger), set(step.before.skipped_waiting)
    met, is_past = set(passed_over(step, ledger)), False
    admitted = {row.request_id for row in step.admitted_rows}
    for name in in_policy_order(ledger, step.before):
        if name in admitted:
            was_left = name in skipped and step.old[name].status is Status.WAITING
            yield from _of_admission(lives[name].request.adapter, is_past, was_left)
            seats.take(name)
        elif name in met and not (
            is_passed_over(ledger, step.old[name]) or seats.has_one_for(name)
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
