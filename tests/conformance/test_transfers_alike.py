"""Random transfers through the specification and the host: both say the same after every event.

The programs are drawn here, and not by `draw`: a store that says anything at any time, beside
sessions, adapters, grammars and all that else is drawn. Nothing of it needs to make sense.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from groups_support import chunks, full, window

from blockstep.impl.host import HostEngine
from blockstep.spec import Oracle
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Abort,
    Commit,
    Config,
    Drafts,
    Event,
    FinishReason,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GrammarReady,
    KVGroup,
    KVLoadFailurePolicy,
    KVOffer,
    KVTransfers,
    MultiModalItem,
    Outputs,
    PauseState,
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
    Status,
    StreamingUpdate,
    Submit,
    TransfersReported,
)

NAMES = tuple("abcdefgh")
ANYTHING = Grammar(((((0, 0), (1, 0), (2, 0))),))
"""A grammar that forbids nothing that is sampled here."""


def draw_config(draw: random.Random) -> Config:
    method = draw.choice((SpecMethod.NONE, SpecMethod.NGRAM, SpecMethod.EAGLE))
    chunked = draw.random() < 0.8
    depth = draw.choice((1, 1, 2, 2, 3))
    size = draw.choice((1, 2, 2, 4))
    cache_size = draw.choice((0, 0, 6))
    groups = draw.choice(((), (), (), (full(size),), *list_groups(size)))
    is_one = groups in ((), (full(size),))
    return Config(
        num_blocks=draw.randint(9, 16) + (0 if is_one else draw.randint(8, 30)),
        block_size=size,
        max_num_seqs=draw.randint(1, 5),
        max_num_batched_tokens=draw.randint(2, 16) if chunked else 24,
        max_model_len=draw.randint(16, 24),
        policy=draw.choice((Policy.FCFS, Policy.PRIORITY)),
        enable_prefix_caching=draw.random() < 0.85,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw.choice((0, 0, 1, 3)),
        scheduler_reserve_full_isl=draw.random() < 0.5,
        spec_method=method,
        num_speculative_tokens=0 if method is SpecMethod.NONE else draw.randint(1, 3),
        max_frames_in_flight=depth,
        async_scheduling=depth > 1 and draw.random() < 0.6,
        groups=groups,
        max_loras=draw.choice((0, 0, 1)),
        encoder_compute_budget=4 if cache_size else 0,
        encoder_cache_size=cache_size,
        enable_kv_cache_events=draw.random() < 0.5,
        kv_connector=True,
        kv_load_failure_policy=draw.choice(list(KVLoadFailurePolicy)),
    )


def list_groups(size: int) -> tuple[tuple[KVGroup, ...], ...]:
    return (
        (full(size), full(2 * size)),
        (full(size), window(size, 3)),
        (window(2 * size, 5), full(size)),
        (window(size, 4),),
        (chunks(size, 4), full(2 * size)),
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
        priority=draw.randrange(3),
        arrival_time=draw.randrange(3),
        adapter=draw.choice((None, None, "x", "y")),
        items=items,
        skip_reading_prefix_cache=draw.random() < 0.1,
        structured_output=structured,
        grammar=ANYTHING if structured and draw.random() < 0.5 else None,
        resumable=draw.random() < 0.1,
    )


def draw_offer(draw: random.Random, name: str) -> KVOffer:
    num_tokens = draw.choice((None, *range(18)))
    return KVOffer(name, num_tokens, draw.random() < 0.6, draw.random() < 0.3)


def draw_report(draw: random.Random, state: Snapshot, plan: Plan | None) -> KVTransfers:
    """Of anybody and of nobody; mostly of what is under way."""
    assert state.transfers is not None
    parked = [r for r in state.requests if r.status is Status.WAITING_FOR_REMOTE_KVS]
    held = [h.request_id for h in state.transfers.held]
    names = [*[r.request_id for r in parked], *held, draw.choice(NAMES)]
    loads = () if plan is None else plan.kv_loads
    loading = [b for load in loads for table in load.block_ids for b in table]
    loading += [b for r in parked for table in r.block_tables for b in table]
    blocks = [*draw.sample(loading, min(len(loading), draw.choice((0, 0, 0, 1, 1, 2, 9))))]
    if draw.random() < 0.1:
        blocks.append(draw.randint(1, 20))
    return KVTransfers(
        finished_recving=tuple(name for name in names if draw.random() < 0.4),
        finished_sending=tuple(name for name in names if draw.random() < 0.3),
        invalid_block_ids=tuple(blocks),
    )


def draw_answer(draw: random.Random, host: HostEngine, plans: dict[int, Plan]) -> Event:
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
        if frame_id not in plans or draw.random() < 0.5:
            return Commit(frame_id, tuple(rows))
        report = draw_report(draw, host.snapshot(), plans[frame_id])
        return Commit(frame_id, tuple(rows), report)
    return Schedule()


def draw_event(draw: random.Random, host: HostEngine, plans: dict[int, Plan]) -> Event:
    kind, name = draw.random(), draw.choice(NAMES)
    config, table = host.config, host.table
    fresh = [n for n, slot in table.slot_of.items() if not table.num_computed[slot]]
    assert host.transfers is not None
    unoffered = [n for n in fresh if n not in host.transfers.offers]
    if draw.random() < (0.5 if unoffered else 0.1 if fresh else 0.0):
        return draw_offer(draw, draw.choice(unoffered or fresh))
    if kind < 0.14:
        unused = [n for n in NAMES if n not in table.slot_of]
        return Submit(draw_request(draw, config, draw.choice(unused or NAMES)))
    if kind < 0.17:
        return KVOffer(name) if draw.random() < 0.2 else draw_offer(draw, name)
    if kind < 0.25:
        return TransfersReported(draw_report(draw, host.snapshot(), None))
    if kind < 0.3:
        most = config.num_speculative_tokens
        named = (*host.table.slot_of, name)
        proposals = {n: tuple(draw.choices(range(3), k=draw.randint(0, most))) for n in named}
        return Drafts(tuple(RowTokens(n, tokens) for n, tokens in proposals.items()))
    if kind < 0.32:
        return Abort((name, draw.choice(NAMES)))
    if kind < 0.37:
        return GrammarReady(name) if draw.random() < 0.8 else GrammarFailed(name)
    if kind < 0.39 and host.frames:
        return GrammarBitmask(draw.choice(list(host.frames)))
    if kind < 0.41:
        update = replace(draw_request(draw, config, name), structured_output=False, grammar=None)
        return StreamingUpdate(replace(update, resumable=draw.random() < 0.7))
    if kind < 0.42:
        return SetPause(draw.choice((*PauseState, *[PauseState.UNPAUSED] * 9)))
    if kind < 0.43:
        return Reset(draw.random() < 0.7, draw.random() < 0.3)
    if kind < (0.55 if config.max_frames_in_flight == 1 else 0.68):
        return Schedule()
    return draw_answer(draw, host, plans)


class Pair:
    """The specification and the host side by side."""

    def __init__(self, config: Config, seed: int) -> None:
        self.oracle, self.host = Oracle(config), HostEngine(config)
        self.plans: dict[int, Plan] = {}
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
        if isinstance(found, Plan):
            self.plans[found.frame_id] = found
        self.witnessed += count_witnesses(event, found, before, after)
        return after


def play(seed: int, num_events: int) -> Counter[str]:
    """One random program through both, to its end; what happened in it."""
    draw = random.Random(seed)
    pair = Pair(draw_config(draw), seed)
    for _ in range(num_events):
        pair.apply(draw_event(draw, pair.host, pair.plans))
    drain(draw, pair)
    return pair.witnessed


def drain(draw: random.Random, pair: Pair) -> None:
    """All is healed, and nothing more is submitted: every request ends, and holds nothing."""
    state = pair.apply(SetPause(PauseState.UNPAUSED))
    for name in [r.request_id for r in state.requests]:
        pair.apply(GrammarReady(name))
        pair.apply(StreamingUpdate(Request(name, (0,))))
        pair.apply(KVOffer(name))
    for _ in range(400):
        state = pair.apply(heal(pair.host.snapshot()))
        if not state.requests and not pair.host.frames:
            break
        pair.apply(draw_answer(draw, pair.host, {}))
    assert not state.requests, f"seed {pair.seed}: {state.requests}"
    assert len(state.free_queue) == pair.host.config.num_usable_blocks


def heal(state: Snapshot) -> Event:
    """Every load and every store comes to its end."""
    assert state.transfers is not None
    held = tuple(h.request_id for h in state.transfers.held)
    parked = [r for r in state.requests if r.status is Status.WAITING_FOR_REMOTE_KVS]
    loading = tuple(r.request_id for r in parked)
    return TransfersReported(KVTransfers((*loading, *held), held))


def count_witnesses(event: Event, found: object, before: Snapshot, after: Snapshot) -> Counter[str]:
    """What shows that the programs reach what they are to reach."""
    assert before.transfers is not None
    assert after.transfers is not None
    seen: Counter[str] = Counter(events=1)
    now = {r.request_id: r for r in after.requests}
    if isinstance(found, Plan):
        seen["at once"] += sum(not load.is_async for load in found.kv_loads)
        seen["later"] += sum(load.is_async for load in found.kv_loads)
        received = set(before.transfers.received)
        seen["back"] += len(received.intersection(after.running))
        seen["gave"] += sum(not any(now[name].block_tables) for name in received)
    if isinstance(event, TransfersReported | Commit) and isinstance(found, Outputs):
        seen["failed"] += sum(row.finish_reason is FinishReason.ERROR for row in found.rows)
        if before.transfers.unsettled and event.transfers.invalid_block_ids:
            seen["recomputed"] += sum(
                name not in after.transfers.unsettled
                and name in now
                and now[name].num_computed_tokens < request.num_computed_tokens
                for name in before.transfers.unsettled
                if (request := before.request(name)) is not None
            )
    if isinstance(event, Abort | Commit):
        seen["held"] += len(after.transfers.held) > len(before.transfers.held)
    if isinstance(found, ResetDone):
        seen["reset"] += found.success and event != Reset()
    return seen


def run(seeds: range, num_events: int) -> Counter[str]:
    witnessed: Counter[str] = Counter()
    for seed in seeds:
        witnessed += play(seed, num_events)
    return witnessed


def test_specification_and_host_are_alike() -> None:
    witnessed = run(range(20), 100)
    for name in ("at once", "later", "back", "gave", "failed", "recomputed", "held", "reset"):
        assert witnessed[name] > 2, (name, witnessed)


@pytest.mark.soak
def test_specification_and_host_are_alike_for_long() -> None:
    witnessed = run(range(1000, 1400), 250)
    assert witnessed["events"] == 100_000
