"""What requests bring, in random programs: the specification gives the same run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from tests.impl.host.test_soak import (
    NAMES,
    draw_config,
    draw_event,
    draw_groups_config,
    draw_request,
)

from blockstep.impl.host import CRC32, SHA256, HostEngine
from blockstep.spec import Oracle
from blockstep.spec.vocabulary import (
    Commit,
    Config,
    EncoderOffer,
    EncoderReset,
    Event,
    Grammar,
    GrammarBitmask,
    GrammarFailed,
    GrammarOutput,
    GrammarReady,
    GroupKind,
    KVGroup,
    MultiModalItem,
    Plan,
    Request,
    RowTokens,
    Schedule,
    SpecMethod,
    StreamingUpdate,
    Submit,
    TokenIds,
)

DrawEvent: TypeAlias = Callable[[random.Random, HostEngine], Event]


def draw_any_config(draw: random.Random) -> Config:
    """With one KV group or several."""
    return draw_groups_config(draw) if draw.random() < 0.2 else draw_config(draw)


def run_both(seed: int, num_events: int, config: Config, draw_next: DrawEvent) -> Counter[str]:
    """Play one random program on both sides; what was seen in it."""
    draw = random.Random(seed)
    oracle, host = Oracle(config), HostEngine(config, draw.choice((SHA256, CRC32)))
    seen: Counter[str] = Counter()
    for number in range(num_events):
        event = draw_next(draw, host)
        answer, due = host.apply(event), oracle.apply(event)
        assert answer == due, (seed, number, event)
        if isinstance(answer, Plan) and isinstance(due, Plan):
            told = answer.num_common_prefix_blocks
            assert told == due.num_common_prefix_blocks, (seed, number, event)
        assert host.snapshot() == oracle.snapshot(), (seed, number, event)
        seen.update(look(event, answer, host))
    return seen


def look(event: Event, answer: object, host: HostEngine) -> list[str]:
    """What is to be counted."""
    seen = [f"{type(event).__name__} {type(answer).__name__}"]
    if isinstance(answer, Plan):
        used = {host.table.requests[slot].adapter for slot in host.running} - {None}
        if 0 < host.config.max_loras == len(used):
            seen.append("no seat left")
        seen += ["encoded"] * len(answer.scheduled_encoder_inputs)
        seen += ["loaded"] * len(answer.external_encoder_inputs)
        seen += ["dropped"] * len(answer.free_encoder_mm_hashes)
    if isinstance(answer, GrammarOutput):
        for row in answer.rows:
            if row.allowed[0] is not None:
                seen.append("masked")
            if row.draft_token_ids[:1] not in ((), (-1,)) and row.draft_token_ids[-1] == -1:
                seen.append("cut")
    return seen


# Adapters.


def draw_adapter_event(draw: random.Random, host: HostEngine) -> Event:
    event = draw_event(draw, host)
    if isinstance(event, Submit):
        adapter = draw.choice((None, "x", "y", "z"))
        return Submit(replace(event.request, adapter=adapter))
    return event


def compare_adapters(seeds: range, num_events: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        config = replace(draw_any_config(draw), max_loras=draw.choice((1, 1, 2, 3)))
        seen += run_both(seed, num_events, config, draw_adapter_event)
    assert seen["no seat left"] > len(seeds)


def test_adapters() -> None:
    compare_adapters(range(8), 120)


@pytest.mark.soak
def test_adapters_over_many_seeds() -> None:
    compare_adapters(range(1000, 4000), 250)


# Masks.


WITH_PLACEHOLDERS: dict[str, Any] = {
    "max_frames_in_flight": 2, "async_scheduling": True,
    "spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 2,
}  # fmt: skip


def draw_grammar(draw: random.Random) -> Grammar:
    """Of tokens 0 to 2; a state may have no edges, and then the text is complete there."""
    num_states = draw.randint(1, 4)
    states = []
    for _ in range(num_states):
        tokens = [token for token in range(3) if draw.random() < 0.7]
        states.append(tuple([(token, draw.randrange(num_states)) for token in tokens]))
    return Grammar(tuple(states))


def draw_mask_event(draw: random.Random, host: HostEngine) -> Event:
    kind = draw.random()
    if kind < 0.02:
        return GrammarFailed(draw.choice(NAMES))
    if kind < 0.1 and host.table.slot_of:
        return GrammarReady(draw.choice(list(host.table.slot_of)))
    if kind < 0.35 and host.frames:
        return draw_mask(draw, host)
    event = draw_event(draw, host)
    if isinstance(event, Submit) and draw.random() < 0.7:
        has_one = draw.random() < 0.9
        grammar = draw_grammar(draw) if has_one else None
        return Submit(replace(event.request, structured_output=True, grammar=grammar))
    if isinstance(event, Commit) and draw.random() < 0.9:
        rows = [RowTokens(row.request_id, obey(draw, host, event, row)) for row in event.sampled]
        return Commit(event.frame_id, tuple(rows))
    return event


def draw_mask(draw: random.Random, host: HostEngine) -> Event:
    frame_id = draw.choice([*host.frames, min(host.frames), draw.randrange(9)])
    rows = []
    if draw.random() < (0.9 if host.config.async_scheduling else 0.03):
        for name in [*host.frames.get(frame_id, ()), draw.choice(NAMES)]:
            if draw.random() < 0.9:
                tokens = draw.choices(range(3), k=draw.randint(0, 4))
                rows.append(RowTokens(name, tuple(tokens)))
    return GrammarBitmask(frame_id, tuple(rows))


def obey(draw: random.Random, host: HostEngine, event: Commit, row: RowTokens) -> TokenIds:
    """Tokens as many as given, or fewer, of which the grammar forbids none."""
    matcher = host.matchers.get(row.request_id)
    if matcher is None or not row.token_ids:
        return row.token_ids
    drafts = host.frames[event.frame_id][row.request_id] or ()
    position, tokens = matcher.position, []
    for count in range(len(row.token_ids)):
        allowed = matcher.list_allowed(position)
        token = draw.choice((0, 1, 2) if allowed is None else allowed)
        tokens.append(token)
        position = matcher.go_on(position, token) or position
        if count < len(drafts) and drafts[count] not in (token, -1):
            break
    return tuple(tokens)


def compare_masks(seeds: range, num_events: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        config = draw_any_config(draw)
        if not config.groups and draw.random() < 0.5:
            config = replace(config, **WITH_PLACEHOLDERS)
        reasons = draw.random() < 0.4
        config = replace(
            config,
            reasoning_end_token_id=draw.randrange(3) if reasons else None,
            enable_in_reasoning=reasons and draw.random() < 0.3,
        )
        seen += run_both(seed, num_events, config, draw_mask_event)
    assert min(seen[name] for name in ("cut", "Commit Rejected", "GrammarFailed Outputs")) > 0
    assert seen["masked"] > len(seeds)


def test_masks() -> None:
    compare_masks(range(25), 200)


@pytest.mark.soak
def test_masks_over_many_seeds() -> None:
    compare_masks(range(1000, 3000), 300)


# Sessions.


def draw_session_event(draw: random.Random, host: HostEngine) -> Event:
    if draw.random() < 0.15:
        name = draw.choice([*host.table.slot_of, *host.sessions, draw.choice(NAMES)])
        request = replace(draw_request(draw), request_id=name, resumable=draw.random() < 0.85)
        short = request.prompt_token_ids[: draw.randint(1, 4)]
        items = tuple([item for item in request.items if item.offset + item.length <= len(short)])
        request = replace(request, prompt_token_ids=short, prompt_embeds=(), items=items)
        return StreamingUpdate(replace(request, structured_output=False))
    event = draw_event(draw, host)
    if isinstance(event, Commit) and draw.random() < 0.95:
        # What is behind a stop is answered all the same.
        lost = host.dropped.get(event.frame_id, {})
        rows = [
            RowTokens(row.request_id, (0,)) if row.request_id in lost else row
            for row in event.sampled
        ]
        return Commit(event.frame_id, tuple(rows))
    if isinstance(event, Submit) and draw.random() < 0.7:
        most = draw.randint(1, 6)
        prompt = event.request.prompt_token_ids[:most]
        items = tuple([i for i in event.request.items if i.offset + i.length <= len(prompt)])
        request = replace(event.request, resumable=True, prompt_token_ids=prompt, items=items)
        return Submit(replace(request, prompt_embeds=(), max_tokens=draw.randint(1, 3)))
    return event


def compare_sessions(seeds: range, num_events: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        seen += run_both(seed, num_events, draw_any_config(draw), draw_session_event)
    assert seen["StreamingUpdate Aborted"] > 0
    assert seen["StreamingUpdate Ack"] > len(seeds)


def test_sessions() -> None:
    compare_sessions(range(25), 200)


def play_both(config: Config, *events: Event) -> None:
    """The specification gives the same run of these events."""
    steps = iter(events)
    run_both(0, len(events), config, lambda _draw, _host: next(steps))


def chunk(name: str, *tokens: int) -> Request:
    return Request(name, tokens, max_tokens=1, resumable=True)


def test_who_goes_on_takes_no_more_from_sessions_than_its_window_lacks() -> None:
    groups = (KVGroup(GroupKind.SLIDING_WINDOW, 2, sliding_window=3),)
    config = Config(num_blocks=6, block_size=2, max_num_batched_tokens=4, groups=groups)
    play_both(
        config,
        Submit(chunk("B", 1, 2)),
        *(Schedule(), Commit(0, (RowTokens("B", (9,)),))),
        Submit(chunk("A", *range(11, 19))),
        *(Schedule(), Commit(1, (RowTokens("A"),))),
        *(Schedule(), Commit(2, (RowTokens("A", (9,)),))),
        Submit(chunk("C", 3, 4)),
        *(Schedule(), Commit(3, (RowTokens("C", (9,)),))),
        StreamingUpdate(chunk("A", 5)),
        Schedule(),
    )


def test_what_sessions_hold_is_in_no_table_of_those_who_run() -> None:
    config = Config(num_blocks=20, block_size=2, max_model_len=16)
    play_both(
        config,
        Submit(chunk("A", 1, 2)),
        Schedule(),
        Commit(0, (RowTokens("A", (9,)),)),
        Submit(Request("B", (1, 2, 3), max_tokens=4)),
        Submit(Request("C", (4, 5, 6), max_tokens=4)),
        Schedule(),
    )


@pytest.mark.soak
def test_sessions_over_many_seeds() -> None:
    compare_sessions(range(1000, 3000), 300)


# Encoder.


def draw_items(draw: random.Random, num_prompt: int, most: int) -> tuple[MultiModalItem, ...]:
    """Items of at most so many tokens, one behind the other, and some positions between them."""
    items: list[MultiModalItem] = []
    end = draw.randint(0, 2)
    while end < num_prompt and len(items) < 4:
        name = draw.choice("vwxyz")
        length, mask = SHAPES[name]
        if draw.random() < 0.05:  # one identifier stands for one size
            length, mask = draw.randint(1, 5), ()
        if length <= min(most, num_prompt - end):
            items.append(MultiModalItem(name, end, length, mask))
        end += length + draw.choice((0, 0, 1, 2))
    return tuple(items)


SHAPES: dict[str, tuple[int, tuple[bool, ...]]] = {
    "v": (1, ()),
    "w": (2, ()),
    "x": (3, ()),
    "y": (3, (True, False, True)),
    "z": (5, (False, True, True, True, False)),
}
"""Of each identifier: tokens, and which of them are embeddings."""


def draw_encoder_config(draw: random.Random) -> Config:
    config = replace(
        draw_any_config(draw),
        encoder_compute_budget=draw.randint(2, 8),
        encoder_cache_size=draw.randint(3, 9),
        disable_chunked_mm_input=draw.random() < 0.2,
    )
    if draw.random() < 0.8:
        return config
    across = KVGroup(GroupKind.CROSS_ATTENTION, config.block_size)
    groups = (*draw.choice(((), (KVGroup(GroupKind.FULL, config.block_size),))), across)
    return replace(
        config,
        is_encoder_decoder=True,
        disable_chunked_mm_input=True,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        long_prefill_token_threshold=0,
        max_num_batched_tokens=24,
        groups=draw.choice((groups, ())),
    )


def draw_encoder_event(draw: random.Random, host: HostEngine) -> Event:
    kind = draw.random()
    if kind < 0.02:
        return EncoderReset()
    if kind < 0.05:
        return EncoderOffer(tuple(draw.sample("vwxyz", draw.randint(0, 2))))
    event = draw_event(draw, host)
    if isinstance(event, Submit) and draw.random() < 0.8:
        request = event.request
        items = draw_items(draw, len(request.prompt_token_ids), draw.randint(1, 5))
        if host.config.is_encoder_decoder:  # they stand beside the prompt
            items = tuple([replace(item, offset=0, is_embed=()) for item in items[:1]])
        return Submit(replace(request, items=items, prompt_embeds=()))
    return event


def compare_encoder(seeds: range, num_events: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        seen += run_both(seed, num_events, draw_encoder_config(draw), draw_encoder_event)
    assert min(seen[name] for name in ("encoded", "dropped")) > len(seeds)
    assert seen["loaded"] > 0


def test_encoder() -> None:
    compare_encoder(range(25), 200)


@pytest.mark.soak
def test_encoder_over_many_seeds() -> None:
    compare_encoder(range(1000, 3000), 300)
