"""Pins: P17 a pin has an owner and an end, P10 it starves no request, P16 victims without pins
first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from blockstep.conformance.judge.properties.admission import may_have_its_items
from blockstep.conformance.judge.properties.history import History
from blockstep.conformance.judge.properties.hits import hit_now
from blockstep.conformance.judge.properties.observed_step import Step
from blockstep.conformance.judge.properties.pool import verified_blocks
from blockstep.conformance.judge.properties.property_check import (
    ENDINGS,
    NO_FORKS,
    Complaint,
    Complaints,
    differing,
    differing_requests,
    once_a_step,
    sentence,
)
from blockstep.conformance.judge.properties.queue_replay import (
    Freed,
    Holders,
    next_in_line,
    preempted_in_order,
)
from blockstep.conformance.judge.properties.token_amounts import admitted_share
from blockstep.conformance.protocol.findings import of_block
from blockstep.spec import vocabulary as v

NO_PINS = v.PinsSnapshot()
PROPER_ENDS = (v.FinishReason.STOP, v.FinishReason.LENGTH, v.FinishReason.REPETITION)
"""Finish reasons after which the job of a turn may continue."""
_ENDS = (*ENDINGS, v.StreamingUpdate)


class Followed(NamedTuple):
    """Pins and freed blocks after an event that is no plan."""

    pins: tuple[v.Pin, ...]
    freed: Freed
    """Blocks that requests and pins free, in order."""


@once_a_step
def follow_pins(step: Step, history: History) -> Followed:
    """The pins after requests ended, after a reset, or after an estimate.

    The leading cached blocks of a turn that ends properly stay pinned if it is not the last one and
    its job has an estimate; they replace the blocks of an earlier turn.
    """
    before = step.before.pins or NO_PINS
    pins = {pin.job_id: pin for pin in before.pins}
    freed: Freed = []
    holders = Holders(step, history)
    match step.event, step.observation:
        case v.PinEstimate(job_id=job_id, ttl=ttl), _ if job_id in pins:
            pins[job_id] = replace(pins[job_id], end=before.now + ttl)
        case v.Reset(), v.ResetDone(success=True):
            for name in reversed(step.before.running):
                freed += holders.free(name)
            for pin in before.pins:
                freed += holders.free(pin)
            pins = {}
        case _ if isinstance(step.event, _ENDS):
            for name in step.ended:
                if name in step.old and not history.goes_on(name, step):
                    freed += end_turn(step, history, name, pins, holders)
                    freed += holders.free(name)
                elif name in step.new and not any(step.new[name].block_tables):
                    freed += holders.free(name)  # a session that cannot go back
    return Followed(tuple(pins.values()), freed)


def end_turn(
    step: Step, history: History, name: v.RequestId, pins: dict[str, v.Pin], holders: Holders
) -> Freed:
    """Return the freed blocks of the pin of a request's job when the request ends.

    `pins` and `holders` are changed: a new pin becomes one more holder of the blocks that it keeps,
    and the request still holds all of its blocks.
    """
    before = step.before.pins or NO_PINS
    asked, tables = history.get_request_after(step, name), step.old[name].block_tables
    ends_properly = isinstance(step.event, v.Commit) and any(
        row.request_id == name and row.finish_reason in PROPER_ENDS for row in step.output_rows
    )
    job_id = asked.job_id
    if job_id is None or not ends_properly:
        return []
    ttl = next((it.ttl for it in before.estimates if it.job_id == job_id), 0)
    counts = _count_findable(step, history, name)
    kept = tuple([table[:count] for table, count in zip(tables, counts, strict=True)])
    is_kept = not asked.is_last_step and ttl > 0 and any(chain(*kept))
    freed: Freed = []
    if job_id in pins and (is_kept or asked.is_last_step):
        freed += holders.free(pins.pop(job_id))
    if is_kept:
        pins[job_id] = pin = v.Pin(job_id, kept, before.now + ttl)
        holders.hold(pin, kept)
    return freed


def _count_findable(step: Step, history: History, name: v.RequestId) -> list[int]:
    """Per group: leading cached blocks of a request that ends; its commit may publish some of
    them."""
    counts = [*step.old[name].num_cached_blocks]
    for stretch in verified_blocks(step, history):
        if stretch.request_id == name:
            counts[stretch.group] = max(counts[stretch.group], stretch.end)
    return counts


def list_jobs(step: Step, history: History) -> set[str]:
    """Jobs with a pin or an unfinished turn after the step."""
    requests = [history.lives[name].request for name in step.new if name in history.lives]
    if isinstance(step.event, v.Submit):
        requests.append(step.event.request)
    jobs = {it.job_id for it in requests if it.job_id is not None}
    return jobs.union(pin.job_id for pin in (step.after.pins or NO_PINS).pins)


@sentence(
    "P17",
    *_ENDS,
    v.Submit,
    v.PinEstimate,
    v.Clock,
    v.Reset,
    needs="has_pins",
    fixes="which blocks are kept for a next turn, and for how long",
)
def pins_are_of_turns_that_ended(step: Step, history: History) -> Complaints:
    """A pin comes from a turn that ended properly and was not the last one. It holds the turn's
    leading cached blocks for the estimated time. It goes with the job's next pin, with the end of
    its last turn, or with a reset; no other event but a plan removes it."""
    followed, after = follow_pins(step, history), step.after.pins or NO_PINS
    return differing("pins", followed.pins, after.pins)


@sentence("P17", v.Schedule, needs="has_pins")
def pins_end_in_time(step: Step, _history: History) -> Complaints:
    """A plan removes each pin that is past its end, and adds none."""
    before, after = (step.before.pins or NO_PINS), (step.after.pins or NO_PINS)
    for pin in after.pins:
        if pin.end <= before.now:
            yield Complaint(f"the pin of job {pin.job_id!r} outlived its end, {pin.end}")
    left = [pin for pin in before.pins if pin in after.pins]
    if len(after.pins) != len(left) or left != [*after.pins]:
        yield Complaint("a plan made a pin, changed one, or put them in another order")


@sentence(
    "P17",
    *(*_ENDS, v.Schedule, v.Reset),
    needs="has_pins",
    fixes="which blocks are kept for a next turn, and for how long",
)
def pins_hold_cached_blocks(step: Step, _history: History) -> Complaints:
    """A pin holds only blocks with a key, and a job has at most one pin."""
    pins = (step.after.pins or NO_PINS).pins
    for pin in pins:
        for block in chain(*pin.block_tables):
            if block != v.NULL_BLOCK and step.after.block_keys[block] is None:
                yield Complaint(
                    f"the pin of job {pin.job_id!r} holds block {block}, without a key",
                    subjects=of_block(block),
                )
    if len({pin.job_id for pin in pins}) != len(pins):
        yield Complaint("a job has two pins")


@sentence(
    "P10",
    v.Schedule,
    needs="has_pins",
    fixes="which blocks are kept for a next turn, and for how long",
)
def pins_are_reclaimed_only_as_last_resort(step: Step, _history: History) -> Complaints:
    """A pin is reclaimed before its end only for a request that runs alone, or that waits while
    none runs."""
    if not step.given_kept:
        return ()
    left = [name for name in step.before.running if name not in step.preempted]
    if len(left) <= 1 and (not left or not step.admitted_rows or step.running_rows):
        return ()
    jobs = ", ".join([kept.owner for kept in step.given_kept])
    return [Complaint(f"the pins of {jobs} went before their time, though {left} run")]


@sentence(
    "P10", v.Schedule, needs="has_pins", covered_by="every_request_finishes_after_faults_stop"
)
def pins_do_not_block_admission(step: Step, history: History) -> Complaints:
    """While no request runs, no pin keeps the next waiting request from being admitted or
    loaded."""
    config, pins = step.config, (step.after.pins or NO_PINS).pins
    if (
        not pins
        or step.after.running
        or step.preempted
        or history.pause_state is not v.PauseState.UNPAUSED
    ):
        return ()
    name = next_in_line(step, history)
    if name is None or not may_have_its_items(step, history, name):
        return ()
    if step.new[name].status is v.Status.WAITING_FOR_REMOTE_KVS:
        return ()
    life = history.lives[name]
    start = step.new[name].num_computed_tokens or hit_now(step, history, life)[0]
    share = admitted_share(config, life.num_known, start)
    if not config.enable_chunked_prefill and share > config.max_num_batched_tokens:
        return ()
    return [
        Complaint(
            f"{name!r} waits while no request runs, and {len(pins)} pins hold blocks", subjects=name
        )
    ]


@sentence("P16", v.Schedule, needs="has_pins", fixes="which request is preempted")
def requests_of_pinned_jobs_are_preempted_last(step: Step, history: History) -> Complaints:
    """The youngest requests of jobs without a pin are preempted first, then the youngest of the
    others."""
    if not step.preempted:
        return ()
    order = _rank_of_victims(step, history)
    expected = order[: len(step.preempted)]
    return differing_requests("preempted", expected, preempted_in_order(step, history))


def _rank_of_victims(step: Step, history: History) -> list[v.RequestId]:
    """Running requests in the order of preemption: youngest first, those of pinned jobs last."""
    return KEEPER.sort_victims(history, step.before, step.before.running[::-1])


@sentence("P18", *NO_FORKS, needs="has_pins")
def clock_and_estimates_follow_events(step: Step, history: History) -> Complaints:
    """The time is the latest that a `Clock` gave; a job has its last estimate as long as it has an
    unfinished turn or a pin."""
    after = step.after.pins
    if after is None:
        return
    before = step.before.pins or NO_PINS
    now = before.now
    if isinstance(step.event, v.Clock):
        now = max(now, step.event.now)
    yield from differing("now", now, after.now)
    ttls, jobs = {it.job_id: it.ttl for it in before.estimates}, list_jobs(step, history)
    if isinstance(step.event, v.PinEstimate):
        ttls[step.event.job_id] = step.event.ttl
    left = sorted((job, ttl) for job, ttl in ttls.items() if ttl and job in jobs)
    estimates = tuple([v.PinEstimate(*entry) for entry in left])
    yield from differing("estimates", estimates, after.estimates)


def list_pinned(snapshot: v.Snapshot) -> set[str | None]:
    """Return the jobs with a pin that has not expired at the beginning of a plan."""
    pins = snapshot.pins
    return set() if pins is None else {pin.job_id for pin in pins.pins if pin.end > pins.now}


class Turns:
    """The pins while requests end in one event: a turn that ends properly leaves one."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._pins = {pin.job_id: pin for pin in (step.before.pins or NO_PINS).pins}

    def end(self, history: History, name: v.RequestId, holders: Holders) -> Freed:
        """Return the blocks of a pin that goes when a request ends; see `end_turn`."""
        return end_turn(self._step, history, name, self._pins, holders)


class PinKeeper:
    """The order of requests with pins, and the blocks that events free; see `Keeper`."""

    def sort_victims(
        self, history: History, snapshot: v.Snapshot, youngest: Iterable[v.RequestId]
    ) -> list[v.RequestId]:
        """Return requests in the order of preemption: those of pinned jobs after all others."""
        warm = list_pinned(snapshot)
        return sorted(youngest, key=lambda name: history.lives[name].request.job_id in warm)

    def sort_waiting(self, history: History, snapshot: v.Snapshot) -> list[v.RequestId]:
        """Return the waiting queue: preempted requests first, then those of pinned jobs."""
        names, warm = [*snapshot.waiting], list_pinned(snapshot)
        if warm:
            returning = {
                request.request_id
                for request in snapshot.requests
                if request.status is v.Status.PREEMPTED
            }
            cold = {name for name in names if history.lives[name].request.job_id not in warm}
            names.sort(key=lambda name: (name not in returning) * (1 + (name in cold)))
        return names

    def follow(self, step: Step, history: History) -> Freed:
        """Return the blocks that requests and pins free in an event that is no plan."""
        return follow_pins(step, history).freed

    def begin_ends(self, step: Step) -> Turns:
        """Return the pins while requests end."""
        return Turns(step)


KEEPER = PinKeeper()
