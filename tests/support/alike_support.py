"""Alike: two engines side by side, what is drawn for them, and that both say the same.

What is drawn need not make sense: `draw` of the tools is for that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from groups_support import ALL, NONE, chunks, full, recurrent, window

from blockstep.impl.host import HostEngine
from blockstep.spec import Oracle
from blockstep.spec import vocabulary as v

NAMES = tuple("abcdefgh")
ANYTHING = v.Grammar(((((0, 0), (1, 0), (2, 0))),))
"""A grammar that forbids nothing that is sampled here."""
Groups: TypeAlias = tuple[v.KVGroup, ...]


def draw_config(
    draw: random.Random, list_groups: Callable[[int, int], tuple[Groups, ...]] | None = None
) -> v.Config:
    """Few blocks; of several KV groups, if any are listed for a block size and so many drafts."""
    method = draw.choice((v.SpecMethod.NONE, v.SpecMethod.NGRAM, v.SpecMethod.EAGLE))
    num_drafts = 0 if method is v.SpecMethod.NONE else draw.randint(1, 3)
    chunked = draw.random() < 0.8
    depth = draw.choice((1, 1, 2, 2, 3))
    size = draw.choice((1, 2, 2, 4))
    cache_size = draw.choice((0, 0, 6))
    listed = () if list_groups is None else list_groups(size, num_drafts)
    groups = draw.choice(((), (), (), *listed))
    is_one = groups in ((), (full(size),))
    return v.Config(
        num_blocks=draw.randint(9, 16) + (0 if is_one else draw.randint(8, 30)),
        block_size=size,
        max_num_seqs=draw.randint(1, 5),
        max_num_batched_tokens=draw.randint(2, 16) if chunked else 24,
        max_model_len=draw.randint(16, 24),
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


def draw_thresholds(draw: random.Random, config: v.Config) -> v.Config:
    """Half of the time with admission that closes, and opens at more or at as much."""
    if draw.random() < 0.5:
        return config
    high = draw.randint(1, min(8, config.num_usable_blocks))
    low = draw.randint(0, high)
    return replace(config, admission_low_blocks=low, admission_high_blocks=high)


def list_attending(size: int, _num_drafts: int = 0) -> tuple[Groups, ...]:
    """Groups of all kinds that attend."""
    return (
        (full(size), full(2 * size)),
        (full(size), window(size, 3)),
        (window(2 * size, 5), full(size)),
        (window(size, 4),),
        (chunks(size, 4), full(2 * size)),
    )


def list_recurrent(size: int, num_drafts: int) -> tuple[Groups, ...]:
    """Groups with states, of each mode."""
    return (
        (full(size), recurrent(2 * size, num_speculative=num_drafts)),
        (full(size), recurrent(size, ALL, num_drafts)),
        (full(size), recurrent(size, NONE, num_drafts)),
    )


def draw_request(draw: random.Random, name: str, **fields: Any) -> v.Request:
    """Few tokens and few stems, so that prompts share prefixes and drafts are accepted."""
    stem = draw.choice(((0,) * 14, (0, 1) * 7))
    prompt = (*stem[: draw.randint(1, 14)], *draw.choice(((), (), (1, 1, 1))))
    items: tuple[v.MultiModalItem, ...] = ()
    if draw.random() < 0.2:
        offset = draw.randrange(len(prompt))
        length = min(draw.randint(1, 4), len(prompt) - offset)
        items = (v.MultiModalItem(f"x{length}", offset, length),)
    structured = draw.random() < 0.08
    request = v.Request(
        name,
        prompt,
        max_tokens=draw.randint(1, 4),
        eos_token_id=draw.choice((None, None, 2)),
        arrival_time=draw.randrange(3),
        adapter=draw.choice((None, None, "x", "y")),
        items=items,
        skip_reading_prefix_cache=draw.random() < 0.1,
        structured_output=structured,
        grammar=ANYTHING if structured and draw.random() < 0.5 else None,
        resumable=draw.random() < 0.1,
    )
    return replace(request, **fields)


def draw_update(draw: random.Random, request: v.Request) -> v.StreamingUpdate:
    """A session goes on with this, or ends."""
    plain = replace(request, structured_output=False, grammar=None)
    return v.StreamingUpdate(replace(plain, resumable=draw.random() < 0.7))


def draw_drafts(draw: random.Random, host: HostEngine, name: str) -> v.Drafts:
    """For everybody, and for one of this name."""
    most = host.config.num_speculative_tokens
    named = (*host.table.slot_of, name)
    proposals = {n: tuple(draw.choices(range(3), k=draw.randint(0, most))) for n in named}
    return v.Drafts(tuple(v.RowTokens(n, tokens) for n, tokens in proposals.items()))


def draw_answer(
    draw: random.Random,
    host: HostEngine,
    draw_report: Callable[[int], v.KVTransfers] = lambda _: v.NO_TRANSFERS,
) -> v.Event:
    """The commit of the oldest frame in flight, or Schedule if there is none."""
    for frame_id, frame in host.frames.items():
        rows: list[v.RowTokens] = []
        for name, drafts in {**frame, **host.dropped.get(frame_id, {})}.items():
            if drafts is None:
                rows.append(v.RowTokens(name))
                continue
            # Behind a placeholder may be any token.
            accepted = [
                draw.randrange(3) if token == v.DRAFT_PLACEHOLDER else token
                for token in drafts[: draw.randint(0, len(drafts))]
            ]
            rows.append(v.RowTokens(name, (*accepted, draw.randrange(3))))
        return v.Commit(frame_id, tuple(rows), draw_report(frame_id))
    return v.Schedule()


Count: TypeAlias = Callable[[v.Event, object, v.Snapshot, v.Snapshot], Counter[str]]
"""What an event, its answer and the states around it show that programs are to reach."""


class Pair:
    """The specification and the host side by side."""

    def __init__(self, config: v.Config, seed: int, count: Count) -> None:
        self.oracle, self.host = Oracle(config), HostEngine(config)
        self.plans: dict[int, v.Plan] = {}
        self.seed = seed
        self.witnessed: Counter[str] = Counter()
        self._count = count

    def apply(self, event: v.Event) -> v.Snapshot:
        """Let both take an event; where they are then."""
        where = f"seed {self.seed}, event {self.witnessed['events']}: {event}"
        before = self.host.snapshot()
        wanted, found = self.oracle.apply(event), self.host.apply(event)
        if isinstance(wanted, v.Rejected) and isinstance(found, v.Rejected):
            assert found.code == wanted.code, where
        else:
            assert found == wanted, where
        after = self.host.snapshot()
        assert after == self.oracle.snapshot(), where
        if isinstance(found, v.Plan):
            self.plans[found.frame_id] = found
        self.witnessed += self._count(event, found, before, after)
        self.witnessed["events"] += 1
        return after


def play_all(
    seeds: range,
    num_events: int,
    begin: Callable[[random.Random, int], Pair],
    draw_event: Callable[[random.Random, Pair], v.Event],
    drain: Callable[[random.Random, Pair], None],
) -> Counter[str]:
    """A random program of each seed through both, to its end; what happened in them."""
    witnessed: Counter[str] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        pair = begin(draw, seed)
        for _ in range(num_events):
            pair.apply(draw_event(draw, pair))
        drain(draw, pair)
        witnessed += pair.witnessed
    return witnessed


class Taking(Protocol):
    """Any of our engines."""

    def apply(self, event: v.Event) -> v.Observation:
        """One event."""
        ...

    def snapshot(self) -> v.Snapshot | None:
        """Its state."""
        ...


def apply_alike(engine: Taking, other: HostEngine, event: v.Event) -> v.Observation:
    """The answer of both."""
    answer = engine.apply(event)
    assert answer == other.apply(event)
    return answer


def step_alike(engine: Taking, other: HostEngine, draw: random.Random) -> None:
    """Both plan, and are answered with a token a row."""
    plan = apply_alike(engine, other, v.Schedule())
    assert isinstance(plan, v.Plan)
    rows = [
        v.RowTokens(name, () if drafts is None else (draw.randrange(5),))
        for name, drafts in other.frames.get(plan.frame_id, {}).items()
    ]
    if rows:
        apply_alike(engine, other, v.Commit(plan.frame_id, tuple(rows)))
    assert engine.snapshot() == other.snapshot()
