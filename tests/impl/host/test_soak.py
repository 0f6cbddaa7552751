"""Random programs: the specification, and the host engine with any digest, give the same run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from groups_support import ALIGN, ALL, CHUNK, FULL, NONE, WINDOW, chunks, full, recurrent, window

from blockstep.impl.host import CRC32, SHA256, Digest, HostEngine
from blockstep.spec import Oracle
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Abort,
    Commit,
    Config,
    Drafts,
    Event,
    GrammarReady,
    KVGroup,
    MultiModalItem,
    Observation,
    PauseState,
    Plan,
    Policy,
    RejectCode,
    Rejected,
    RepetitionDetection,
    Request,
    Reset,
    RowTokens,
    Schedule,
    SetPause,
    SpecMethod,
    Submit,
    config_problems,
)

COLLIDING = Digest("colliding", cryptographic=False, function=lambda message: b"same")
NAMES = tuple("abcdefgh")


def draw_config(draw: random.Random) -> Config:
    method = draw.choice(list(SpecMethod))
    chunked = draw.random() < 0.8
    depth = draw.choice((1, 1, 2, 2, 3))
    return Config(
        num_blocks=draw.randint(7, 16),
        block_size=draw.choice((1, 2, 2, 4)),
        max_num_seqs=draw.randint(1, 5),
        max_num_batched_tokens=draw.randint(1, 12) if chunked else 24,
        max_model_len=draw.randint(16, 24),
        policy=draw.choice((Policy.FCFS, Policy.PRIORITY)),
        enable_prefix_caching=draw.random() < 0.9,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw.choice((0, 0, 1, 3)),
        scheduler_reserve_full_isl=draw.random() < 0.5,
        spec_method=method,
        num_speculative_tokens=0 if method is SpecMethod.NONE else draw.randint(1, 3),
        max_frames_in_flight=depth,
        async_scheduling=depth > 1 and draw.random() < 0.6,
    )


def draw_request(draw: random.Random) -> Request:
    # Few tokens and few stems, so that prompts share prefixes and drafts are accepted.
    stem = draw.choice(((0,) * 14, (0, 1) * 7))
    prompt = (*stem[: draw.randint(1, 14)], *draw.choice(((), (), (1, 1, 1, 1))))
    items: tuple[MultiModalItem, ...] = ()
    if draw.random() < 0.1:
        offset = draw.randrange(len(prompt))
        items = (MultiModalItem(draw.choice("xy"), offset, draw.randint(1, len(prompt) - offset)),)
    return Request(
        draw.choice(NAMES),
        prompt,
        max_tokens=draw.randint(1, 9),
        min_tokens=0,
        eos_token_id=draw.choice((None, None, 2)),
        stop_token_ids=draw.choice(((), (), (2,))),
        repetition_detection=draw.choice((None, None, RepetitionDetection(2, 1, 3))),
        priority=draw.randrange(3),
        arrival_time=draw.randrange(3),
        adapter=draw.choice((None,) * 7 + ("x",)),
        cache_salt=draw.choice((None,) * 7 + ("x",)),
        items=items,
        prompt_embeds=tuple(draw.choices(range(2), k=len(prompt))) if draw.random() < 0.1 else (),
        skip_reading_prefix_cache=draw.random() < 0.1,
        structured_output=draw.random() < 0.15,
    )


def draw_answer(draw: random.Random, engine: HostEngine) -> Event:
    """The commit of the oldest frame in flight, or Schedule if there is none."""
    for frame_id, frame in engine.frames.items():
        rows: list[RowTokens] = []
        for name, drafts in frame.items():
            if drafts is None:
                rows.append(RowTokens(name))
            else:
                # Behind a placeholder may be any token.
                accepted = [
                    draw.randrange(3) if token == DRAFT_PLACEHOLDER else token
                    for token in drafts[: draw.randint(0, len(drafts))]
                ]
                rows.append(RowTokens(name, (*accepted, draw.randrange(3))))
        draw.shuffle(rows)
        return Commit(frame_id, tuple(rows))
    return Schedule()


def draw_event(draw: random.Random, engine: HostEngine) -> Event:
    kind = draw.random()
    if kind < 0.15:
        return Submit(draw_request(draw))
    if kind < 0.3:
        most = engine.config.num_speculative_tokens
        named = (*engine.table.slot_of, draw.choice(NAMES))
        proposals = {name: tuple(draw.choices(range(3), k=draw.randint(0, most))) for name in named}
        return Drafts(tuple(RowTokens(name, tokens) for name, tokens in proposals.items()))
    if kind < 0.33:
        return Abort((draw.choice(NAMES), draw.choice(NAMES)))
    if kind < 0.37:
        return GrammarReady(draw.choice(NAMES))
    if kind < 0.4:
        return SetPause(draw.choice((*PauseState, *[PauseState.UNPAUSED] * 6)))
    if kind < 0.41:
        return Reset(draw.random() < 0.5)
    if kind < (0.45 if engine.config.max_frames_in_flight == 1 else 0.6):
        return Schedule()
    return draw_answer(draw, engine)


def draw_group(draw: random.Random) -> KVGroup:
    size = draw.choice((1, 2, 2, 3, 4))
    kind = draw.choice((FULL, WINDOW, WINDOW, CHUNK))
    if kind is FULL:
        return full(size)
    return (window if kind is WINDOW else chunks)(size, draw.randint(1, 9))


def draw_states(draw: random.Random, config: Config) -> Config:
    """The config with a recurrent group or two among its groups, in one of the modes."""
    mode = draw.choice((NONE, ALL, ALIGN, ALIGN))
    size = max(group.block_size for group in config.groups)
    # A state where chunks do not end is one for all of a request, in a block as long as that.
    sizes = [size] if mode is not NONE else [-(-config.max_model_len // size) * size]
    if mode is ALIGN:
        sizes.append(3 * size)
    num_spare = config.num_speculative_tokens + draw.choice((0, 0, 1))
    groups = list(config.groups) if draw.random() < 0.8 else []
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randint(0, len(groups))
        groups.insert(at, recurrent(draw.choice(sizes), mode, num_spare))
    return replace(
        config,
        groups=tuple(groups),
        block_size=min(group.block_size for group in groups),
        enable_prefix_caching=mode is not NONE,
        enable_chunked_prefill=config.enable_chunked_prefill or mode is ALIGN,
    )


def draw_groups_config(draw: random.Random) -> Config:
    while True:
        groups = [draw_group(draw) for _ in range(draw.choice((1, 2, 2, 3)))]
        base = min(group.block_size for group in groups)
        fitting = [
            g if g.block_size % base == 0 else replace(g, block_size=2 * base) for g in groups
        ]
        config = replace(draw_config(draw), block_size=base, groups=tuple(fitting))
        if draw.random() < 0.5:
            config = draw_states(draw, config)
        most = 16 + 14 * len(config.groups) // base
        config = replace(config, num_blocks=draw.randint(8, most))
        if not config_problems(config):
            return config


def play_with_digests(config: Config, draw: random.Random, num_events: int) -> Counter[str]:
    """Play one random program on the specification and under three digests; return what it met."""
    oracle, seen = Oracle(config), Counter[str]()
    engines = [HostEngine(config, digest) for digest in (SHA256, CRC32, COLLIDING)]
    one = engines[0]
    for number in range(num_events):
        event = draw_event(draw, one)
        due = oracle.apply(event)
        assert not is_malformed(due), (config, event)
        state = oracle.snapshot()
        for engine in engines:
            answer = engine.apply(event)
            assert answer == due, (engine.digest.name, number, event)
            if isinstance(answer, Plan) and isinstance(due, Plan):
                assert answer.num_common_prefix_blocks == due.num_common_prefix_blocks
            assert engine.snapshot() == state, (engine.digest.name, number, event)
        tables = [table for request in state.requests for table in request.block_tables]
        seen["nulls"] += any(0 in table for table in tables)
    stats = oracle.snapshot().stats
    seen.update(hits=stats.prefix_cache_hits, preemptions=stats.preemptions)
    seen.update(accepted=stats.drafts_accepted)
    return seen


def is_malformed(answer: Observation) -> bool:
    """Whether an event was refused for its form, which no drawn one is."""
    return isinstance(answer, Rejected) and answer.code is RejectCode.MALFORMED_EVENT


def play_many(
    draw_some: Callable[[random.Random], Config], seeds: range, num_events: int
) -> Counter[str]:
    """Play a random program of each seed."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        seen += play_with_digests(draw_some(draw), draw, num_events)
    return seen


@pytest.mark.parametrize("draw_some", [draw_config, draw_groups_config])
def test_every_digest_gives_the_run_of_the_specification(
    draw_some: Callable[[random.Random], Config],
) -> None:
    seen = play_many(draw_some, range(25), 150)
    assert min(seen[name] for name in ("hits", "preemptions", "accepted")) > 10
    assert (seen["nulls"] > 30) is (draw_some is draw_groups_config)


@pytest.mark.soak
def test_every_digest_gives_the_run_of_the_specification_over_many_seeds() -> None:
    play_many(draw_groups_config, range(1000, 7000), 250)
