"""Random jobs through the specification and the host: both say the same after every event.

The programs are drawn here, and not by `draw`: time that goes back, estimates of jobs that nobody
knows, turns that come early, late, twice or never, beside sessions, adapters, grammars, encoders
and all that else is drawn. Nothing of it needs to make sense.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from alike_support import (
    NAMES,
    Pair,
    draw_answer,
    draw_config,
    draw_drafts,
    draw_request,
    draw_thresholds,
    draw_update,
    list_attending,
    list_recurrent,
    play_all,
)

from blockstep.spec.vocabulary import (
    Abort,
    Clock,
    Commit,
    Config,
    Event,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    KVGroup,
    Outputs,
    PauseState,
    PinEstimate,
    Plan,
    Policy,
    Request,
    Reset,
    ResetDone,
    Schedule,
    SetPause,
    Snapshot,
    StreamingUpdate,
    Submit,
    config_problems,
)

JOBS = ("j", "k", "l")


def draw_pinning(draw: random.Random) -> Config:
    """Fields that go together are drawn again until nothing is against them."""
    while True:
        config = replace(draw_config(draw, list_groups), policy=Policy.CONTINUUM)
        config = draw_thresholds(draw, config)
        if not config_problems(config):
            return config


def list_groups(size: int, num_drafts: int) -> tuple[tuple[KVGroup, ...], ...]:
    return (*list_attending(size), *list_recurrent(size, num_drafts))


def draw_turn(draw: random.Random, name: str) -> Request:
    job, is_last = draw.choice((None, *JOBS)), draw.random() < 0.1
    return draw_request(draw, name, job_id=job, is_last_step=is_last)


def draw_event(draw: random.Random, pair: Pair) -> Event:
    kind, name, host = draw.random(), draw.choice(NAMES), pair.host
    config, table = host.config, host.table
    pins = host.snapshot().pins
    assert pins is not None
    unknown = {request.job_id for request in table.requests} - {None}
    unknown -= {estimate.job_id for estimate in pins.estimates}
    if unknown and draw.random() < 0.2:
        return PinEstimate(draw.choice(sorted(map(str, unknown))), draw.choice((3, 9, 30)))
    if kind < 0.2:
        unused = [n for n in NAMES if n not in table.slot_of]
        return Submit(draw_turn(draw, draw.choice(unused or NAMES)))
    if kind < 0.26:
        return PinEstimate(draw.choice((*JOBS, "m")), draw.choice((0, 1, 3, 9, 30)))
    if kind < 0.3:
        return Clock(max(pins.now + draw.choice((-2, 1, 1, 2, 5)), 0))
    if kind < 0.35:
        return draw_drafts(draw, host, name)
    if kind < 0.37:
        return Abort((name, draw.choice(NAMES)))
    if kind < 0.4:
        return GrammarReady(name) if draw.random() < 0.8 else GrammarFailed(name)
    if kind < 0.41 and host.frames:
        return GrammarBitmask(draw.choice(list(host.frames)))
    if kind < 0.43:
        return draw_update(draw, draw_turn(draw, name))
    if kind < 0.44:
        return SetPause(draw.choice((*PauseState, *[PauseState.UNPAUSED] * 9)))
    if kind < 0.46:
        return Reset(draw.random() < 0.5, draw.random() < 0.1)
    if kind < (0.55 if config.max_frames_in_flight == 1 else 0.68):
        return Schedule()
    return draw_answer(draw, host)


def drain(draw: random.Random, pair: Pair) -> None:
    """Nothing more is submitted and no time is told: every request ends, whatever is pinned.

    In the end time is told: nothing stays.
    """
    state = pair.apply(SetPause(PauseState.UNPAUSED))
    for name in [r.request_id for r in state.requests]:
        pair.apply(GrammarReady(name))
        pair.apply(StreamingUpdate(Request(name, (0,))))
    for _ in range(400):
        state = pair.apply(draw_answer(draw, pair.host))
        if not state.requests and not pair.host.frames:
            break
    assert not state.requests, f"seed {pair.seed}: {state.requests}"
    assert state.pins is not None
    pair.apply(Clock(max((pin.end for pin in state.pins.pins), default=0)))
    state = pair.apply(Schedule())
    assert state.pins is not None
    assert not state.pins.pins
    assert not state.pins.estimates
    assert len(state.free_queue) == pair.host.config.num_usable_blocks


def count_witnesses(event: Event, found: object, before: Snapshot, after: Snapshot) -> Counter[str]:
    """What shows that the programs reach what they are to reach."""
    assert before.pins is not None
    assert after.pins is not None
    seen: Counter[str] = Counter()
    there = {pin.job_id: pin for pin in before.pins.pins}
    now = {pin.job_id: pin for pin in after.pins.pins}
    if isinstance(event, Commit) and isinstance(found, Outputs):
        seen["pinned"] += sum(job not in there for job in now)
        seen["replaced"] += sum(there.get(job, pin) != pin for job, pin in now.items())
        seen["ended by the last turn"] += sum(job not in now for job in there)
    if isinstance(found, Plan):
        gone = [pin for job, pin in there.items() if job not in now]
        seen["expired"] += sum(pin.end <= after.pins.now for pin in gone)
        seen["gave way"] += sum(pin.end > after.pins.now for pin in gone)
        seen["preempted beside a pin"] += bool(now and found.preempted_req_ids)
        moved = [name for name in before.running if name not in found.preempted_req_ids]
        last_stays = bool(before.running) and before.running[-1] in moved
        seen["preempted before the last"] += bool(found.preempted_req_ids) and last_stays
        stayed = [name for name in before.waiting if name in after.waiting]
        seen["overtook"] += [name for name in after.waiting if name in stayed] != stayed
    if isinstance(event, PinEstimate):
        seen["estimated anew"] += there != now
    if isinstance(found, ResetDone) and there:
        seen["reset" if found.success else "not reset"] += 1
    return seen


def run(seeds: range, num_events: int) -> Counter[str]:
    def begin(draw: random.Random, seed: int) -> Pair:
        return Pair(draw_pinning(draw), seed, count_witnesses)

    return play_all(seeds, num_events, begin, draw_event, drain)


def test_specification_and_host_are_alike() -> None:
    witnessed = run(range(40), 100)
    for name in (
        *("pinned", "replaced", "ended by the last turn", "expired", "gave way", "overtook"),
        *("preempted beside a pin", "preempted before the last", "estimated anew", "reset"),
    ):
        assert witnessed[name] > 2, (name, witnessed)


@pytest.mark.soak
def test_specification_and_host_are_alike_for_long() -> None:
    witnessed = run(range(1000, 1400), 250)
    assert witnessed["events"] > 100_000
