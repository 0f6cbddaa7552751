"""Differences of answers and states: each names the field and shows both values on one line."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args

import pytest
from play_support.altered import alter, alter_each

from blockstep.conformance.lockstep.plan_equivalence import NOT_COMPARED as NOT_IN_A_PLAN
from blockstep.conformance.lockstep.plan_equivalence import only_plan
from blockstep.conformance.protocol.compare import (
    NOT_COMPARED,
    describe_block,
    name_key,
    observation_differences,
    snapshot_differences,
)
from blockstep.conformance.protocol.findings import shown_apart
from blockstep.spec import Config, Oracle, Plan, Request, Snapshot
from blockstep.spec import vocabulary as v
from blockstep.spec.vocabulary import Ack, BlockKey, Rejected
from blockstep.spec.vocabulary.observations import RejectCode


def snapshot() -> Snapshot:
    oracle = Oracle(Config(num_blocks=6, block_size=2))
    oracle.submit(Request("A", (1, 2, 3), max_tokens=3))
    oracle.schedule()
    return oracle.snapshot()


def rows(left: Snapshot, right: Snapshot) -> list[tuple[str, str, str]]:
    return [(row.field, row.expected, row.seen) for row in snapshot_differences(left, right)]


def test_equal_states_have_no_difference() -> None:
    assert snapshot_differences(snapshot(), snapshot()) == ()


def test_a_lost_block_shows_in_queue_and_block() -> None:
    left = snapshot()
    right = replace(left, free_queue=left.free_queue[1:])
    assert rows(left, right) == [
        ("free_queue", "[3, 4, 5]", "[4, 5]"),
        ("block 3", "free, no key", "no holder, not queued, no key"),
    ]


def test_a_stale_key_shows_in_block_and_map() -> None:
    left = snapshot()
    key = BlockKey(None, (8, 9), cache_salt="s")
    right = replace(
        left,
        block_keys=(*left.block_keys[:4], key, left.block_keys[5]),
        cached={**left.cached, key: (4,)},
    )
    assert rows(left, right) == [
        ("block 4", "free, no key", "free, carries #0[8,9] salt s"),
        ("cached #0[8,9] salt s", "-", "blocks 4"),
    ]


def test_a_request_differs_by_field() -> None:
    left = snapshot()
    right = replace(left, requests=(replace(left.requests[0], num_computed_tokens=9),))
    assert rows(left, right) == [("request A num_computed_tokens", "3", "9")]
    assert rows(left, replace(left, requests=())) == [("request A", "running", "no such request")]


def test_plans_differ_by_row_and_field() -> None:
    oracle = Oracle(Config(num_blocks=6, block_size=2))
    oracle.submit(Request("A", (1, 2, 3), max_tokens=3))
    plan = oracle.schedule()
    assert observation_differences(plan, plan) == ()
    other = replace(plan, new=(replace(plan.new[0], num_scheduled_tokens=1),))
    (row,) = observation_differences(plan, other)
    assert (row.field, row.expected, row.seen) == ("new A num_scheduled_tokens", "3", "1")


def test_answers_of_different_kinds_have_one_difference() -> None:
    (row,) = observation_differences(Ack(), Rejected(RejectCode.NEVER_FITS, "too long"))
    assert row.field == "observation"
    assert "never_fits" in row.seen
    assert observation_differences(Plan(0), None)[0].seen == "None"


def test_blocks_and_keys_are_described_in_words() -> None:
    assert describe_block(snapshot(), 1) == "held by 1, carries #0[1,2]"
    assert describe_block(snapshot(), 99) == "no such block"
    assert name_key(None) == "-"
    assert name_key(BlockKey(None, tuple(range(9)))) == "#0[0,1,2,3,4,5...]"


# Each field, alone.

REQUEST = v.Request(
    "A",
    (1, 2),
    eos_token_id=7,
    repetition_detection=v.RepetitionDetection(3),
    adapter="a",
    cache_salt="s",
    job_id="j",
    items=(v.MultiModalItem("i", 0, 1),),
    structured_output=True,
    grammar=v.Grammar((((1, 0),),)),
)
KEY = BlockKey(BlockKey(None, (0, 1)), (2, 3), "a", "s", (("i", 0),), 1, (4, 5))
STATE = v.Snapshot(
    pause_state=v.PauseState.UNPAUSED,
    waiting=("B",),
    skipped_waiting=(),
    running=("A",),
    requests=(v.RequestSnapshot("A", v.Status.RUNNING), v.RequestSnapshot("B", v.Status.WAITING)),
    ref_counts=(0, 1, 0),
    free_queue=(2,),
    block_keys=(None, KEY, None),
    cached={KEY: (1,)},
    frames_in_flight=(0,),
    next_frame_id=1,
    finished_req_ids=(),
    prev_scheduled_req_ids=("A",),
    stats=v.Stats(),
    encoder=v.EncoderSnapshot((v.EncoderEntry("i", 1, ("A",)),), ("j",), 1, 2, ("k",)),
)
ANSWERS: list[v.Observation] = [
    v.Plan(0, new=(v.NewRow(REQUEST, ((1,),), 0, 2),),
        cached=(v.CachedRow("B", False, ((2,),), (1, 2), 1, 1, 1),),
        scheduled_encoder_inputs=(v.EncoderInputs("A", (0,)),),
        kv_loads=(v.KVLoad("A", ((1,),), 0, 2),), kv_saves=(v.KVSave("C", ((3,),), 2),)),
    v.Outputs((v.OutputRow("A", (3,), v.FinishReason.STOP, 3),),
        (v.BlockStored((KEY,), KEY, (1, 2), 2, "x"), v.BlockRemoved((KEY,)), v.AllBlocksCleared())),
    v.DraftsTaken(("A",)),
    v.Aborted(("A",), ("B",)),
    v.ResetDone(True),
    v.GrammarOutput((v.GrammarRow("A", ((1, 2), None), (1,)),)),
    v.Rejected(RejectCode.NEVER_FITS, "too long"),
]  # fmt: skip
"""One answer of each kind that has fields, with a value in each field."""


def test_every_kind_of_answer_and_record_is_altered() -> None:
    """A new kind of answer must be added to `ANSWERS`; only `Ack`, which has no fields, is not."""
    kinds = {owner for answer in ANSWERS for owner, _, _ in alter_each(answer)}
    kinds |= {owner for owner, _, _ in alter_each(STATE)}
    assert {type(answer) for answer in ANSWERS} == {*get_args(v.Observation)} - {v.Ack}
    assert kinds > {v.NewRow, v.CachedRow, v.OutputRow, v.Request, v.RequestSnapshot, v.Stats}


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_a_changed_field_of_an_answer_is_named(answer: v.Observation) -> None:
    for owner, name, other in alter_each(answer):
        found = observation_differences(answer, other)
        if name in NOT_COMPARED.get(owner, {}):
            assert found == ()
        elif name == "request_id":
            assert [row.expected for row in found] == ["there", "-"]  # rows of different requests
        else:
            assert [row.field.split()[-1] for row in found] == [name], (owner, name)


SHOWN_AS = {"ref_counts": "block", "request_id": "request"}


def test_a_changed_field_of_a_state_is_named() -> None:
    for owner, name, other in alter_each(STATE):
        words = {word for row in snapshot_differences(STATE, other) for word in row.field.split()}
        assert SHOWN_AS.get(name, name) in words, (owner, name)


def test_a_changed_part_of_a_key_is_a_difference() -> None:
    parts = {name: getattr(KEY, name) for name in BlockKey.__slots__ if name[0] != "_"}
    for name, value in parts.items():
        other = BlockKey(**{**parts, name: None if name == "parent" else alter(value)})
        right = replace(STATE, block_keys=(None, other, None), cached={other: (1,)})
        fields = {row.field.split()[0] for row in snapshot_differences(STATE, right)}
        assert fields in ({"block", "cached"}, {"block_keys", "cached"}), name


def test_order_alone_is_a_difference() -> None:
    found = snapshot_differences(STATE, replace(STATE, requests=STATE.requests[::-1]))
    assert {row.field.split()[0] for row in found} == {"requests"}
    twice = replace(STATE, cached={KEY: (1, 2)})
    found = snapshot_differences(twice, replace(STATE, cached={KEY: (2, 1)}))
    assert [(row.expected, row.seen) for row in found] == [("blocks 1, 2", "blocks 2, 1")]


def test_a_field_that_is_not_compared_has_a_reason() -> None:
    """A field is left out where it is declared, and listed with the reason."""
    kinds = {owner for record in [*ANSWERS, STATE] for owner, _, _ in alter_each(record)}
    left_out = {
        kind: {part.name for part in fields(kind) if not part.compare}
        for kind in kinds
        if not all(part.compare for part in fields(kind))
    }
    assert left_out == {kind: {*names} for kind, names in NOT_COMPARED.items()}


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_at_plan_each_field_is_compared_unless_it_is_listed(answer: v.Observation) -> None:
    for owner, name, other in alter_each(answer):
        if owner in get_args(v.KVEvent):
            assert "kv_events" in NOT_IN_A_PLAN[type(answer)]
            continue
        left_out = {*NOT_IN_A_PLAN.get(owner, {}), *NOT_COMPARED.get(owner, {})}
        assert (only_plan(other) == only_plan(answer)) is (name in left_out), (owner, name)


def test_rows_that_only_one_plan_has_are_named() -> None:
    """The first row is equal; its long text once hid the second."""
    oracle = Oracle(Config(num_blocks=6, block_size=2))
    oracle.submit(Request("A", (1, 2, 3), max_tokens=3))
    oracle.submit(Request("B", (1, 2, 3), max_tokens=3))
    plan = oracle.schedule()
    shorter = replace(plan, new=plan.new[:1])
    found = [(row.field, row.expected, row.seen) for row in observation_differences(plan, shorter)]
    assert found == [("new B", "there", "-")]
    other = replace(plan.new[0], num_scheduled_tokens=1)
    (row,) = observation_differences(plan, replace(plan, new=(other, plan.new[1])))
    assert (row.field, row.seen) == ("new A num_scheduled_tokens", "1")


def test_long_texts_are_cut_where_they_differ() -> None:
    one, other = "x" * 300 + "a" + "x" * 300, "x" * 300 + "b" + "x" * 300
    left, right = shown_apart(one, other, 40)
    assert (len(left), len(right)) == (40, 40)
    assert left != right
    assert shown_apart("a", "b", 40) == ("a", "b")
    assert shown_apart("a" + one, "b" + one, 40) == ("a" + "x" * 36 + "...", "b" + "x" * 36 + "...")
    left, right = shown_apart(one, one[:200], 40)
    assert left != right


def test_lists_that_differ_after_their_twelfth_entry_look_different() -> None:
    left = snapshot()
    right = replace(left, finished_req_ids=tuple("abcdefghijklmnop"))
    left = replace(left, finished_req_ids=tuple("abcdefghijklmnoq"))
    ((_, mine, theirs),) = rows(left, right)
    assert mine != theirs
