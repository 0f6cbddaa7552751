"""Several KV groups on the host: what is left, what is hit, what is charged; and random programs,
on which the specification, and every digest, give the same run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from groups_support import (
    ALIGN,
    ALL,
    CHUNK,
    FULL,
    NONE,
    WINDOW,
    chunks,
    full,
    recurrent,
    window,
)
from tests.impl.test_soak import COLLIDING, draw_config, draw_event

from blockstep.impl.host import CRC32, SHA256, HostEngine
from blockstep.impl.host.groups import GroupMemory
from blockstep.impl.host.lineage import Lineage
from blockstep.impl.host.pool import BlockPool
from blockstep.impl.host.prefix import PrefixMap
from blockstep.impl.host.table import Holding
from blockstep.spec import Oracle
from blockstep.spec.vocabulary import (
    Abort,
    Ack,
    Config,
    KVGroup,
    Plan,
    RejectCode,
    Rejected,
    Request,
    Schedule,
    SpecMethod,
    Submit,
    config_problems,
)

if TYPE_CHECKING:
    from tests.impl.conftest import OpenSession

AHEAD: dict[str, Any] = {"max_frames_in_flight": 2, "async_scheduling": True}
EAGLE: dict[str, Any] = {"spec_method": SpecMethod.EAGLE, "num_speculative_tokens": 1}
SMALL = Config(30, 2, max_num_batched_tokens=8, max_model_len=32)


def open_with(session: OpenSession, *groups: KVGroup, **fields: Any) -> Any:
    values = {name: getattr(SMALL, name) for name in Config.__dataclass_fields__}
    sizes = min(group.block_size for group in groups)
    return session(**values | {"block_size": sizes, "groups": groups} | fields)


def hit_of(
    s: Any, request_id: str, tokens: range | tuple[int, ...]
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """The tokens that a new request is spared, and its tables."""
    assert s.submit(request_id, tokens, max_tokens=1) == Ack()
    (row,) = s.plan().new
    return row.num_computed_tokens, row.block_ids


def test_a_window_is_left_behind_from_its_last_block_to_its_first(session: OpenSession) -> None:
    s = open_with(session, full(2), window(2, 3))
    s.submit("a", range(17), max_tokens=4)
    s.step()
    assert s.request("a").block_tables == ((1, 2, 3, 4), (5, 6, 7, 8))
    before = s.state().free_queue
    s.step()  # 8 are computed, and the next token reads from 6 on: blocks 0 to 2 are left
    assert s.request("a").block_tables == (
        (1, 2, 3, 4, 9, 10, 11, 12),
        (0, 0, 0, 8, *range(13, 17)),
    )
    assert s.state().free_queue == (*before[8:], 7, 6, 5)


def test_chunks_are_left_when_they_are_full(session: OpenSession) -> None:
    s = open_with(session, chunks(2, 6), max_num_batched_tokens=5, enable_prefix_caching=False)
    s.submit("a", range(17), max_tokens=4)
    for table in ((1, 2, 3), (1, 2, 3, 4, 5), (0, 0, 0, 4, 5, 6, 7, 8)):
        s.step()
        assert s.request("a").block_tables == (table,)


def test_drafts_in_flight_hold_a_window_back(session: OpenSession) -> None:
    ngram = {"spec_method": SpecMethod.NGRAM, "num_speculative_tokens": 3}
    s = open_with(session, window(1, 1), block_size=1, **AHEAD, **ngram)
    s.submit("a", (7,), max_tokens=9)
    first = s.plan()
    second = s.plan()  # a token and three drafts, behind the promise of the first
    s.commit(first, a=(1,))
    s.plan()
    assert s.request("a").num_computed_tokens == 1 + 4 + 4
    assert s.request("a").block_tables == ((0, 0, 3, 4, 5, 6, 7, 8, 9),)
    s.commit(second, a=(2,))
    assert s.request("a").num_computed_tokens == 1 + 1 + 4


@pytest.mark.parametrize(
    ("groups", "length"),
    [
        ((full(2),), 14), ((window(2, 3),), 14), ((window(2, 30),), 14), ((chunks(2, 6),), 14),
        ((full(2), window(2, 5)), 14), ((full(4), window(2, 5)), 12),
        ((full(2), window(6, 5)), 12), ((window(4, 2), chunks(6, 4), full(2)), 12),
    ],
)  # fmt: skip
def test_a_hit_is_whole_blocks_of_every_group(
    session: OpenSession, groups: tuple[KVGroup, ...], length: int
) -> None:
    s = open_with(session, *groups, num_blocks=60, max_num_batched_tokens=32)
    s.submit("a", range(16), max_tokens=1)
    s.step(a=(0,))
    hit, tables = hit_of(s, "b", range(16))
    assert hit == length
    for group, table in zip(groups, tables, strict=True):
        if group.kind is FULL:
            first = 0
        elif group.kind is WINDOW:
            first = max(length - group.sliding_window + 1, 0)
        else:
            first = length // group.attention_chunk_size * group.attention_chunk_size
        num_left = first // group.block_size
        assert table[:num_left] == (0,) * num_left
        assert 0 not in table[num_left:]


@pytest.mark.parametrize(("extra", "length"), [({}, 14), (EAGLE, 12)])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_a_draft_head_costs_one_block_however_many_groups_there_are(
    session: OpenSession, extra: dict[str, Any], length: int, num_groups: int
) -> None:
    groups = (full(2), window(2, 5), window(2, 3))[:num_groups]
    s = open_with(session, *groups, num_blocks=60, max_num_batched_tokens=32, **extra)
    s.submit("a", range(16), max_tokens=1)
    s.step(a=(0,))
    assert hit_of(s, "b", range(16))[0] == length


def test_a_hit_ends_where_the_window_before_it_is_still_there(session: OpenSession) -> None:
    s = open_with(session, window(2, 3), full(2), num_blocks=20, max_num_batched_tokens=16)
    s.submit("a", range(16), max_tokens=1)
    s.step(a=(0,))
    # The next one takes 3 blocks that nobody had, and all of a's window but the first, 1.
    s.submit("b", range(100, 109), max_tokens=1)
    s.step(b=(0,))
    assert sorted(key.index for key in s.state().cached if key.group == 1)[-1] == 7
    hit, (left, right) = hit_of(s, "c", range(16))
    assert hit == 2
    assert (left[0], right[0]) == (1, 9)


def test_chunks_before_the_one_of_the_next_token_are_hit_in_an_empty_pool(
    session: OpenSession,
) -> None:
    s = open_with(session, chunks(2, 4), max_num_batched_tokens=32)
    assert hit_of(s, "a", range(11)) == (8, ((0, 0, 0, 0, 1, 2),))


def test_hits_of_all_groups_are_held_before_any_group_takes_a_block(session: OpenSession) -> None:
    s = open_with(session, window(2, 3), full(2), num_blocks=8, scheduler_reserve_full_isl=False)
    s.submit("a", range(6), max_tokens=1)
    s.step(a=(0,))
    # Queue: the one never used, then a's. The first group takes a block in front of the hits of
    # the second.
    hit, tables = hit_of(s, "b", range(6))
    assert hit == 4
    blocks = [block for table in tables for block in table if block]
    assert len(blocks) == len(set(blocks))


def test_a_gate_charges_a_window_with_what_it_holds(session: OpenSession) -> None:
    prompt = range(20)
    for groups, is_admitted in (((window(2, 3),), True), ((full(2),), False)):
        s = open_with(session, *groups, num_blocks=9, max_num_batched_tokens=4)
        answer = s.submit("a", prompt, max_tokens=1)
        assert answer == (Ack() if is_admitted else Rejected(RejectCode.NEVER_FITS))
        assert len(s.plan().new) == is_admitted


@pytest.mark.parametrize(("num_usable", "is_admitted"), [(8, False), (9, True)])
def test_hits_that_others_hold_spare_a_gate_nothing_behind_the_window(
    session: OpenSession, num_usable: int, is_admitted: bool
) -> None:
    s = open_with(session, window(2, 6), num_blocks=num_usable + 1, max_num_batched_tokens=4)
    s.submit("a", range(8), max_tokens=9)
    s.step()
    s.step(a=(1,))
    s.submit("b", (*range(8), *range(20, 32)), max_tokens=1)
    plan = s.plan()
    assert s.request("a").block_tables == ((0, 2, 3, 4, 5),)
    # b shares blocks 2 to 4; when its window has moved on they are a's, and it holds five others.
    assert [row.num_computed_tokens for row in plan.new] == [8] * is_admitted


def test_larger_blocks_are_named_by_their_last_tokens_and_their_group(
    session: OpenSession,
) -> None:
    s = open_with(session, full(2), full(4), max_num_batched_tokens=32)
    s.submit("a", range(9), max_tokens=1)
    s.step(a=(0,))
    named = sorted((key.group, key.index, key.token_ids) for key in s.state().cached)
    assert named == [
        (0, 0, (0, 1)), (0, 1, (2, 3)), (0, 2, (4, 5)), (0, 3, (6, 7)), (1, 1, (2, 3)),
        (1, 3, (6, 7)),
    ]  # fmt: skip


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


def compare_with_the_specification(seed: int, num_events: int) -> Counter[str]:
    """Run one random program on both sides; what happened in it."""
    draw = random.Random(seed)
    config = draw_groups_config(draw)
    oracle, host = Oracle(config), HostEngine(config, draw.choice((SHA256, CRC32, COLLIDING)))
    seen: Counter[str] = Counter()
    for _ in range(num_events):
        event = draw_event(draw, host)
        answer, due = host.apply(event), oracle.apply(event)
        assert answer == due, seed
        if isinstance(answer, Plan) and isinstance(due, Plan):
            assert answer.num_common_prefix_blocks == due.num_common_prefix_blocks, seed
            seen["common"] += sum(due.num_common_prefix_blocks) > 0 and len(due.rows) > 1
        state = host.snapshot()
        assert state == oracle.snapshot(), seed
        tables = [table for request in state.requests for table in request.block_tables]
        seen["nulls"] += any(0 in table for table in tables)
    seen.update(hits=host.prefix_cache_hits, preemptions=host.preemptions)
    seen.update(accepted=host.drafts_accepted)
    return seen


def compare_many(seeds: range, num_events: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += compare_with_the_specification(seed, num_events)
    assert min(seen[name] for name in ("nulls", "hits", "preemptions", "accepted")) > len(seeds)
    assert seen["common"] > 0


def test_the_specification_gives_the_same_run() -> None:
    compare_many(range(40), 150)


@pytest.mark.soak
def test_the_specification_gives_the_same_run_over_many_seeds() -> None:
    compare_many(range(1000, 7000), 250)


def test_one_group_by_name_is_the_one_that_there_is_without() -> None:
    for seed in range(15):
        draw = random.Random(seed)
        config = draw_config(draw)
        plain = HostEngine(config)
        named = HostEngine(replace(config, groups=(full(config.block_size),)))
        for _ in range(120):
            event = draw_event(draw, plain)
            assert named.apply(event) == plain.apply(event), seed
            assert named.snapshot() == plain.snapshot(), seed


def test_what_a_request_holds_at_most_is_charged_when_it_is_submitted() -> None:
    # A window of 3 and steps of 4: 6 slots from anywhere, in 4 blocks of two.
    for num_blocks, answer in ((5, Ack()), (4, Rejected(RejectCode.NEVER_FITS))):
        config = replace(
            SMALL, num_blocks=num_blocks, max_num_batched_tokens=4, groups=(window(2, 3),),
            long_prefill_token_threshold=9,
        )  # fmt: skip
        host = HostEngine(config)
        assert host.apply(Submit(Request("a", tuple(range(30)), max_tokens=2))) == answer
        host.apply(Schedule())
        assert host.apply(Abort(("a",))) is not None


def test_a_plan_tells_what_the_tables_of_all_who_run_begin_with(session: OpenSession) -> None:
    s = open_with(session, full(2), window(2, 3), full(4), num_blocks=60)
    assert s.plan().num_common_prefix_blocks == (0, 0, 0), "nobody runs"
    s.submit("a", range(7), max_tokens=9)
    assert s.step(a=(0,))[0].num_common_prefix_blocks == (4, 0, 2)
    s.submit("b", (*range(6), 9), max_tokens=9)
    assert s.step(a=(0,), b=(0,))[0].num_common_prefix_blocks == (2, 0, 1)
    s.submit("c", range(100, 103), max_tokens=9)
    assert s.step(a=(0,), b=(0,), c=(0,))[0].num_common_prefix_blocks == (0, 0, 0)
    s.apply(Abort(("c",)))
    assert s.step(a=(0,), b=(0,))[0].num_common_prefix_blocks == (2, 0, 1)
    s.apply(Abort(("a",)))
    for num_blocks in (5, 6, 6):
        plan, _ = s.step(b=(0,))
        assert plan.num_common_prefix_blocks == (num_blocks, 0, 3), "one shares all with itself"


def test_without_caching_there_is_no_common_prefix(session: OpenSession) -> None:
    s = session(num_blocks=9, block_size=2, enable_prefix_caching=False)
    s.submit("a", range(4), max_tokens=9)
    assert s.plan().num_common_prefix_blocks == (0,)


@pytest.mark.parametrize(("threshold", "num_usable"), [(1, 8), (2, 10), (4, 14)])
def test_a_row_that_is_too_short_for_drafts_is_charged_for_none_in_flight(
    session: OpenSession, threshold: int, num_usable: int
) -> None:
    drafts = {"spec_method": SpecMethod.DRAFT_MODEL, "num_speculative_tokens": 3}
    # The window before the token, the row, three slots of lookahead, the drafts of another frame.
    for count, answer in ((num_usable, Ack()), (num_usable - 1, Rejected(RejectCode.NEVER_FITS))):
        s = open_with(
            session, window(1, 5), num_blocks=count + 1,
            long_prefill_token_threshold=threshold, **drafts, **AHEAD,
        )  # fmt: skip
        assert s.submit("a", range(20), max_tokens=9) == answer


@pytest.mark.parametrize(("num_cached", "found"), [(0, [5, 6, 7, 8]), (3, [8])])
def test_states_of_this_step_are_not_hit_in_it(num_cached: int, found: list[int]) -> None:
    """What was computed before is there, though its tokens were promised, and it is told late."""
    config = Config(16, 2, groups=(full(2), recurrent(2, ALL)))
    prefix = PrefixMap(16, verify=False)
    memory = GroupMemory(config, BlockPool(16, prefix), prefix)
    lineage = Lineage(Request("A", (1, 2, 3, 4, 5, 6, 7, 8)), 2, CRC32)
    table = [Holding([1, 2, 3, 4], num_cached=4), Holding([5, 6, 7, 8], num_cached=num_cached)]
    memory.publish(table, lineage, 6, 8)
    assert memory.new_states == {8}
    states = [prefix.find(lineage, index, 1) for index in range(4)]
    assert [block for block in states if block is not None] == found


def test_a_place_without_a_block_is_not_published() -> None:
    config = Config(16, 2, groups=(full(2), recurrent(2)))
    prefix = PrefixMap(16, verify=False)
    memory = GroupMemory(config, BlockPool(16, prefix), prefix)
    lineage = Lineage(Request("A", (1, 2, 3, 4)), 2, CRC32)
    memory.publish([Holding([1, 2], num_cached=2), Holding([0, 5])], lineage, 0, 4)
    assert [prefix.find(lineage, index, 1) for index in range(2)] == [None, 5]
