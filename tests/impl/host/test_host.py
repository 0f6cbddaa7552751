"""The host engine: growth of arrays, leaks, copies, commits in arrays, and life without numba."""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from alike_support import apply_alike, step_alike
from episodes_support import play_episodes

from blockstep.conformance.search.check import check
from blockstep.conformance.search.options import CheckOptions
from blockstep.impl.array_plans import ArrayOutputs, ArrayPlan
from blockstep.impl.host import IS_COMPILED, HostEngine
from blockstep.impl.host import state as state_of_engine
from blockstep.impl.host.state import (
    FREE_BATCH_ROW,
    LINE_BYTES,
    NEXT_BATCH_ROW,
    NONE,
    NUM_FREE_NODES,
)
from blockstep.impl.interning import NOTHING, ExtrasTable, Labels, list_extras
from blockstep.spec import Oracle
from blockstep.spec.features.identity import get_item_keys
from blockstep.spec.vocabulary import (
    Abort,
    Ack,
    Commit,
    Config,
    FinishReason,
    Fork,
    Grammar,
    GrammarReady,
    GroupKind,
    KVEvent,
    KVGroup,
    MultiModalItem,
    Outputs,
    Policy,
    RejectCode,
    Rejected,
    Request,
    Reset,
    RowTokens,
    Schedule,
    Submit,
)


def test_numba_is_installed_unless_turned_off() -> None:
    assert IS_COMPILED or "NUMBA_DISABLE_JIT" in os.environ


@pytest.mark.parametrize(("preset", "depth"), [("tiny", 4), ("small", 4), ("small", 1)])
def test_the_host_engine_conforms(preset: str, depth: int) -> None:
    options = CheckOptions("host", preset=preset, seed=11, max_events=8_000, max_depth=depth)
    assert check(options).first is None


WITHOUT = {
    "switched off": "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'",
    "not installed": "import sys; sys.modules['numba'] = None",
}


@pytest.mark.parametrize("way", WITHOUT)
def test_the_host_engine_conforms_without_numba(way: str) -> None:
    code = f"""{WITHOUT[way]}
from blockstep.conformance.search.check import CheckOptions, check
from blockstep.impl.host import IS_COMPILED
assert not IS_COMPILED
assert check(CheckOptions("host", seed=12, max_events=1_500)).first is None
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def draw_request(draw: random.Random, number: int) -> Request:
    prompt = tuple(draw.choices(range(4), k=draw.randint(1, 30)))
    items: tuple[MultiModalItem, ...] = ()
    if len(prompt) > 6 and draw.random() < 0.5:
        items = (MultiModalItem(draw.choice("pq"), 1, 2), MultiModalItem("r", 4, len(prompt) - 4))
    return Request(
        draw.choice(("", "a", "zz")) + f"{draw.randrange(9)}-{number}",
        prompt,
        max_tokens=draw.randint(1, 12),
        adapter=draw.choice((None, None, "lora")),
        cache_salt=draw.choice((None, None, f"salt {number}")),
        items=items,
        prompt_embeds=prompt if draw.random() < 0.3 else (),
        priority=draw.randrange(2),
    )


WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, 6, sliding_window=5)
VARIED: tuple[dict[str, Any], ...] = (
    {},
    {"policy": Policy.PRIORITY, "max_loras": 1},
    {"groups": (KVGroup(GroupKind.FULL, 3), WINDOW), "enable_kv_cache_events": True},
)


@pytest.mark.parametrize("fields", VARIED, ids=["plain", "priority", "groups"])
def test_arrays_grow_and_leak_nothing(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests, rows, nodes, extras and tables exceed their first sizes, and all are freed."""
    monkeypatch.setattr(state_of_engine, "TABLE_ENTRIES", 300)
    monkeypatch.setattr(state_of_engine, "TABLE_BLOCKS", 1)
    draw = random.Random(3)
    config = Config(
        num_blocks=40, block_size=3, max_num_seqs=30, max_num_batched_tokens=50, **fields
    )
    engine, other = HostEngine(config), Oracle(config)
    first = engine.requests.state
    for number in range(150):
        assert apply_alike(engine, other, Submit(draw_request(draw, number))) == Ack()
        if number % 5 == 0:
            step_alike(engine, other, draw)
    while engine.requests.slot_of:
        step_alike(engine, other, draw)
        if draw.random() < 0.1:
            gone = draw.choice([*engine.requests.slot_of, "nobody"])
            apply_alike(engine, other, Abort((gone,)))
    state = engine.requests.state
    assert len(state.requests) > len(first.requests)
    assert len(state.lines) > len(first.lines)
    assert state.node_tables.shape[1] > first.node_tables.shape[1]
    assert len(state.nodes) > len(first.nodes)
    assert len(state.extras_uses) > len(first.extras_uses)
    apply_alike(engine, other, Reset(reset_running_requests=False))
    state = engine.requests.state
    assert not state.adapters.any()
    assert state.scalars[NUM_FREE_NODES] == len(state.nodes)
    assert not state.extras_uses[1:].any()
    batch_row, num_rows = int(state.scalars[FREE_BATCH_ROW]), 0
    while batch_row != NONE:
        batch_row, num_rows = int(state.lines[batch_row, NEXT_BATCH_ROW]), num_rows + 1
    assert num_rows == len(state.lines)


MISTAKES = {
    "a window is a token too long": ("window", "groups", (slice(None), state_of_engine.SPAN), 1),
    "a draft head's last block is not dropped": (
        "drafts",
        "groups",
        (0, state_of_engine.DROPPED),
        -1,
    ),
    "the gate counts too few blocks": (
        "states",
        "groups",
        (slice(None), state_of_engine.SPARE),
        -1,
    ),
    "an adapter too many runs": ("adapters", "scalars", state_of_engine.MAX_LORAS, 1),
    "a block is kept free": ("forks", "scalars", state_of_engine.NUM_KEPT_FREE, 1),
    "items are due too late": ("encoder", "scalars", state_of_engine.HAS_ITEMS, -1),
    "blocks that a frame uses are free": ("transfers", "scalars", state_of_engine.HAS_FENCES, -1),
    "prompts wait too long": ("cadence", "scalars", state_of_engine.PREFILL_INTERVAL, 1),
    "admission closes too late": ("tiers", "scalars", state_of_engine.LOW_FREE, -1),
}
"""Features, and places in the state where a number is changed."""


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_caught(name: str) -> None:
    feature, array, place, change = MISTAKES[name]

    def make_engine(config: Config) -> HostEngine:
        engine = HostEngine(config)
        changed = getattr(engine.requests.state, array)
        changed[place] = np.maximum(changed[place] + change, 0)
        return engine

    played = play_episodes(make_engine, 4_000, preset="small", with_features=(feature,), seed=3)
    assert played.first is not None


def test_unused_extras_are_reused() -> None:
    engine = HostEngine(Config(num_blocks=20, block_size=2, max_model_len=20))
    for number in range(300):
        engine.apply(Submit(Request("a", (1, 2, 3), cache_salt=f"salt {number}")))
        engine.apply(Abort(("a",)))
    assert len(engine.requests.extras.values) < 40


def pickle_and_back(engine: HostEngine) -> HostEngine:
    found: HostEngine = pickle.loads(pickle.dumps(engine))
    return found


@pytest.mark.parametrize("how", [copy.deepcopy, pickle_and_back])
def test_a_copy_is_independent_of_the_original(how: Callable[[HostEngine], HostEngine]) -> None:
    engine = HostEngine(Config(num_blocks=20, block_size=2, max_model_len=20))
    engine.apply(Submit(Request("a", (1, 2, 3), max_tokens=5)))
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    before, other = engine.snapshot(), how(engine)
    engine.commit_arrays(plan.frame_id, np.array([7], np.int32))
    engine.apply(Abort(("a",)))
    assert other.snapshot() == before
    other.commit_arrays(plan.frame_id, np.array([8], np.int32))
    request = other.snapshot().request("a")
    assert request is not None
    assert request.output_token_ids == (8,)


def test_each_row_of_a_request_begins_with_a_cache_line() -> None:
    engine = HostEngine(Config(num_blocks=200, block_size=2, max_model_len=20))
    for number in range(70):
        engine.apply(Submit(Request(f"r{number}", (1,), stop_token_ids=tuple(range(number)))))
        rows = engine.requests.state.requests
        assert rows.ctypes.data % LINE_BYTES == rows.strides[0] % LINE_BYTES == 0


def test_places_of_a_state_are_the_addresses_of_its_arrays() -> None:
    state = HostEngine(Config(num_blocks=4)).requests.state
    places = state.places
    assert state.places is places
    assert places[:2].tolist() == [state.scalars.ctypes.data, len(state.scalars)]
    assert places[-2:].tolist() == [state.scratch.ctypes.data, len(state.scratch)]
    for other in (copy.deepcopy(state), state._replace(scalars=state.scalars.copy())):
        assert other.places[0] == other.scalars.ctypes.data != places[0]


def test_requests_that_finish_together_have_their_own_reasons() -> None:
    engine = HostEngine(Config(num_blocks=20, block_size=2, max_model_len=20))
    for name, request in {
        "a": Request("a", (1, 2, 3), stop_token_ids=(8, 9)),
        "b": Request("b", (1, 2, 3), eos_token_id=9),
        "c": Request("c", (1, 2, 3), stop_token_ids=(8,)),
        "d": Request("d", (1, 2, 3), max_tokens=1),
        "e": Request("e", (1, 2, 3), stop_token_ids=(9,)),
    }.items():
        assert engine.apply(Submit(request)) == Ack(), name
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    outputs = engine.commit_arrays(plan.frame_id, np.full(5, 9, np.int32))
    assert isinstance(outputs, ArrayOutputs)
    assert outputs.ended == {
        0: (FinishReason.STOP, 9),
        1: (FinishReason.STOP, None),
        3: (FinishReason.LENGTH, None),
        4: (FinishReason.STOP, 9),
    }
    after = engine.schedule_arrays()
    assert isinstance(after, ArrayPlan)
    assert after.finished_req_ids == ("a", "b", "d", "e")
    assert after.request_ids == ["c"]


def test_tokens_of_any_integer_type_and_layout_are_accepted() -> None:
    engine = HostEngine(Config(num_blocks=20, block_size=2, max_model_len=20))
    for name in "ab":
        engine.apply(Submit(Request(name, (1, 2, 3), max_tokens=5)))
    for tokens in (np.array([4, 5]), np.array([6, 0, 7, 0], np.int32)[::2]):
        plan = engine.schedule_arrays()
        assert isinstance(plan, ArrayPlan)
        engine.commit_arrays(plan.frame_id, tokens)
    request = engine.snapshot().request("b")
    assert request is not None
    assert request.output_token_ids == (5, 7)


def test_arrays_that_a_frame_keeps_are_read_only() -> None:
    engine = HostEngine(Config(num_blocks=20, block_size=2, max_model_len=20))
    engine.apply(Submit(Request("a", (1, 2, 3), max_tokens=5)))
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    for array in (plan.slots, plan.num_scheduled_tokens, plan.block_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 10**6


def test_kv_events_of_commits_in_arrays_are_kept_until_read() -> None:
    config = Config(num_blocks=20, block_size=2, max_model_len=20, enable_kv_cache_events=True)
    engine, other = HostEngine(config), Oracle(config)
    expected: list[KVEvent] = []
    for it in (engine, other):
        it.apply(Submit(Request("a", (1, 2, 3), max_tokens=6)))
    for token in range(5):
        plan = engine.schedule_arrays()
        assert isinstance(plan, ArrayPlan)
        engine.commit_arrays(plan.frame_id, np.array([token], np.int32))
        other.apply(Schedule())
        outputs = other.apply(Commit(plan.frame_id, (RowTokens("a", (token,)),)))
        assert isinstance(outputs, Outputs)
        expected += outputs.kv_events
    assert len(expected) > 1
    assert engine.take_events() == tuple(expected)
    assert engine.take_events() == ()
    assert engine.snapshot() == other.snapshot()


def test_a_commit_in_arrays_is_checked_against_grammars() -> None:
    engine = HostEngine(Config(num_blocks=20, block_size=2, max_model_len=20))
    grammar = Grammar((((5, 0),),))
    request = Request("a", (1, 2, 3), max_tokens=6, structured_output=True, grammar=grammar)
    for event in (Submit(request), GrammarReady("a")):
        assert engine.apply(event) == Ack()
    plan = engine.schedule_arrays()
    assert isinstance(plan, ArrayPlan)
    assert plan.has_structured_output_requests
    before = engine.snapshot()
    assert engine.commit_arrays(0, np.array([6], np.int32)) == Rejected(RejectCode.BAD_RESULT)
    assert engine.snapshot() == before
    assert isinstance(engine.commit_arrays(0, np.array([5], np.int32)), ArrayOutputs)


@pytest.mark.parametrize("seed", range(4))
def test_labels_compare_like_ids(seed: int) -> None:
    draw = random.Random(seed)
    labels, known = Labels(), dict[str, int]()
    names = [f"{draw.randrange(10**6)}" for _ in range(60)]
    names += [f"5{'0' * count}1" for count in range(80, 0, -1)]  # each between two others
    for name in dict.fromkeys(names):
        known.update(labels.add(name))
        if draw.random() < 0.2:
            gone = draw.choice(list(known))
            labels.remove(gone)
            del known[gone]
        assert sorted(known, key=known.__getitem__) == sorted(known)
        assert len(set(known.values())) == len(known)


def test_extras_equal_those_of_the_specification() -> None:
    items = (MultiModalItem("p", 0, 3), MultiModalItem("q", 3, 4), MultiModalItem("p", 9, 1))
    tokens = tuple(range(12))
    request = Request(
        "a", tokens, adapter="lora", cache_salt="salt", items=items, prompt_embeds=tokens
    )
    assert list_extras(request, 2, 6) == [
        (
            "lora",
            None if index else "salt",
            get_item_keys(request, 2 * index, 2 * index + 2),
            (2 * index, 2 * index + 1),
        )
        for index in range(6)
    ]
    table = ExtrasTable()
    assert table.number_of(NOTHING) == 0
    numbers = [table.number_of(extras) for extras in list_extras(request, 2, 6)]
    assert numbers == [table.number_of(extras) for extras in list_extras(request, 2, 6)]
    assert len(set(numbers)) == 6


def test_branches_that_share_one_block_have_their_own_batch_rows() -> None:
    """More requests hold blocks than there are blocks."""
    config = Config(num_blocks=3, block_size=8, max_model_len=8, max_num_seqs=1, enable_forks=True)
    engine, other, draw = HostEngine(config), Oracle(config), random.Random(0)
    apply_alike(engine, other, Submit(Request("a", (1, 2, 3), max_tokens=4)))
    step_alike(engine, other, draw)
    for name in "bcd":
        assert apply_alike(engine, other, Fork("a", name, (5,))) == Ack()
        assert engine.snapshot() == other.snapshot()
    while engine.requests.slot_of:
        step_alike(engine, other, draw)
