"""Situations of those who are preempted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from blockstep.conformance.judge.properties.amounts import share_of
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.queue_replay import victims_of
from blockstep.conformance.judge.properties.step import Step

PREEMPTION: Mapping[str, str] = {
    "preempted": "a request was preempted for want of blocks",
    "preempted_twice": "a request was preempted for at least the second time",
    "several_preempted_in_one_step": "one step preempted more than one",
    "self_preempted": "a request that lacked blocks preempted itself",
    "priority_victim_already_scheduled": "a victim had its row of the same step taken back",
    "priority_victim_not_last": "PRIORITY preempted one that FCFS would not have",
    "preempted_then_resumed": "a preempted request was admitted again",
    "resumed_with_hit": "a preempted request found its own or other blocks again",
    "resumed_with_outputs": "a preempted request returned with outputs to compute again",
}


def of_preemption(step: Step, ledger: Ledger) -> Iterator[str]:
    """Who was preempted, and what for."""
    victims = victims_of(step, ledger)
    place = {name: index for index, name in enumerate(step.before.running)}
    last_row = max((place[row.request_id] for row in step.running_rows), default=-1)
    if len(victims) > 1:
        yield "several_preempted_in_one_step"
    if not any(row.gained for row in step.running_rows):
        # Nobody got a block, so whoever lacked some is among the victims.
        yield "self_preempted"
    if set(victims) != set(step.before.running[-len(victims) :]):
        yield "priority_victim_not_last"
    for name in victims:
        old = step.old[name]
        yield "preempted"
        if old.num_preemptions:
            yield "preempted_twice"
        if old.spec_token_ids:
            yield "drafts_lost_by_preemption"
        if place[name] < last_row and share_of(ledger, old) > 0:
            # One behind it was scheduled, so the budget was not gone when it was visited.
            yield "priority_victim_already_scheduled"
