"""Random programs: any digest gives the same run, and every state is sound."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from blockstep.impl.host import CRC32, SHA256, Digest, HostEngine
from blockstep.spec.vocabulary import (
    DRAFT_PLACEHOLDER,
    Abort,
    Commit,
    Config,
    Drafts,
    Event,
    GrammarReady,
    MultiModalItem,
    PauseState,
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
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession

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


def compare_digests(open_session: OpenSession, seed: int) -> Counter[str]:
    """Run one random program under three digests; what happened in it."""
    draw = random.Random(seed)
    config = draw_config(draw)
    fields = {name: getattr(config, name) for name in Config.__dataclass_fields__}
    one, *others = (open_session(digest, **fields) for digest in (SHA256, CRC32, COLLIDING))
    for _ in range(200):
        event = draw_event(draw, one.engine)
        before = one.state()
        observation = one.apply(event)
        if isinstance(observation, Rejected):
            assert observation.code is not RejectCode.MALFORMED_EVENT, seed
            assert one.state() == before, seed
        for other in others:
            assert other.apply(event) == observation, seed
            assert other.state() == one.state(), seed
    engine = one.engine
    return Counter(
        hits=engine.prefix_cache_hits,
        preemptions=engine.preemptions,
        accepted=engine.drafts_accepted,
        rejected=engine.drafts_scheduled - engine.drafts_accepted,
    )


def test_every_digest_gives_the_same_run(session: OpenSession) -> None:
    witnessed: Counter[str] = Counter()
    for seed in range(40):
        witnessed += compare_digests(session, seed)
    assert min(witnessed[name] for name in ("hits", "preemptions", "accepted", "rejected")) > 20


@pytest.mark.parametrize("seed", range(20))
def test_everything_submitted_is_served(session: OpenSession, seed: int) -> None:
    draw = random.Random(1000 + seed)
    config = draw_config(draw)
    s = session(**{name: getattr(config, name) for name in Config.__dataclass_fields__})
    for _ in range(100):
        s.apply(draw_event(draw, s.engine))
    s.apply(SetPause(PauseState.UNPAUSED))
    for name in NAMES:
        s.apply(GrammarReady(name))
    for _ in range(2000):
        if not s.state().requests:
            break
        s.apply(draw_answer(draw, s.engine))
    assert s.state().requests == ()
    assert len(s.state().free_queue) == config.num_usable_blocks
