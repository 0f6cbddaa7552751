"""Replay of the free queue: which blocks a step took and gave back, in which order.

    before.free_queue ++ freed by preemption  ->  hits leave the middle, new blocks the head

A replay needs no rule of scheduling: the plan says who got which blocks, the states say who was
preempted. Only where a preempted request had been scheduled earlier in the same step, and so had
taken blocks that no answer shows, is the order not known; such a step is not replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.step import PlannedRow, Step
from blockstep.spec import vocabulary as v


@dataclass(slots=True)
class QueueReplay:
    """What the free queue went through during one step."""

    final: list[v.BlockId]
    """The free queue as it must be after the step."""
    wrong: list[tuple[v.RequestId, v.BlockId, v.BlockId | None]] = field(default_factory=list)
    """Taken out of turn: by whom, which block, and which one was at the head."""
    room: dict[v.RequestId, tuple[int, int]] = field(default_factory=dict)
    """Of each admitted row: free blocks before it was admitted, and free ones among its hits."""


def victims_of(step: Step, ledger: Ledger) -> list[v.RequestId]:
    """Who was preempted in this step, in the order in which the policy preempts.

    FCFS preempts from the end of the running list. PRIORITY preempts whoever would be admitted
    last: the greatest (priority, arrival_time, request_id). Upstream leaves the id out; then of
    two equal requests the older one gives way to the younger, and by turns neither gets anywhere.
    """
    if step.config.policy is v.Policy.FCFS:
        return step.preempted[::-1]
    return sorted(step.preempted, key=lambda name: ledger.lives[name].order, reverse=True)


def in_policy_order(ledger: Ledger, snapshot: v.Snapshot) -> list[v.RequestId]:
    """All who wait, in the order in which a plan meets them.

    FCFS meets skipped requests before waiting ones, for they came earlier. PRIORITY meets the
    lowest (priority, arrival_time, request_id) of both.
    """
    names = [*snapshot.skipped_waiting, *snapshot.waiting]
    if ledger.config.policy is v.Policy.PRIORITY:
        names.sort(key=lambda name: ledger.lives[name].order)
    return names


def is_passed_over(ledger: Ledger, request: v.RequestSnapshot) -> bool:
    """Whether a request waits for something outside: its grammar, or its tokens in flight."""
    if ledger.promised.get(request.request_id):
        return True
    return (
        request.status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and not ledger.lives[request.request_id].grammar_ready
    )


def passed_over(step: Step, ledger: Ledger) -> list[v.RequestId]:
    """Whom a plan met at a queue's head and passed over, in the order in which it met them.

    It met everybody up to the first whom it could have admitted and did not, as long as it had
    budget and a place left.
    """
    before, config = step.before, step.config
    if ledger.pause_state is not v.PauseState.UNPAUSED or step.preempted:
        return []
    left = config.max_num_batched_tokens - sum(row.num_scheduled for row in step.running_rows)
    places = config.max_num_seqs - len(before.running)
    admitted = {row.request_id: row.num_scheduled for row in step.admitted_rows}
    met = []
    for name in in_policy_order(ledger, before):
        if left <= 0 or places <= 0:
            break
        if name in admitted:
            left -= admitted[name]
            places -= 1
        elif is_passed_over(ledger, step.old[name]):
            met.append(name)
        else:
            break
    return met


def hides_a_rollback(step: Step, victims: Sequence[v.RequestId]) -> bool:
    """Whether a victim may have been scheduled in this very step before it was preempted.

    Requests are visited in running order, and who lacks blocks ends up with a row or is preempted
    itself. So a victim was not visited before if it stands behind all rows, and each later victim
    stands before it.
    """
    if not victims or step.config.policy is v.Policy.FCFS:
        return False
    places = [step.place[name] for name in victims]
    last_row = max((step.place.get(row.request_id, 0) for row in step.running_rows), default=-1)
    return min(places) < last_row or places != sorted(places, reverse=True)


def freed_blocks(before: v.Snapshot, names: Sequence[v.RequestId]) -> list[v.BlockId]:
    """Blocks that become free when these requests free theirs, in order of joining the queue."""
    counts = list(before.ref_counts)
    tables = {request.request_id: request.block_tables for request in before.requests}
    freed = []
    for name in names:
        for table in tables[name]:
            for block in reversed(table):
                counts[block] -= 1
                if counts[block] == 0:
                    freed.append(block)
    return freed


def replay_schedule(step: Step, victims: Sequence[v.RequestId]) -> QueueReplay:
    """Take and give back blocks as the plan says; the step hides no rollback."""
    queue = list(step.before.free_queue)
    if victims:
        # Whether freed before or after a block is taken: one end gives, the other receives.
        queue += freed_blocks(step.before, victims)
    replay = QueueReplay(queue)
    if any(row.hits or row.gained for row in step.rows):
        for row in step.rows:
            _replay_row(replay, row)
    return replay


def _replay_row(replay: QueueReplay, row: PlannedRow) -> None:
    queue = replay.final
    num_free = len(queue)
    for block in row.hits:
        if block in queue:
            queue.remove(block)
    replay.room[row.request_id] = (num_free, num_free - len(queue))
    for block in row.gained:
        if queue and queue[0] == block:
            del queue[0]
            continue
        replay.wrong.append((row.request_id, block, queue[0] if queue else None))
        if block in queue:
            queue.remove(block)
