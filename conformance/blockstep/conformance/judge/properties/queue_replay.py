"""Replay of the free queue: which blocks a step took and gave back, in which order.

    before.free_queue ++ freed by preemption  ->  hits leave the middle, new blocks the head

A replay needs no rule of scheduling: the plan says who got which blocks, the states say who was
preempted. Only where a preempted request had been scheduled earlier in the same step, and so had
taken blocks that no answer shows, is the order not known; such a step is not replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from blockstep.conformance.judge.attended import blocks_of_drafts, count_unattended
from blockstep.conformance.judge.properties.amounts import (
    blocks_behind,
    running_slots,
    share_of,
)
from blockstep.conformance.judge.properties.hits import may_ask_the_store
from blockstep.conformance.judge.properties.ledger import Ledger
from blockstep.conformance.judge.properties.sentence import once_a_step
from blockstep.conformance.judge.properties.step import PlannedRow, Step, keeps_blocks
from blockstep.spec import vocabulary as v

Freed: TypeAlias = list[list[v.BlockId]]
"""Blocks that become free: of one table after the other, each from its end."""


def queue_up(config: v.Config, queue: Iterable[v.BlockId], freed: Freed) -> list[v.BlockId]:
    """The free queue once these have joined it: its end, or table by table its head."""
    if config.pool_order is v.PoolOrder.LIFO:
        return [*chain(*reversed(freed)), *queue]
    return [*queue, *chain(*freed)]


@dataclass(slots=True)
class QueueReplay:
    """What the free queue went through during one step."""

    final: list[v.BlockId]
    """The free queue as it must be after the step."""
    wrong: list[tuple[v.RequestId, v.BlockId, v.BlockId | None]] = field(default_factory=list)
    """Taken out of turn: by whom, which block, and which one was at the head."""
    room: dict[v.RequestId, tuple[int, int]] = field(default_factory=dict)
    """Of each admitted row: free blocks before it was admitted, and free ones among its hits."""
    deferred: list[v.DeferredFree] | None = None
    """What waits for frames in flight after the step, if anything was given back."""
    room_of_the_last: int | None = None
    """Free blocks when the last victim had to give way to itself; None if to another one."""


def victims_of(step: Step, ledger: Ledger) -> list[v.RequestId]:
    """Who was preempted in this step, in the order in which the policy preempts.

    FCFS preempts from the end of the running list; CONTINUUM as well, those of jobs with a pin
    behind all others. PRIORITY preempts whoever would be admitted
    last: the greatest (priority, arrival_time, request_id). Upstream leaves the id out; then of
    two equal requests the older one gives way to the younger, and by turns neither gets anywhere.
    """
    if step.config.policy is v.Policy.FCFS or not step.preempted:
        return step.preempted[::-1]
    if step.config.policy is v.Policy.CONTINUUM:
        warm = list_pinned(step.before)
        youngest = step.preempted[::-1]
        return sorted(youngest, key=lambda name: ledger.lives[name].request.job_id in warm)
    return sorted(step.preempted, key=lambda name: ledger.lives[name].order, reverse=True)


def list_pinned(snapshot: v.Snapshot) -> set[str | None]:
    """Jobs with a pin whose time is not over: at the beginning of a plan."""
    pins = snapshot.pins
    return set() if pins is None else {pin.job_id for pin in pins.pins if pin.end > pins.now}


def in_waiting_order(ledger: Ledger, snapshot: v.Snapshot) -> list[v.RequestId]:
    """The waiting queue as a plan takes it up.

    CONTINUUM has the preempted first, then those of jobs with a pin.
    """
    names = [*snapshot.waiting]
    if ledger.config.policy is not v.Policy.CONTINUUM:
        return names
    warm = list_pinned(snapshot)
    if warm:
        returning = {
            request.request_id
            for request in snapshot.requests
            if request.status is v.Status.PREEMPTED
        }
        cold = {name for name in names if ledger.lives[name].request.job_id not in warm}
        names.sort(key=lambda name: (name not in returning) * (1 + (name in cold)))
    return names


def in_policy_order(
    ledger: Ledger, snapshot: v.Snapshot, is_behind_a_plan: bool = False
) -> list[v.RequestId]:
    """All who wait, in the order in which a plan meets them; or has met them, behind one.

    FCFS meets skipped requests before waiting ones, for they came earlier. PRIORITY meets the
    lowest (priority, arrival_time, request_id) of both.
    """
    waiting = snapshot.waiting if is_behind_a_plan else in_waiting_order(ledger, snapshot)
    names = [*snapshot.skipped_waiting, *waiting]
    if ledger.config.policy is v.Policy.PRIORITY:
        names.sort(key=lambda name: ledger.lives[name].order)
    return names


def is_passed_over(ledger: Ledger, request: v.RequestSnapshot) -> bool:
    """Whether a request waits for something outside: its grammar, its tokens in flight, further
    input, a load, or for a store that does not know yet what it has."""
    if ledger.config.kv_connector and _waits_for_the_store(ledger, request):
        return True
    if ledger.promised.get(request.request_id):
        return True
    if request.status is v.Status.WAITING_FOR_STREAMING_REQ:
        return True
    return (
        request.status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and not ledger.lives[request.request_id].grammar_ready
    )


def _waits_for_the_store(ledger: Ledger, request: v.RequestSnapshot) -> bool:
    name = request.request_id
    if ledger.store.is_under_way(request):
        return True
    is_asked = may_ask_the_store(ledger.config, ledger.lives[name].request)
    if not is_asked or request.num_computed_tokens:
        return False
    return ledger.store.transfers.get_offer(name).num_tokens is None


class Seats:
    """Adapters of those who run, while others join them: at most `max_loras` different ones."""

    def __init__(self, ledger: Ledger, names: Iterable[v.RequestId]) -> None:
        self._lives = ledger.lives
        self._most = ledger.config.max_loras
        self._taken: set[str | None] = set()
        for name in names if self._most else ():
            self.take(name)

    def has_one_for(self, name: v.RequestId) -> bool:
        """Whether a request has no adapter, one of theirs, or one that may join them."""
        if not self._most:
            return True
        adapter = self._lives[name].request.adapter
        return adapter is None or adapter in self._taken or len(self._taken) < self._most

    def take(self, name: v.RequestId) -> None:
        """A request joins them."""
        adapter = self._lives[name].request.adapter if self._most else None
        if adapter is not None:
            self._taken.add(adapter)


def must_wait(ledger: Ledger, seats: Seats, request: v.RequestSnapshot) -> bool:
    """Whether others are tried before a waiting request: for what is outside, or for a seat."""
    return is_passed_over(ledger, request) or not seats.has_one_for(request.request_id)


def may_pass_over(config: v.Config) -> bool:
    """Whether one may be passed over that stands among the waiting ones."""
    return config.max_frames_in_flight > 1 or config.max_loras > 0 or config.kv_connector


def get_seats(step: Step, ledger: Ledger) -> Seats:
    """The seats as they are when a plan begins to admit."""
    running = step.before.running if ledger.config.max_loras else ()
    return Seats(ledger, [name for name in running if name not in step.preempted])


@once_a_step
def find_waiting(step: Step, ledger: Ledger) -> v.RequestId | None:
    """The running request that gets no row in a plan, and waits for the answer to a frame.

    It lacks blocks, and a frame in flight names the request that would be preempted for it next, or
    that would give it blocks if it runs alone: those blocks would be free behind that answer.
    """
    config, after = step.config, step.after
    if not config.kv_connector or config.max_frames_in_flight == 1 or not after.running:
        return None
    givers = [max(after.running, key=lambda name: ledger.lives[name].order)]
    if config.policy is not v.Policy.PRIORITY:
        youngest, warm = after.running[::-1], list_pinned(step.before)
        cold = [name for name in youngest if ledger.lives[name].request.job_id not in warm]
        givers = [*cold[:1], *youngest][:1]
    if len(after.running) == 1:
        givers += [old.request_id for old in step.old.values() if keeps_blocks(old)]
    if all(ledger.get_fence(name) is None for name in givers):
        return None
    is_paused = ledger.pause_state is v.PauseState.PAUSED_ALL
    left = 0 if is_paused else config.max_num_batched_tokens
    rows = {row.request_id: row for row in step.running_rows}
    for name in step.before.running:
        if name in rows or name not in after.running:
            left -= rows[name].num_scheduled if name in rows else 0
            continue
        old, new = step.old[name], step.new[name]
        share = min(share_of(ledger, old), left)
        slots = running_slots(config, old.num_computed_tokens + share)
        num_lacking = blocks_behind(config, slots, new.block_tables) if share > 0 else 0
        if num_lacking > len(after.free_queue):
            return name
    return None


@once_a_step
def admits_nobody(step: Step, ledger: Ledger) -> bool:
    """Whether a plan did not get as far as to admit: it preempted, one that runs waits for the
    answer to a frame, or admission is closed."""
    return step.admits_nobody or find_waiting(step, ledger) is not None


@once_a_step
def passed_over(step: Step, ledger: Ledger) -> list[v.RequestId]:
    """Whom a plan met at a queue's head and passed over, in the order in which it met them.

    It met everybody up to the first whom it could have admitted and did not, as long as it had
    budget and a place left.
    """
    before, config = step.before, step.config
    if ledger.pause_state is not v.PauseState.UNPAUSED or admits_nobody(step, ledger):
        return []
    left = config.max_num_batched_tokens - sum(row.num_scheduled for row in step.running_rows)
    places = config.max_num_seqs - len(before.running)
    admitted = {row.request_id: row.num_scheduled for row in step.admitted_rows}
    met, seats = [], get_seats(step, ledger)
    parked = {row.request_id for row in step.parked} if step.plan.kv_loads else ()
    giving = step.giving if config.kv_connector else ()
    for name in in_policy_order(ledger, before):
        if left <= 0 or places <= 0:
            break
        if name in admitted:
            left -= admitted[name]
            places -= 1
            seats.take(name)
        elif name in parked or must_wait(
            # Who has given its blocks away asks the store anew.
            *(ledger, seats, step.new[name] if name in giving else step.old[name])
        ):
            met.append(name)
        else:
            break
    return met


@once_a_step
def next_in_line(step: Step, ledger: Ledger) -> v.RequestId | None:
    """Who would be admitted next: the first in policy order that waits for nothing outside, and
    whose adapter may join those of the running."""
    seats = Seats(ledger, step.after.running)
    for name in in_policy_order(ledger, step.after, is_behind_a_plan=True):
        if not must_wait(ledger, seats, step.new[name]):
            return name
    return None


def list_takers(step: Step, ledger: Ledger) -> list[PlannedRow]:
    """Who was admitted or parked, in the order in which a plan met them."""
    if not step.plan.kv_loads:
        return step.admitted_rows
    order = in_policy_order(ledger, step.before)
    place = {name: index for index, name in enumerate(order)}
    rows = [*step.admitted_rows, *step.parked]
    return sorted(rows, key=lambda row: place.get(row.request_id, len(place)))


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


def freed_blocks(step: Step, ledger: Ledger, names: Sequence[v.RequestId]) -> Freed:
    """Blocks that become free when these requests free theirs, in order of joining the queue."""
    holders = Holders(step, ledger)
    return [freed for name in names for freed in holders.free(name)]


class Holders:
    """Who holds which blocks, while requests and pins give some back.

    Blocks of a request that a frame in flight names are not free yet: its answer frees them.
    """

    def __init__(self, step: Step, ledger: Ledger) -> None:
        before = step.before
        self._step, self._ledger = step, ledger
        self.deferred = [] if before.transfers is None else [*before.transfers.deferred_frees]
        """Blocks that wait for frames in flight, in the order in which they were given up."""
        self._counts = list(before.ref_counts)
        held = () if before.transfers is None else before.transfers.held
        holding: tuple[v.RequestSnapshot | v.HeldBlocks, ...] = (*before.requests, *held)
        self._tables: dict[v.RequestId | v.Pin, v.BlockTables] = {
            holder.request_id: holder.block_tables for holder in holding
        }
        if before.pins is not None:
            self._tables.update({pin: pin.block_tables for pin in before.pins.pins})

    def hold(self, pin: v.Pin) -> None:
        """A new pin holds its blocks, which others hold as well."""
        self._tables[pin] = pin.block_tables
        for block in chain(*pin.block_tables):
            self._counts[block] += 1

    def free(self, name: v.RequestId | v.Pin) -> Freed:
        """All that a request holds: what becomes free of it, the last block of each table first."""
        tables, self._tables[name] = self._tables[name], ()
        fence = self._ledger.get_fence(name, self._step) if isinstance(name, str) else None
        if fence is None:
            return [self._drop(table) for table in tables]
        self._defer(fence, chain(*tables))
        return []

    def give_back(self, name: v.RequestId, given: Sequence[Sequence[v.BlockId]]) -> Freed:
        """Likewise some blocks of each of its tables."""
        fence = self._ledger.get_fence(name, self._step)
        freed = [self._drop(blocks) for blocks in given] if fence is None else []
        if fence is not None:
            for blocks in given:
                self._defer(fence, blocks)
        self._tables[name] = tuple(
            tuple(block for block in table if block not in blocks)
            for table, blocks in zip(self._tables[name], given, strict=True)
        )
        return freed

    def answer(self, frame_id: v.FrameId) -> Freed:
        """A frame is answered: what becomes free that waited for it, the last block first."""
        due = [entry for entry in self.deferred if entry.frame_id == frame_id]
        self.deferred = [entry for entry in self.deferred if entry.frame_id != frame_id]
        return [self._drop(entry.block_ids) for entry in due]

    def _defer(self, fence: v.FrameId, blocks: Iterable[v.BlockId]) -> None:
        kept = tuple([block for block in blocks if block != v.NULL_BLOCK])
        if kept:
            self.deferred.append(v.DeferredFree(fence, kept))

    def _drop(self, blocks: Sequence[v.BlockId]) -> list[v.BlockId]:
        freed, counts = [], self._counts
        for block in reversed(blocks):
            if block != v.NULL_BLOCK:
                counts[block] -= 1
                if counts[block] == 0:
                    freed.append(block)
        return freed


def begin_plan(step: Step, ledger: Ledger) -> tuple[list[v.BlockId], Holders]:
    """The free queue, and who holds what, once the pins have ended whose time is over."""
    before = step.before
    queue, holders, pins = list(before.free_queue), Holders(step, ledger), before.pins
    if pins is not None:
        for pin in pins.pins:
            if pin.end <= pins.now:
                queue = queue_up(step.config, queue, holders.free(pin))
    return queue, holders


def unattended_ends(
    step: Step, num_computed: int, in_doubt: int, is_running: bool = False
) -> list[int]:
    """Per group: up to which index of its table a request attends to nothing more.

    Drafts in flight may be rejected: then it goes on where the first of them is. One that runs also
    keeps the blocks where boundaries end that drafts accepted just now may have passed: states are
    copied there before they are left.
    """
    return [
        count_unattended(
            group,
            max(num_computed - max(in_doubt, group.num_speculative_blocks * is_running), 0),
        )
        for group in step.config.groups
    ]


def left_behind(step: Step, ledger: Ledger, name: v.RequestId) -> list[tuple[v.BlockId, ...]]:
    """Per group: the blocks of a request that runs which it attends to no more."""
    old, in_doubt = step.old[name], ledger.count_drafts_in_flight().get(name, 0)
    if not step.config.groups:
        return [()]
    ends = unattended_ends(step, old.num_computed_tokens, in_doubt, is_running=True)
    return [table[:end] for table, end in zip(old.block_tables, ends, strict=True)]


def replay_schedule(step: Step, ledger: Ledger, victims: Sequence[v.RequestId]) -> QueueReplay:
    """Take and give back blocks as plan and states say; the step hides no rollback.

    A running request first gives back what it attends to no more. Who then lacks blocks has others
    preempted until there are enough, or until it is preempted itself.
    """
    is_plain = not (victims or _may_give_back(step, ledger))
    if is_plain and step.before.pins is None:  # nobody gives anything back
        replay = QueueReplay(list(step.before.free_queue))
    else:
        queue, holders = begin_plan(step, ledger)
        replay = QueueReplay(queue)
        if not is_plain:
            _replay_running(replay, step, ledger, victims, holders)
            replay.deferred = holders.deferred
    for row in step.running_rows if is_plain else ():
        if row.gained or row.hits:
            _replay_row(replay, row)
    for row in list_takers(step, ledger):
        _replay_row(replay, row)
    return replay


def _may_give_back(step: Step, ledger: Ledger) -> bool:
    """Whether one who runs on has more null blocks than before: each stands for one given back."""
    if not step.config.groups:
        return False
    waiting = find_waiting(step, ledger)
    names = [row.request_id for row in step.running_rows]
    for name in names if waiting is None else [*names, waiting]:
        old, new = step.old[name], step.new[name]
        for before, after in zip(old.block_tables, new.block_tables, strict=True):
            if v.NULL_BLOCK in after and after.count(v.NULL_BLOCK) > before.count(v.NULL_BLOCK):
                return True
    return False


def _given_back(step: Step, name: v.RequestId) -> list[list[v.BlockId]]:
    """Per group: the blocks in whose places null blocks stand after the step, none moved on."""
    tables = zip(step.old[name].block_tables, step.new[name].block_tables, strict=True)
    given = []
    for group, (old, new) in zip(step.config.groups, tables, strict=True):
        blocks: list[v.BlockId] = []
        if v.NULL_BLOCK in new:
            moved = blocks_of_drafts(group, old)
            pairs = zip(old, new, strict=False)
            blocks = [one for one, now in pairs if now == v.NULL_BLOCK and one not in moved]
        given.append(blocks)
    return given


def _replay_running(
    replay: QueueReplay,
    step: Step,
    ledger: Ledger,
    victims: Sequence[v.RequestId],
    holders: Holders,
) -> None:
    left = list(victims)

    def free(freed: Freed) -> None:
        replay.final = queue_up(step.config, replay.final, freed)

    for row in step.running_rows:
        given = _given_back(step, row.request_id) if step.config.groups else []
        if any(map(any, given)):
            free(holders.give_back(row.request_id, given))
        while left and len(replay.final) < len(row.gained):
            free(holders.free(left.pop(0)))
        _replay_row(replay, row)
        if row.copies:
            holders.give_back(row.request_id, [[it.source for it in of] for of in row.copies])
    waiting = find_waiting(step, ledger)
    if waiting is not None:
        if step.config.groups:
            free(holders.give_back(waiting, _given_back(step, waiting)))
        for name in left:
            free(holders.free(name))
    elif left:
        last = left[-1]
        if step.config.groups:
            free(holders.give_back(last, left_behind(step, ledger, last)))
        for name in left[:-1]:
            free(holders.free(name))
        replay.room_of_the_last = len(replay.final)
        free(holders.free(last))


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
