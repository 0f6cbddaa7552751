"""Plans and commits in arrays: they decide the same as events."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from blockstep.impl.array_plans import ArrayOutputs, ArrayPlan
from blockstep.impl.host import HostEngine
from blockstep.spec.vocabulary import (
    Abort,
    Ack,
    Commit,
    Config,
    Drafts,
    FinishReason,
    GroupKind,
    KVGroup,
    Outputs,
    Policy,
    RejectCode,
    Rejected,
    RepetitionDetection,
    Request,
    Reset,
    RowTokens,
    Schedule,
    SpecMethod,
    Submit,
    TokenIds,
)

GROUPS = (KVGroup(GroupKind.FULL, 4), KVGroup(GroupKind.SLIDING_WINDOW, 8, sliding_window=6))
SMALL: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 24}


def draw_requests(draw: random.Random, count: int) -> list[Request]:
    stems = [tuple(draw.choices(range(3), k=24)) for _ in range(3)]
    return [
        Request(
            f"r{number}",
            draw.choice(stems)[: draw.randint(1, 24)],
            max_tokens=draw.randint(1, 40),
            min_tokens=0,
            eos_token_id=draw.choice((None, 7)),
            stop_token_ids=draw.choice(((), (8, 7 + 4096), (90, 91, 92, 93, 8))),
            repetition_detection=draw.choice((None, None, RepetitionDetection(2, 1, 4))),
            priority=draw.randrange(3),
        )
        for number in range(count)
    ]


def draw_tokens(draw: random.Random, drafts: TokenIds | None) -> TokenIds:
    if drafts is None:
        return ()
    accepted = drafts[: draw.randint(0, len(drafts))]
    return (*(draw.randrange(9) if token < 0 else token for token in accepted), draw.randrange(9))


def draw_drafts(draw: random.Random, engine: HostEngine) -> Drafts:
    most = engine.config.num_speculative_tokens
    return Drafts(
        tuple(
            RowTokens(name, tuple(draw.choices(range(9), k=draw.randint(0, most))))
            for name in engine.requests.slot_of
        )
    )


@pytest.mark.parametrize("seed", range(12))
def test_arrays_and_events_decide_the_same(seed: int) -> None:
    draw = random.Random(seed)
    method = draw.choice((SpecMethod.NONE, SpecMethod.NGRAM, SpecMethod.EAGLE))
    depth = draw.choice((1, 2))
    config = Config(
        **SMALL,
        max_num_batched_tokens=draw.choice((24, 64)),
        max_model_len=60,
        policy=draw.choice((Policy.FCFS, Policy.PRIORITY)),
        enable_prefix_caching=draw.random() < 0.8,
        spec_method=method,
        num_speculative_tokens=0 if method is SpecMethod.NONE else 2,
        max_frames_in_flight=depth,
        async_scheduling=depth > 1,
        groups=draw.choice(((), GROUPS)),
    )
    by_events, by_arrays = HostEngine(config), HostEngine(config)
    waiting = draw_requests(draw, 60)
    while waiting or by_events.requests.slot_of:
        for request in waiting[: draw.randint(0, 4)]:
            assert isinstance(by_events.apply(Submit(request)), Ack)
            assert isinstance(by_arrays.apply(Submit(request)), Ack)
            waiting.remove(request)
        if draw.random() < 0.1:
            gone = Abort((f"r{draw.randrange(60)}",))
            assert by_events.apply(gone) == by_arrays.apply(gone)
        if method is not SpecMethod.NONE and not config.async_scheduling:
            drafts = draw_drafts(draw, by_events)
            assert by_events.apply(drafts) == by_arrays.apply(drafts)
        if len(by_events.frames) < config.max_frames_in_flight:
            plan = by_arrays.schedule_arrays()
            assert isinstance(plan, ArrayPlan)
            assert plan.build_plan() == by_events.apply(Schedule())
        if by_events.frames and draw.random() < 0.8:
            commit_both(draw, by_events, by_arrays)
        assert by_arrays.snapshot() == by_events.snapshot()


def commit_both(draw: random.Random, by_events: HostEngine, by_arrays: HostEngine) -> None:
    frame_id, kept = next(iter(by_events.frames.items()))
    frame = kept.build_rows()
    answer = [(name, draw_tokens(draw, drafts)) for name, drafts in frame.items()]
    flat = np.array([token for _, tokens in answer for token in tokens], np.int32)
    counts = np.array([len(tokens) for _, tokens in answer], np.int32)
    has_drafts = any(drafts for drafts in frame.values() if drafts is not None)
    outputs = by_arrays.commit_arrays(frame_id, flat, counts if has_drafts else None)
    assert isinstance(outputs, ArrayOutputs)
    due = by_events.apply(Commit(frame_id, tuple(RowTokens(*row) for row in answer)))
    assert outputs.build_outputs() == due
    objects = outputs.build_objects()
    assert isinstance(due, Outputs)
    assert [(o.request_id, o.new_token_ids, o.finish_reason, o.stop_token_id) for o in objects] == [
        (row.request_id, row.new_token_ids, row.finish_reason, row.stop_token_id)
        for row in due.rows
    ]


def open_engine(max_tokens: int = 60, **fields: Any) -> tuple[HostEngine, ArrayPlan]:
    engine = HostEngine(Config(**{**SMALL, **fields}))
    for request_id in "abc":
        request = Request(request_id, (1, 2, 3), max_tokens=max_tokens)
        assert engine.apply(Submit(request)) == Ack()
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    engine.commit_arrays(plan.frame_id, np.array([4, 5, 6], np.int32))
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    return engine, plan


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        ((1, 2), None),
        ((1, 2, 3, 4), None),
        ((1, 2, -1), None),
        ((1, 2, 3), (2, 1, 0)),
        ((1, 2, 3), (1, 1)),
        ((1, 2), (1, 1)),
        ((1, 2), (1, 1, 1)),
        ((1, 2, 3, 4), (1, 1, 1)),
        ((1, 2, 3, 4), (1, 1, 1, 1)),
        ((1, 2, 3), (1, 1, 2)),
    ],
)
def test_a_bad_commit_in_arrays_changes_nothing(tokens: TokenIds, counts: TokenIds | None) -> None:
    engine, plan = open_engine()
    before = engine.snapshot()
    lengths = None if counts is None else np.array(counts, np.int32)
    answer = engine.commit_arrays(plan.frame_id, np.array(tokens, np.int32), lengths)
    assert isinstance(answer, Rejected)
    assert answer.code is RejectCode.BAD_RESULT
    assert engine.snapshot() == before


def test_frames_are_rejected_as_with_events() -> None:
    engine, plan = open_engine()
    full = engine.schedule_arrays()
    assert isinstance(full, Rejected)
    assert full.code is RejectCode.PIPELINE_FULL
    unknown = engine.commit_arrays(plan.frame_id + 1, np.array([1, 2, 3], np.int32))
    assert isinstance(unknown, Rejected)
    assert unknown.code is RejectCode.UNKNOWN_FRAME


def test_accepted_tokens_must_be_drafts() -> None:
    engine, plan = open_engine(spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    engine.commit_arrays(plan.frame_id, np.array([4, 5, 6], np.int32))
    engine.apply(Drafts((RowTokens("b", (7, 8)),)))
    plan = engine.schedule_arrays()  # type: ignore[assignment]
    assert plan.draft_token_ids == {1: (7, 8)}
    for wrong in (3, 9):
        answer = engine.commit_arrays(
            plan.frame_id, np.array([1, 7, wrong, 1, 1], np.int32), np.array([1, 3, 1], np.int32)
        )
        assert isinstance(answer, Rejected)
    silent = engine.commit_arrays(
        plan.frame_id, np.array([1, 7, 9], np.int32), np.array([1, 2, 0], np.int32)
    )
    assert isinstance(silent, Rejected)
    right = engine.commit_arrays(
        plan.frame_id, np.array([1, 7, 9, 1], np.int32), np.array([1, 2, 1], np.int32)
    )
    assert isinstance(right, ArrayOutputs)
    assert [row.new_token_ids for row in right.build_outputs().rows] == [(1,), (7, 9), (1,)]


def test_a_commit_of_one_token_each_accepts_no_draft() -> None:
    engine, plan = open_engine(spec_method=SpecMethod.NGRAM, num_speculative_tokens=2)
    engine.commit_arrays(plan.frame_id, np.array([4, 5, 6], np.int32))
    engine.apply(Drafts((RowTokens("b", (7, 8)),)))
    plan = engine.schedule_arrays()  # type: ignore[assignment]
    engine.commit_arrays(plan.frame_id, np.array([1, 7, 1], np.int32))
    assert engine.stats().drafts_scheduled == 2
    assert engine.stats().drafts_accepted == 0
    request = engine.snapshot().request("b")
    assert request is not None
    assert request.num_computed_tokens == 5  # all known tokens but the last


@pytest.mark.parametrize("caching", [True, False])
def test_many_outputs_are_kept(caching: bool) -> None:
    engine, plan = open_engine(
        600, num_blocks=700, enable_prefix_caching=caching, max_model_len=1000
    )
    outputs: list[int] = []
    for step in range(520):
        engine.commit_arrays(plan.frame_id, np.array([step, 0, 1], np.int32))
        outputs.append(step)
        plan = engine.schedule_arrays()  # type: ignore[assignment]
    request = engine.snapshot().request("a")
    assert request is not None
    assert request.output_token_ids == (4, *outputs)


@pytest.mark.parametrize(
    ("block_size", "num_prompt", "counts"),
    [
        (48, 8, (1, 127, 127, 128)),
        (48, 24, (1, 120, 120, 122, 127)),
        (48, 9, (1, 110, 110, 69, 110, 1, 110, 110, 110, 110)),
        (88, 26, (1, *(62,) * 13)),
        (300, 9, (1, *(62,) * 13)),
    ],
)
def test_many_tokens_in_one_commit_overwrite_none(
    block_size: int, num_prompt: int, counts: TokenIds
) -> None:
    engine = HostEngine(
        Config(
            num_blocks=30,
            block_size=block_size,
            max_num_batched_tokens=512,
            max_model_len=1000,
            enable_prefix_caching=False,
            spec_method=SpecMethod.NGRAM,
            num_speculative_tokens=127,
        )
    )
    engine.apply(Submit(Request("a", (7,) * num_prompt, max_tokens=900)))
    outputs: list[int] = []
    for count in counts:
        drafts = tuple(range(len(outputs), len(outputs) + count - 1))
        engine.apply(Drafts((RowTokens("a", drafts),)))
        plan = engine.schedule_arrays()
        assert isinstance(plan, ArrayPlan)
        outputs += [*drafts, 5]
        tokens = np.array([*drafts, 5], np.int32)
        engine.commit_arrays(plan.frame_id, tokens, np.array([count], np.int32))
    request = engine.snapshot().request("a")
    assert request is not None
    assert request.output_token_ids == tuple(outputs)


def test_a_hit_counts_tokens_delivered_after_the_preemption() -> None:
    config = Config(
        num_blocks=40, block_size=1, max_num_seqs=2, max_frames_in_flight=3, async_scheduling=True
    )
    engine = HostEngine(config)
    for request_id in "ab":
        engine.apply(Submit(Request(request_id, (1, 2, 3), max_tokens=9)))
    for _ in range(3):
        assert isinstance(engine.schedule_arrays(), ArrayPlan)
    engine.apply(Reset(reset_running_requests=True))
    for frame_id in range(3):
        engine.commit_arrays(frame_id, np.full(2, 4 + frame_id, np.int32))
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    assert plan.names.tolist() == ["a", "b"]
    assert plan.num_computed_tokens.tolist() == [0, 5]


def test_a_victim_without_a_row_returns_no_budget() -> None:
    requests = [(12, 1), (10, 4), (1, 2), (6, 5), (12, 3), (1, 5), (1, 3)]
    config = Config(
        num_blocks=15,
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=7,
        max_model_len=24,
        policy=Policy.PRIORITY,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    engine = HostEngine(config)
    preempted: list[str] = []
    for step in range(8):
        if step < len(requests):
            num_prompt, priority = requests[step]
            prompt = (1,) * num_prompt
            engine.apply(Submit(Request(f"r{step}", prompt, max_tokens=9, priority=priority)))
        plan = engine.schedule_arrays()
        assert isinstance(plan, ArrayPlan)
        assert plan.num_scheduled_tokens.sum() <= 7
        preempted += plan.preempted_req_ids
        num_tokens = len(plan) if plan.samples is None else np.count_nonzero(plan.samples)
        engine.commit_arrays(plan.frame_id, np.full(num_tokens, 5, np.int32))
    assert preempted == ["r3"]


def test_objects_of_a_plan_equal_its_arrays() -> None:
    engine = HostEngine(Config(**SMALL))
    for request_id in "ab":
        engine.apply(Submit(Request(request_id, (1, 2, 3, 4), max_tokens=9)))
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    objects = plan.build_objects()
    assert objects.num_scheduled_tokens == {"a": 4, "b": 4}
    assert [row.request_id for row in objects.new] == ["a", "b"]
    assert objects.req_ids == []
    engine.commit_arrays(plan.frame_id, np.array([5, 6], np.int32))
    engine.apply(Submit(Request("c", (1, 2), max_tokens=1)))
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    objects = plan.build_objects()
    assert objects.num_scheduled_tokens == {"a": 1, "b": 1, "c": 2}
    assert objects.req_ids == ["a", "b"]
    assert objects.new_block_ids == [((3,),), ((4,),)]
    assert objects.num_computed_tokens == [4, 4]
    assert objects.num_output_tokens == [1, 1]
    assert objects.total_num_scheduled_tokens == 4
    outputs = engine.commit_arrays(plan.frame_id, np.array([5, 6, 7], np.int32))
    assert isinstance(outputs, ArrayOutputs)
    assert outputs.ended == {2: (FinishReason.LENGTH, None)}
