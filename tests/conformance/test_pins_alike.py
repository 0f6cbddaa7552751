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
from groups_support import ALL, NONE, chunks, full, recurrent, window

from blockstep.impl.host import HostEngine
from blockstep.spec import Oracle
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Abort,
    Clock,
    Commit,
    Config,
    Drafts,
    Event,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    KVGroup,
    MultiModalItem,
    Outputs,
    PauseState,
    PinEstimate,
    Plan,
    Policy,
    Rejected,
    Request,
    Reset,
    ResetDone,
    RowTokens,
    Schedule,
    SetPause,
    Snapshot,
    SpecMethod,
    StreamingUpdate,
    Submit,
    config_problems,
)

NAMES = tuple("abcdefgh")
JOBS = ("j", "k", "l")
ANYTHING = Grammar(((((0, 0), (1, 0), (2, 0))),))
"""A grammar that forbids nothing that is sampled here."""


def draw_config(draw: random.Random) -> Config:
    """Fields that go together are drawn again until nothing is against them."""
    while True:
        config = _draw_any_config(draw)
        if not config_problems(config):
            return config


def _draw_any_config(draw: random.Random) -> Config:
    method = draw.choice((SpecMethod.NONE, SpecMethod.NGRAM, SpecMethod.EAGLE))
    num_drafts = 0 if method is SpecMethod.NONE else draw.randint(1, 3)
    chunked = draw.random() < 0.8
    depth = draw.choice((1, 1, 2, 2, 3))
    size = draw.choice((1, 2, 2, 4))
    cache_size = draw.choice((0, 0, 6))
    groups = draw.choice(((), (), (), *list_groups(size, num_drafts)))
    return Config(
        num_blocks=draw.randint(9, 16) + (draw.randint(8, 30) if groups else 0),
        block_size=size,
        max_num_seqs=draw.randint(1, 5),
        max_num_batched_tokens=draw.randint(2, 16) if chunked else 24,
        max_model_len=draw.randint(16, 24),
        policy=Policy.CONTINUUM,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw.choice((0, 0, 1, 3)),
        scheduler_reserve_full_isl=draw.random() < 0.5,
        spec_method=method,
        num_speculative_tokens=num_drafts,
        max_frames_in_flight=depth,
        async_scheduling=depth > 1 and draw.random() < 0.6,
        groups=groups,
        max_loras=draw.choice((0, 0, 1)),
        encoder_compute_budget=4 if cache_size else 0,
        encoder_cache_size=cache_size,
        enable_kv_cache_events=draw.random() < 0.5,
    )


def list_groups(size: int, num_drafts: int) -> tuple[tuple[KVGroup, ...], ...]:
    return (
        (full(size), full(2 * size)),
        (full(size), window(size, 3)),
        (window(2 * size, 5), full(size)),
        (window(size, 4),),
        (chunks(size, 4), full(2 * size)),
        (full(size), recurrent(2 * size, num_speculative=num_drafts)),
        (full(size), recurrent(size, ALL, num_drafts)),
        (full(size), recurrent(size, NONE, num_drafts)),
    )


def draw_request(draw: random.Random, config: Config, name: str) -> Request:
    stem = draw.choice(((0,) * 14, (0, 1) * 7))
    prompt = (*stem[: draw.randint(1, 14)], *draw.choice(((), (), (1, 1, 1))))
    items: tuple[MultiModalItem, ...] = ()
    if draw.random() < 0.2:
        offset = draw.randrange(len(prompt))
        length = min(draw.randint(1, 4), len(prompt) - offset)
        items = (MultiModalItem(f"x{length}", offset, length),)
    structured = draw.random() < 0.08
    return Request(
        name,
        prompt,
        max_tokens=draw.randint(1, 4),
        eos_token_id=draw.choice((None, None, 2)),
        arrival_time=draw.randrange(3),
        adapter=draw.choice((None, None, "x", "y")) if config.max_loras else None,
        items=items,
        skip_reading_prefix_cache=draw.random() < 0.1,
        structured_output=structured,
        grammar=ANYTHING if structured and draw.random() < 0.5 else None,
        resumable=draw.random() < 0.1,
        job_id=draw.choice((None, *JOBS)),
        is_last_step=draw.random() < 0.1,
    )


def draw_answer(draw: random.Random, host: HostEngine) -> Event:
    """The commit of the oldest frame in flight, or Schedule if there is none."""
    for frame_id, frame in host.frames.items():
        rows: list[RowTokens] = []
        for name, drafts in {**frame, **host.dropped.get(frame_id, {})}.items():
            if drafts is None:
                rows.append(RowTokens(name))
                continue
            # Behind a placeholder may be any token.
            accepted = [
                draw.randrange(3) if token == DRAFT_PLACEHOLDER else token
                for token in drafts[: draw.randint(0, len(drafts))]
            ]
            rows.append(RowTokens(name, (*accepted, draw.randrange(3))))
        return Commit(frame_id, tuple(rows))
    return Schedule()


def draw_event(draw: random.Random, host: HostEngine) -> Event:
    kind, name = draw.random(), draw.choice(NAMES)
    config, table = host.config, host.table
    pins = host.snapshot().pins
    assert pins is not None
    unknown = {request.job_id for request in table.requests} - {None}
    unknown -= {estimate.job_id for estimate in pins.estimates}
    if unknown and draw.random() < 0.2:
        return PinEstimate(draw.choice(sorted(map(str, unknown))), draw.choice((3, 9, 30)))
    if kind < 0.2:
        unused = [n for n in NAMES if n not in table.slot_of]
        return Submit(draw_request(draw, config, draw.choice(unused or NAMES)))
    if kind < 0.26:
        return PinEstimate(draw.choice((*JOBS, "m")), draw.choice((0, 1, 3, 9, 30)))
    if kind < 0.3:
        return Clock(max(pins.now + draw.choice((-2, 1, 1, 2, 5)), 0))
    if kind < 0.35:
        most = config.num_speculative_tokens
        named = (*host.table.slot_of, name)
        proposals = {n: tuple(draw.choices(range(3), k=draw.randint(0, most))) for n in named}
        return Drafts(tuple(RowTokens(n, tokens) for n, tokens in proposals.items()))
    if kind < 0.37:
        return Abort((name, draw.choice(NAMES)))
    if kind < 0.4:
        return GrammarReady(name) if draw.random() < 0.8 else GrammarFailed(name)
    if kind < 0.41 and host.frames:
        return GrammarBitmask(draw.choice(list(host.frames)))
    if kind < 0.43:
        update = replace(draw_request(draw, config, name), structured_output=False, grammar=None)
        return StreamingUpdate(replace(update, resumable=draw.random() < 0.7))
    if kind < 0.44:
        return SetPause(draw.choice((*PauseState, *[PauseState.UNPAUSED] * 9)))
    if kind < 0.46:
        return Reset(draw.random() < 0.5, draw.random() < 0.1)
    if kind < (0.55 if config.max_frames_in_flight == 1 else 0.68):
        return Schedule()
    return draw_answer(draw, host)


class Pair:
    """The specification and the host side by side."""

    def __init__(self, config: Config, seed: int) -> None:
        self.oracle, self.host = Oracle(config), HostEngine(config)
        self.seed = seed
        self.witnessed: Counter[str] = Counter()

    def apply(self, event: Event) -> Snapshot:
        """Let both take an event; where they are then."""
        where = f"seed {self.seed}, event {self.witnessed['events']}: {event}"
        before = self.host.snapshot()
        wanted, found = self.oracle.apply(event), self.host.apply(event)
        if isinstance(wanted, Rejected) and isinstance(found, Rejected):
            assert found.code == wanted.code, where
        else:
            assert found == wanted, where
        after = self.host.snapshot()
        assert after == self.oracle.snapshot(), where
        self.witnessed += count_witnesses(event, found, before, after)
        return after


def play(seed: int, num_events: int) -> Counter[str]:
    """One random program through both, to its end; what happened in it."""
    draw = random.Random(seed)
    pair = Pair(draw_config(draw), seed)
    for _ in range(num_events):
        pair.apply(draw_event(draw, pair.host))
    drain(draw, pair)
    return pair.witnessed


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
    seen: Counter[str] = Counter(events=1)
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
    witnessed: Counter[str] = Counter()
    for seed in seeds:
        witnessed += play(seed, num_events)
    return witnessed


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
