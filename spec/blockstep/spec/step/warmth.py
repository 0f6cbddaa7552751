"""Warmth: what a step does for jobs of which a pin is there, and for those who lack its blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from blockstep.spec.memory.pins import (
    forget_jobs,
    free_pins,
    list_expired,
    list_givers,
    list_jobs,
    list_unfinished_jobs,
)
from blockstep.spec.requests import RequestState
from blockstep.spec.step.giving import process_giving
from blockstep.spec.step.queues import Requests
from blockstep.spec.step.work import Step
from blockstep.spec.vocabulary import Pin, RequestId, Status


def process_expiry(step: Step) -> None:
    """Pins end whose time is over, before anything is allocated; then who is warm goes ahead.

    Source: seed 001 "Change 5"; P16, P17.
    """
    process_unpinning(step, list_expired(step.pins))
    step.waiting = get_warm_first(step.waiting, step.requests, list_jobs(step.pins))


def get_warm_first(
    waiting: Iterable[RequestId], requests: Requests, warm: Collection[str]
) -> list[RequestId]:
    """The queue with the preempted first, then who is of a job with a pin; equals as before.

    Who was preempted has waited longest, and computes again what it had. Source: seed 001
    "Change 5"; P16.
    """
    return sorted(waiting, key=lambda name: compute_coldness(requests[name], warm))


def compute_coldness(request: RequestState, warm: Collection[str]) -> int:
    """Its class in the queue; the least goes first. Source: seed 001 "Change 5"; P16."""
    if request.status is Status.PREEMPTED:
        return 0
    return 1 if request.request.job_id in warm else 2


def process_taking(step: Step, receiver_id: RequestId) -> bool:
    """Take blocks of who does not run for one that lacks some: a pin's first, for it is nobody's
    yet; whether there was one. Source: P10, P17.
    """
    givers = list_givers(step.pins, step.requests[receiver_id].request.job_id)
    process_unpinning(step, givers[:1])
    return bool(givers) or process_giving(step, receiver_id)


def process_unpinning(step: Step, gone: list[Pin]) -> None:
    """These pins end now. Source: seed 001 "Change 4"; P17."""
    if gone:
        step.pool, pins = free_pins(step.pool, step.pins, gone)
        step.pins = forget_jobs(pins, list_unfinished_jobs(step.requests))
