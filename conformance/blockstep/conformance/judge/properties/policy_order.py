"""Order: P16 which requests are admitted and preempted, and which blocks are evicted, ties
included; P10 preemption makes progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

from blockstep.conformance.judge.properties.history import History, order_of
from blockstep.conformance.judge.properties.observed_step import Step, is_parked, keeps_blocks
from blockstep.conformance.judge.properties.property_check import (
    ENDINGS,
    Complaint,
    Complaints,
    difference,
    differing_blocks,
    differing_requests,
    sentence,
    unequal,
)
from blockstep.conformance.judge.properties.queue_replay import (
    Freed,
    Holders,
    begin_admission,
    begin_plan,
    find_keeper,
    find_waiting,
    hides_a_rollback,
    in_policy_order,
    in_waiting_order,
    is_passed_over,
    left_behind,
    may_pass_over,
    must_wait,
    passed_over,
    preempted_in_order,
    queue_up,
    replay_schedule,
)
from blockstep.conformance.protocol.findings import MUST_WAIT, Subjects, requests_apart
from blockstep.spec import vocabulary as v


@sentence("P16", *ENDINGS, v.Submit, v.Schedule, v.Reset, v.Fork, of="changes")
def every_request_is_in_one_queue(step: Step, _history: History) -> Complaints:
    """Each unfinished request is in exactly one of the queues and the running list.

    Which one is a policy, for instance between two inputs of a session; other checks are about
    that.
    """
    after = step.after
    names = after.waiting + after.skipped_waiting + after.running
    if len(names) == len(after.requests) and set(names) == step.new.keys():
        return ()
    what = "queues and unfinished requests differ"
    wanted, seen = sorted(step.new), sorted(names)
    return [unequal(what, "queues", wanted, seen, requests_apart(wanted, seen))]


@sentence("P16", v.Submit, fixes="the order of a queue")
def new_request_joins_the_end_of_its_queue(step: Step, history: History) -> Complaints:
    """FCFS puts a new request at the end of its queue. PRIORITY puts it after all that are served
    before it."""
    assert isinstance(step.event, v.Submit)
    request = step.event.request
    before, after = step.before, step.after
    queues = {"waiting": before.waiting, "skipped_waiting": before.skipped_waiting}
    name = "skipped_waiting" if request.structured_output else "waiting"
    queues[name] += (request.request_id,)
    if step.config.policy is v.Policy.PRIORITY:
        orders = {other: life.order for other, life in history.lives.items()}
        orders[request.request_id] = order_of(request)
        queues[name] = tuple(sorted(queues[name], key=orders.__getitem__))
    for queue, expected in queues.items():
        yield from differing_requests(queue, expected, getattr(after, queue))


@sentence("P16", v.Schedule, of="admitted_rows", fixes="which request is admitted, and when")
def admissions_follow_the_policy(step: Step, history: History) -> Complaints:
    """The admitted requests are the first in policy order that could be admitted; none is left out.

    Skipped are requests that wait for a grammar, for tokens in flight, for a load, or at a
    gate of a feature. A request with a finished load need not wait for one before it that does not
    fit.
    """
    if not step.admitted_rows or (step.config.kv_connector and step.giving):
        return ()  # the store may make a reclaimed request wait
    admitted = [row.request_id for row in step.admitted_rows]
    ready: list[v.RequestId] = []
    gates, is_stopped = begin_admission(step, history), False
    parked = {row.request_id for row in step.parked} if step.plan.kv_loads else ()
    for name in in_policy_order(history, step.before):
        if len(ready) == len(admitted) or name in parked:
            continue
        old = step.old[name]
        if must_wait(history, gates, old) or (is_stopped and not is_parked(old)):
            continue
        if name not in admitted and step.config.kv_connector:
            is_stopped = True
            continue
        ready.append(name)
        gates.take(name)
    for name in admitted:
        if name not in ready and is_passed_over(history, step.old[name]):
            order = difference("order of admission", ready, admitted)
            return [Complaint(f"{name!r} {MUST_WAIT}", (order,), name)]
    return differing_requests("order of admission", ready, admitted)


@sentence("P16", v.Schedule, v.Reset, fixes="the order of a queue")
def queues_keep_their_order(step: Step, history: History) -> Complaints:
    """Admitted requests leave the queues; preempted requests go to the head, the first preempted
    last.

    A request skipped for its tokens in flight or its adapter moves to the head of
    `skipped_waiting`.
    """
    victims = preempted_in_order(step, history)
    if isinstance(step.event, v.Reset):
        # A forced reset preempts from the end of the running list under both policies.
        victims = [name for name in reversed(step.before.running) if name in set(victims)]
        admitted: set[v.RequestId] = set()
    else:
        admitted = {row.request_id for row in step.admitted_rows}
    old = step.before
    queue = old.waiting if isinstance(step.event, v.Reset) else in_waiting_order(history, old)
    waiting = [*reversed(victims), *(name for name in queue if name not in admitted)]
    skipped = [name for name in old.skipped_waiting if name not in admitted]
    if step.config.policy is v.Policy.PRIORITY and victims:
        waiting.sort(key=lambda name: history.lives[name].order)
    elif may_pass_over(history) and isinstance(step.event, v.Schedule) and old.waiting:
        moved = passed_over(step, history)
        skipped = [*moved, *(name for name in skipped if name not in moved)]
        waiting = [name for name in waiting if name not in moved]
        if step.config.policy is v.Policy.PRIORITY:
            skipped.sort(key=lambda name: history.lives[name].order)
    yield from differing_requests("waiting", waiting, list(step.after.waiting))
    yield from differing_requests("skipped_waiting", skipped, list(step.after.skipped_waiting))


@sentence("P16", v.Schedule, v.Commit, fixes="the order of the running list")
def running_list_keeps_its_order(step: Step, _history: History) -> Complaints:
    """Requests that continue to run keep their order. Admitted ones follow in order of admission,
    which is also the order of their rows in a plan."""
    admitted: list[list[v.RequestId]] = []
    if isinstance(step.event, v.Schedule):
        resumed = [row.request_id for row in step.plan.cached if row.resumed]
        admitted = [[row.request_id for row in step.plan.new], resumed]
    begun = {name for names in admitted for name in names}
    after = step.after.running
    kept = [name for name in step.before.running if name in after and name not in begun]
    rest = [name for name in after if name not in kept]
    if not all(_is_in_order(rest, names) for names in admitted):
        rest = [name for names in admitted for name in names if name in rest]
    return differing_requests("running", [*kept, *rest], list(after))


def _is_in_order(names: Sequence[v.RequestId], planned: Sequence[v.RequestId]) -> bool:
    """Whether those of `names` that are `planned` are in the order of the plan."""
    return [name for name in names if name in planned] == [it for it in planned if it in names]


@sentence("P16", v.Schedule, of="preempted", fixes="which request is preempted")
def preempted_fcfs_are_the_youngest(step: Step, _history: History) -> Complaints:
    """FCFS preempts from the end of the running list."""
    if step.config.policy is not v.Policy.FCFS or not step.preempted:
        return ()
    count = len(step.preempted)
    tail = sorted(step.before.running[-count:])
    return differing_requests("preempted", tail, sorted(step.preempted))


@sentence("P16", v.Schedule, of="preempted", fixes="which request is preempted")
def preempted_priority_never_outrank_survivors(step: Step, history: History) -> Complaints:
    """PRIORITY preempts the requests that are served last in the order of its queues, ties
    included."""
    if step.config.policy is not v.Policy.PRIORITY or not step.preempted:
        return ()
    ranked = sorted(step.before.running, key=lambda name: history.lives[name].order, reverse=True)
    count = len(step.preempted)
    return differing_requests("preempted", sorted(ranked[:count]), sorted(step.preempted))


@sentence("P16", v.Schedule, of="admitted_rows", fixes="which request is admitted, and when")
def no_admission_after_a_preemption(step: Step, history: History) -> Complaints:
    """A step that preempts admits no request: the freed blocks are for running ones. This is a
    policy.

    A step in which a running request waits for blocks that a commit will free admits none either.
    """
    if not step.admitted_rows:
        return
    names = [row.request_id for row in step.admitted_rows]
    if step.preempted:
        yield Complaint(f"{names} admitted although {step.preempted} were preempted")
    waiting = find_waiting(step, history)
    if waiting is not None:
        yield Complaint(f"{names} admitted although {waiting!r} waits for blocks", subjects=waiting)


@sentence("P16", v.Schedule, of="acts", fixes="which free block is taken first")
def new_blocks_come_from_the_head_of_the_free_queue(step: Step, history: History) -> Complaints:
    """The least recently freed block is evicted first; hits are taken from any place in the
    queue."""
    victims = preempted_in_order(step, history)
    if hides_a_rollback(step, victims) or step.hides_what_was_given:
        return ()
    replay = replay_schedule(step, history, victims)
    if replay.deferred is not None and not waits_as_due(step, replay.deferred):
        return ()
    if replay.wrong:
        return [
            unequal(
                f"{name!r} took block {block} out of turn",
                "block",
                head,
                block,
                subjects=Subjects((name,), (block,)),
            )
            for name, block, head in replay.wrong
        ]
    return differing_blocks("free_queue", replay.final, list(step.after.free_queue))


@sentence("P16", v.Schedule, of="preempted", fixes="which free block is taken first")
def preempted_tail_is_evicted_first(step: Step, history: History) -> Complaints:
    """The blocks of a preempted request join the free queue last block first, so that the end of a
    prefix is evicted before its start.

    It is checked for the last victim also where the rest of the queue cannot be replayed.
    """
    victims = preempted_in_order(step, history)
    if not victims or step.hides_what_was_given or _may_have_copied(step, victims):
        return ()
    freed = _freed_by_last(step, history, victims)
    queue = list(step.after.free_queue)
    is_stack = step.config.pool_order is v.PoolOrder.LIFO
    if step.config.groups or is_stack:  # others' blocks are among them
        queue = [block for block in queue if block in freed]
    length = min(len(freed), len(queue))
    if is_stack:
        return differing_blocks("head of free_queue", freed[len(freed) - length :], queue[:length])
    return differing_blocks(
        "end of free_queue", freed[len(freed) - length :], queue[-length:] if length else []
    )


def _may_have_copied(step: Step, victims: Sequence[v.RequestId]) -> bool:
    """Whether the last victim may have had a row with a copied block, which it gave back and which
    no plan shows."""
    if not step.config.enable_forks or not hides_a_rollback(step, victims):
        return False
    last, counts = step.old[victims[-1]], step.before.ref_counts
    for table, size in zip(last.block_tables, step.block_sizes, strict=True):
        index, written = divmod(last.num_computed_tokens, size)
        if written and index < len(table) and counts[table[index]] > 1:
            return True
    return False


def _freed_by_last(step: Step, history: History, victims: Sequence[v.RequestId]) -> list[v.BlockId]:
    """Blocks that the last victim alone gave back, of those that it held before the step.

    Skipped blocks are left out, since it is not visible when they were given back.
    """
    _, holders = begin_plan(step, history)
    for name in victims[:-1]:
        holders.free(name)
    for row in step.running_rows if step.plan.block_copies else ():
        if row.copies:
            holders.give_back(row.request_id, [[it.source for it in of] for of in row.copies])
    holders.give_back(victims[-1], left_behind(step, history, victims[-1]))
    return queue_up(step.config, (), holders.free(victims[-1]))


@sentence("P16", *ENDINGS, v.Reset, fixes="which free block is taken first")
def freed_tail_is_evicted_first(step: Step, history: History) -> Complaints:
    """Blocks of ended requests join the end of the free queue, last block of each table first.

    A block with another holder stays out. Requests end in order: of scheduling in a commit, as
    listed in an abort; a forced reset takes the running list from its end. P17 is about blocks that
    should wait for a frame in flight and do not.
    """
    before, after = step.before, step.after
    if isinstance(step.event, ENDINGS) and step.config.kv_connector:
        follow = follow_holds(step, history)
        if not waits_as_due(step, follow.deferred):
            return ()
        return differing_blocks("free_queue", _queued(step, follow.freed), after.free_queue)
    is_forced = isinstance(step.event, v.Reset) and step.event.reset_running_requests
    may_others_give = history.has_sessions or any(map(keeps_blocks, before.requests))
    keeper = find_keeper(history)
    if keeper is not None and not (is_forced and may_others_give):
        freed = keeper.follow(step, history)
        return differing_blocks("free_queue", _queued(step, freed), after.free_queue)
    if not isinstance(step.event, v.Reset):
        names = [name for name in step.ended if _is_freed(step, history, name)]
    else:
        is_done = isinstance(step.observation, v.ResetDone) and step.observation.success
        if not (step.event.reset_running_requests and is_done):
            names = []
        elif may_others_give:
            return ()  # the order of reclaiming idle requests is a policy
        else:
            names = list(reversed(before.running))
    holders = Holders(step, history)
    freed = [found for name in names if name in step.old for found in holders.free(name)]
    if not waits_as_due(step, holders.deferred):
        return ()
    return differing_blocks("free_queue", _queued(step, freed), after.free_queue)


def waits_as_due(step: Step, deferred: Sequence[v.DeferredFree]) -> bool:
    """Whether the expected blocks wait for frames in flight."""
    after = step.after.transfers
    return after is None or sorted(map(astuple, deferred)) == sorted(
        map(astuple, after.deferred_frees)
    )


def _queued(step: Step, freed: Freed) -> tuple[v.BlockId, ...]:
    return tuple(queue_up(step.config, step.before.free_queue, freed))


class Holds(NamedTuple):
    """Blocks freed and held after an event that may end requests, with a store."""

    freed: Freed
    """Freed blocks, in order."""
    held: dict[v.RequestId, v.HeldBlocks]
    """Blocks of ended requests that transfers hold."""
    deferred: list[v.DeferredFree]
    """Blocks that wait for frames in flight."""


def follow_holds(step: Step, history: History) -> Holds:
    """The blocks that an event which may end requests frees, in order, and those that stay held.

    A commit first frees the blocks that waited for its frame. A request that ends leaves blocks to
    a feature that keeps some, to its load, and to a store that reads them. Then a report ends
    holds, loads first.
    """
    keeper = find_keeper(history)
    ends = None if keeper is None else keeper.begin_ends(step)
    store, report = history.store, history.store.get_report(step)
    freed: Freed = []
    holders, held = Holders(step, history), dict(store.held)
    if isinstance(step.event, v.Commit):
        freed += holders.answer(step.event.frame_id)
    for name in history.list_lost(step):
        freed += holders.free(name)
    for name in step.ended:
        if name not in step.old or not _is_freed(step, history, name):
            continue
        goes_on = history.goes_on(name, step)
        if ends is not None and not goes_on:
            freed += ends.end(history, name, holders)
        hold = None if goes_on else store.find_hold(step.old[name])
        if hold is None:
            freed += holders.free(name)
        else:
            held[name] = hold
    signals = [(name, True) for name in report.finished_recving]
    signals += [(name, False) for name in report.finished_sending]
    for name, is_recving in signals:
        old_hold = held.get(name)
        if old_hold is None:
            continue
        if is_recving:
            held[name] = replace(old_hold, is_recving=False)
        else:
            held[name] = replace(old_hold, is_sending=False)
        if not (held[name].is_recving or held[name].is_sending):
            del held[name]
            freed += holders.free(name)
    return Holds(freed, held, holders.deferred)


def _is_freed(step: Step, history: History, name: v.RequestId) -> bool:
    """Whether a request that stopped gave its blocks back; a session may keep them."""
    if not history.goes_on(name, step):
        return True
    return name in step.new and not any(step.new[name].block_tables)


# P10. A victim computes everything again, so a scheduler can preempt for ever without effect. Two
# checks exclude this. A request must survive each preemption; and before a request is preempted
# again, a survivor must have run since the victim's admission. A survivor that is never preempted
# computes a token in each such round, and its sequence is finite. So between two events that count
# as progress, each request is preempted at most as often as a sequence is long.


@sentence("P10", v.Schedule, of="preempted", covered_by="every_request_finishes_after_faults_stop")
def preemption_leaves_a_running_request(step: Step, history: History) -> Complaints:
    """A plan that preempts leaves at least one request running, since a request alone in the pool
    fits.

    Exceptions: the last victim has tokens in flight, whose delivery is progress; or a transfer or a
    frame in flight holds blocks, whose end frees them.
    """
    if not step.preempted or step.after.running:
        return ()
    if step.after.transfers is not None and step.after.transfers.deferred_frees:
        return ()
    if history.store.held or any(map(history.store.is_under_way, step.after.requests)):
        return ()
    last = preempted_in_order(step, history)[-1]
    if history.placeholders(last):
        return ()
    return [Complaint(f"all running requests were preempted, {last!r} last", subjects=last)]


@sentence("P10", v.Schedule, of="preempted", covered_by="every_request_finishes_after_faults_stop")
def no_repeated_preemption_without_progress(step: Step, history: History) -> Complaints:
    """Between two preemptions of a request there is progress.

    Progress is: tokens were delivered; other requests compete for blocks; or a request that
    survives has run since the victim was last admitted, and has computed a token since or has
    tokens in flight.
    """
    if not step.preempted or not step.after.running:
        return
    rows = {row.request_id for row in step.running_rows}
    for name in step.preempted:
        life = history.lives[name]
        if life.preempted_at is None or life.preempted_at != history.num_progress:
            continue
        since = life.admitted_in
        survivors = [history.lives[other] for other in step.after.running]
        if not any(
            other.admitted_in <= since
            and (
                other.last_planned_in >= since
                or other.request.request_id in rows
                or history.promised.get(other.request.request_id)
            )
            for other in survivors
        ):
            yield Complaint(
                f"{name!r} was preempted again, without progress since the last time", subjects=name
            )
