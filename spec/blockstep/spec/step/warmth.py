"""Warmth: expiry of pins in a step, queue order of their jobs, and reclaim of their blocks."""

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
    """End pins whose time is over, before any allocation; then sort jobs with a pin to the front.

    Source: seed 001 "Change 5"; P16, P17.
    """
    process_unpinning(step, list_expired(step.pins))
    step.waiting = get_warm_first(step.waiting, step.requests, list_jobs(step.pins))


def get_warm_first(
    waiting: Iterable[RequestId], requests: Requests, warm: Collection[str]
) -> list[RequestId]:
    """Return the queue with preempted requests first, then those of jobs with a pin; stable.

    A preempted request has waited longest, and computes its tokens again. Source: seed 001 "Change
    5"; P16.
    """
    return sorted(waiting, key=lambda name: compute_coldness(requests[name], warm))


def compute_coldness(request: RequestState, warm: Collection[str]) -> int:
    """Return the request's class in the queue; the least goes first.

    Source: seed 001 "Change 5"; P16.
    """
    if request.status is Status.PREEMPTED:
        return 0
    return 1 if request.request.job_id in warm else 2


def process_taking(step: Step, receiver_id: RequestId) -> bool:
    """Reclaim blocks for a request that lacks some: a pin, or else those of a request that does not
    run.

    Returns whether there was one. Source: P10, P17.
    """
    givers = list_givers(step.pins, step.requests[receiver_id].request.job_id)
    process_unpinning(step, givers[:1])
    return bool(givers) or process_giving(step, receiver_id)


def process_unpinning(step: Step, gone: list[Pin]) -> None:
    """End these pins now. Source: seed 001 "Change 4"; P17."""
    if gone:
        step.pool, pins = free_pins(step.pool, step.pins, gone)
        step.pins = forget_jobs(pins, list_unfinished_jobs(step.requests))
