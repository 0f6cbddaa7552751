"""Replay of the free queue: the blocks that a step took and freed, in order.

    before.free_queue ++ freed by preemption  ->  hits leave the middle, new blocks the head

A replay needs no rule of scheduling: the plan says which request got which blocks, and the states
say which were preempted. Where a victim had a row in the same step, it took blocks that no answer
shows, so the order is not known; such a step is not replayed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Protocol, TypeAlias

from blockstep.conformance.judge.attention_ranges import blocks_of_drafts, count_unattended
from blockstep.conformance.judge.gates import get_gates, is_held
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.hits import may_ask_the_store
from blockstep.conformance.judge.properties.observed_step import PlannedRow, Step, keeps_blocks
from blockstep.conformance.judge.properties.property_check import once_a_step
from blockstep.conformance.judge.properties.token_amounts import (
    blocks_behind,
    running_slots,
    share_of,
)
from blockstep.conformance.protocol.features import is_off, list_kept, load_parts
from blockstep.spec import vocabulary as v

Freed: TypeAlias = list[list[v.BlockId]]
"""Freed blocks, table by table, each from its end."""


def queue_up(config: v.Config, queue: Iterable[v.BlockId], freed: Freed) -> list[v.BlockId]:
    """The free queue after these blocks joined it: at its end, or with LIFO table by table at its
    head."""
    if config.pool_order is v.PoolOrder.LIFO:
        return [*chain(*reversed(freed)), *queue]
    return [*queue, *chain(*freed)]


@dataclass(slots=True)
class QueueReplay:
    """The free queue during one step."""

    final: list[v.BlockId]
    """The free queue as it must be after the step."""
    wrong: list[tuple[v.RequestId, v.BlockId, v.BlockId | None]] = field(default_factory=list)
    """Blocks taken out of turn: the request, the block, and the block at the head."""
    room: dict[v.RequestId, tuple[int, int]] = field(default_factory=dict)
    """Per admitted row: free blocks before its admission, and free blocks among its hits."""
    deferred: list[v.DeferredFree] | None = None
    """Blocks that wait for frames in flight after the step, if any block was given back."""


class Ends(Protocol):
    """Blocks that a feature keeps while requests end in one event."""

    def end(self, history: History, name: v.RequestId, holders: Holders) -> Freed:
        """Return the blocks that the feature frees when a request ends, which still holds its own.

        `holders` is changed: what the feature keeps is one more holder.
        """
        ...


class Keeper(Protocol):
    """Order of requests with a feature that keeps blocks: `KEEPER` in its module `properties`."""

    def sort_victims(
        self, history: History, snapshot: v.Snapshot, youngest: Iterable[v.RequestId]
    ) -> list[v.RequestId]:
        """Return requests in the order of preemption, from the youngest first."""
        ...

    def sort_waiting(self, history: History, snapshot: v.Snapshot) -> list[v.RequestId]:
        """Return the waiting queue in the order in which a plan tries it."""
        ...

    def follow(self, step: Step, history: History) -> Freed:
        """Return the blocks that an event frees which is no plan."""
        ...

    def begin_ends(self, step: Step) -> Ends:
        """Return the blocks that the feature keeps while requests end."""
        ...


def find_keeper(history: History) -> Keeper | None:
    """Return the feature of a run that keeps blocks, if any."""
    return _find_keeper(history.lacked)


@cache
def _find_keeper(lacked: frozenset[str]) -> Keeper | None:
    modules = load_parts("properties").items()
    found = [
        it.KEEPER for name, it in modules if hasattr(it, "KEEPER") and not is_off(name, lacked)
    ]
    return found[0] if found else None


def preempted_in_order(step: Step, history: History) -> list[v.RequestId]:
    """The requests preempted in this step, in the order of preemption by the policy.

    FCFS preempts from the end of the running list, unless a feature that keeps blocks has another
    order. PRIORITY preempts the greatest (priority, arrival_time, request_id). Upstream leaves the
    id out; then of two equal requests the older yields to the younger, in turns, and neither makes
    progress.
    """
    if step.config.policy is v.Policy.FCFS or not step.preempted:
        return step.preempted[::-1]
    keeper = find_keeper(history)
    if keeper is not None:
        return keeper.sort_victims(history, step.before, step.preempted[::-1])
    return sorted(step.preempted, key=lambda name: history.lives[name].order, reverse=True)


def in_waiting_order(history: History, snapshot: v.Snapshot) -> list[v.RequestId]:
    """The waiting queue in the order in which a plan tries it."""
    keeper = find_keeper(history)
    return [*snapshot.waiting] if keeper is None else keeper.sort_waiting(history, snapshot)


def in_policy_order(
    history: History, snapshot: v.Snapshot, is_behind_a_plan: bool = False
) -> list[v.RequestId]:
    """All waiting requests in the order in which a plan tries them, or has tried them
    (`is_behind_a_plan`).

    FCFS tries skipped requests before waiting ones, since they came earlier. PRIORITY takes the
    lowest (priority, arrival_time, request_id) of both.
    """
    waiting = snapshot.waiting if is_behind_a_plan else in_waiting_order(history, snapshot)
    names = [*snapshot.skipped_waiting, *waiting]
    if len(names) > 1 and history.config.policy is v.Policy.PRIORITY:
        names.sort(key=lambda name: history.lives[name].order)
    return names


def is_passed_over(history: History, request: v.RequestSnapshot) -> bool:
    """Whether a request is skipped because it waits for its grammar, its tokens in flight, further
    input, a load, or an offer of the store."""
    if history.config.kv_connector and _waits_for_the_store(history, request):
        return True
    if history.promised.get(request.request_id):
        return True
    if request.status is v.Status.WAITING_FOR_STREAMING_REQ:
        return True
    return (
        request.status is v.Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and not history.lives[request.request_id].grammar_ready
    )


def _waits_for_the_store(history: History, request: v.RequestSnapshot) -> bool:
    name = request.request_id
    if history.store.is_under_way(request):
        return True
    is_asked = may_ask_the_store(history.config, history.lives[name].request)
    if not is_asked or request.num_computed_tokens:
        return False
    return history.store.transfers.get_offer(name).num_tokens is None


class Gates:
    """The gates of features that a waiting request must pass, besides outside events."""

    def __init__(self, history: History, names: Iterable[v.RequestId]) -> None:
        """`names`: requests that have passed, since they run."""
        self._gates = [gate(history) for gate in get_gates(history.lacked)]
        for name in names if self._gates else ():
            self.take(name)

    def has_room_for(self, name: v.RequestId) -> bool:
        """Whether a request may pass all gates."""
        return not self._gates or all(gate.has_room_for(name) for gate in self._gates)

    def take(self, name: v.RequestId) -> None:
        """Note that a request has passed."""
        for gate in self._gates:
            gate.take(name)


def must_wait(history: History, gates: Gates, request: v.RequestSnapshot) -> bool:
    """Whether a waiting request is skipped, for an outside event or at a gate."""
    return is_passed_over(history, request) or not gates.has_room_for(request.request_id)


def may_pass_over(history: History) -> bool:
    """Whether a request in the waiting queue may be skipped."""
    is_late = history.config.max_frames_in_flight > 1 or history.config.kv_connector
    return is_late or bool(get_gates(history.lacked))


def begin_admission(step: Step, history: History) -> Gates:
    """The gates when a plan begins to admit."""
    return Gates(history, [name for name in step.before.running if name not in step.preempted])


@once_a_step
def find_waiting(step: Step, history: History) -> v.RequestId | None:
    """The running request that has no row because it waits for blocks which a commit will free.

    It lacks blocks, and a frame in flight has a row of the request that would be preempted next, or
    that would give it blocks if it runs alone. Those blocks become free with the commit.
    """
    config, after = step.config, step.after
    if not config.kv_connector or config.max_frames_in_flight == 1 or not after.running:
        return None
    givers = [max(after.running, key=lambda name: history.lives[name].order)]
    if config.policy is not v.Policy.PRIORITY:
        keeper, givers = find_keeper(history), [*after.running[::-1]]
        givers = (givers if keeper is None else keeper.sort_victims(history, step.before, givers))[
            :1
        ]
    if len(after.running) == 1:
        givers += [old.request_id for old in step.old.values() if keeps_blocks(old)]
    if all(history.get_fence(name) is None for name in givers):
        return None
    is_paused = history.pause_state is v.PauseState.PAUSED_ALL
    left = 0 if is_paused else config.max_num_batched_tokens
    rows = {row.request_id: row for row in step.running_rows}
    for name in step.before.running:
        if name in rows or name not in after.running:
            left -= rows[name].num_scheduled if name in rows else 0
            continue
        old, new = step.old[name], step.new[name]
        is_waiting = is_held(step, history, name, old.num_computed_tokens)
        share = 0 if is_waiting else min(share_of(history, old), left)
        slots = running_slots(config, old.num_computed_tokens + share)
        num_lacking = blocks_behind(config, slots, new.block_tables) if share > 0 else 0
        if num_lacking > len(after.free_queue):
            return name
    return None


def admits_no_request(step: Step, history: History) -> bool:
    """Whether a plan ended before its waiting phase: it preempted, a running request waits for a
    commit, or admission is closed."""
    return step.admits_no_request or find_waiting(step, history) is not None


@once_a_step
def passed_over(step: Step, history: History) -> list[v.RequestId]:
    """The requests that a plan tried and skipped, in order.

    It tried all up to the first that it could have admitted and did not, while it had budget and
    running slots left.
    """
    before, config = step.before, step.config
    if history.pause_state is not v.PauseState.UNPAUSED or admits_no_request(step, history):
        return []
    left = config.max_num_batched_tokens - sum(row.num_scheduled for row in step.running_rows)
    places = config.max_num_seqs - len(before.running)
    admitted = {row.request_id: row.num_scheduled for row in step.admitted_rows}
    met, gates = [], begin_admission(step, history)
    parked = {row.request_id for row in step.parked} if step.plan.kv_loads else ()
    giving = step.giving if config.kv_connector else ()
    for name in in_policy_order(history, before):
        if left <= 0 or places <= 0:
            break
        if name in admitted:
            left -= admitted[name]
            places -= 1
            gates.take(name)
        elif name in parked or must_wait(
            # A reclaimed request asks the store again.
            *(history, gates, step.new[name] if name in giving else step.old[name])
        ):
            met.append(name)
        else:
            break
    return met


@once_a_step
def next_in_line(step: Step, history: History) -> v.RequestId | None:
    """The request that would be admitted next: the first in policy order that is not skipped."""
    gates = Gates(history, step.after.running)
    for name in in_policy_order(history, step.after, is_behind_a_plan=True):
        if not must_wait(history, gates, step.new[name]):
            return name
    return None


def list_takers(step: Step, history: History) -> list[PlannedRow]:
    """Requests that were admitted or got blocks for a load, in the order in which the plan tried
    them."""
    if not step.plan.kv_loads:
        return step.admitted_rows
    order = in_policy_order(history, step.before)
    place = {name: index for index, name in enumerate(order)}
    rows = [*step.admitted_rows, *step.parked]
    return sorted(rows, key=lambda row: place.get(row.request_id, len(place)))


def hides_a_rollback(step: Step, victims: Sequence[v.RequestId]) -> bool:
    """Whether a victim may have had a row in this step before it was preempted.

    Requests are scheduled in running order, and a request that lacks blocks gets a row or is
    preempted itself. So a victim had no row if it comes after all rows, and each later victim
    before it.
    """
    if not victims or step.config.policy is v.Policy.FCFS:
        return False
    places = [step.place[name] for name in victims]
    last_row = max((step.place.get(row.request_id, 0) for row in step.running_rows), default=-1)
    return min(places) < last_row or places != sorted(places, reverse=True)


def freed_blocks(step: Step, history: History, names: Sequence[v.RequestId]) -> Freed:
    """Blocks that become free when these requests free theirs, in the order of joining the
    queue."""
    holders = Holders(step, history)
    return [freed for name in names for freed in holders.free(name)]


class Holders:
    """The holders of blocks, while requests and features give some back.

    Blocks of a request with a row in flight are not free yet: the commit of that frame frees them.
    """

    def __init__(self, step: Step, history: History) -> None:
        before = step.before
        self._step, self._history = step, history
        self.deferred = [] if before.transfers is None else [*before.transfers.deferred_frees]
        """Blocks that wait for frames in flight, in the order in which they were given up."""
        self._counts = list(before.ref_counts)
        held = () if before.transfers is None else before.transfers.held
        holding: tuple[v.RequestSnapshot | v.HeldBlocks, ...] = (*before.requests, *held)
        self._tables: dict[Hashable, v.BlockTables] = {
            holder.request_id: holder.block_tables for holder in holding
        }
        self._tables.update({kept.entry: kept.block_tables for kept in list_kept(before)})

    def hold(self, entry: Hashable, block_tables: v.BlockTables) -> None:
        """Make what a feature keeps (`Kept.entry`) one more holder of its blocks."""
        self._tables[entry] = block_tables
        for block in chain(*block_tables):
            self._counts[block] += 1

    def free(self, name: Hashable) -> Freed:
        """Take all blocks from a request or a `Kept.entry`; return those that become free, last
        block of each table first."""
        tables, self._tables[name] = self._tables[name], ()
        fence = self._history.get_fence(name, self._step) if isinstance(name, str) else None
        if fence is None:
            return [self._drop(table) for table in tables]
        self._defer(fence, chain(*tables))
        return []

    def give_back(self, name: v.RequestId, given: Sequence[Sequence[v.BlockId]]) -> Freed:
        """Take some blocks of each table from a request; return those that become free, in the same
        order."""
        fence = self._history.get_fence(name, self._step)
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
        """Note the commit of a frame; return the blocks that waited for it and become free, last
        block first."""
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


def begin_plan(step: Step, history: History) -> tuple[list[v.BlockId], Holders]:
    """The free queue and the holders after a plan has freed the kept blocks that are due."""
    queue, holders = list(step.before.free_queue), Holders(step, history)
    for kept in list_kept(step.before):
        if kept.is_due:
            queue = queue_up(step.config, queue, holders.free(kept.entry))
    return queue, holders


def unattended_ends(
    step: Step, num_computed: int, in_doubt: int, is_running: bool = False
) -> list[int]:
    """Per group: the number of leading blocks of a table that a request skips.

    Drafts in flight may be rejected, so blocks count from the first draft. A running request also
    keeps the blocks in which drafts just accepted may have passed a boundary, since states are
    copied there.
    """
    return [
        count_unattended(
            group,
            max(num_computed - max(in_doubt, group.num_speculative_blocks * is_running), 0),
        )
        for group in step.config.groups
    ]


def left_behind(step: Step, history: History, name: v.RequestId) -> list[tuple[v.BlockId, ...]]:
    """Per group: the skipped blocks of a running request."""
    old, in_doubt = step.old[name], history.count_drafts_in_flight().get(name, 0)
    if not step.config.groups:
        return [()]
    ends = unattended_ends(step, old.num_computed_tokens, in_doubt, is_running=True)
    return [table[:end] for table, end in zip(old.block_tables, ends, strict=True)]


def replay_schedule(step: Step, history: History, victims: Sequence[v.RequestId]) -> QueueReplay:
    """Replay the blocks that plan and states show; the step must withdraw no row.

    A running request first gives back its skipped blocks. If it lacks blocks then, others are
    preempted until there are enough, or until it is preempted itself.
    """
    is_plain = not (victims or _may_give_back(step, history))
    if is_plain and not list_kept(step.before):  # no blocks are given back
        replay = QueueReplay(list(step.before.free_queue))
    else:
        queue, holders = begin_plan(step, history)
        replay = QueueReplay(queue)
        if not is_plain:
            _replay_running(replay, step, history, victims, holders)
            replay.deferred = holders.deferred
    for row in step.running_rows if is_plain else ():
        if row.gained or row.hits:
            _replay_row(replay, row)
    for row in list_takers(step, history):
        _replay_row(replay, row)
    return replay


def _may_give_back(step: Step, history: History) -> bool:
    """Whether a running request has more null blocks than before, one for each block that it gave
    back."""
    if not step.config.groups:
        return False
    waiting = find_waiting(step, history)
    names = [row.request_id for row in step.running_rows]
    for name in names if waiting is None else [*names, waiting]:
        old, new = step.old[name], step.new[name]
        for before, after in zip(old.block_tables, new.block_tables, strict=True):
            if v.NULL_BLOCK in after and after.count(v.NULL_BLOCK) > before.count(v.NULL_BLOCK):
                return True
    return False


def _given_back(step: Step, name: v.RequestId) -> list[list[v.BlockId]]:
    """Per group: the blocks that null blocks replaced in the step, without state blocks that
    moved."""
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
    history: History,
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
    waiting = find_waiting(step, history)
    if waiting is not None:
        if step.config.groups:
            free(holders.give_back(waiting, _given_back(step, waiting)))
        for name in left:
            free(holders.free(name))
    elif left:
        last = left[-1]
        if step.config.groups:
            free(holders.give_back(last, left_behind(step, history, last)))
        for name in left:
            free(holders.free(name))


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
